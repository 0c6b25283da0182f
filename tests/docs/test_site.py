"""Links lead somewhere, options exist, computed numbers are right, and the site is built without a warning."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from copies import COPIES, copy_of
from pages import PAGES, ROOT, anchors, blocks, commands, is_shell, links, spans

import vitruvian
from vitruvian.cli.app import app
from vitruvian.training.planning import cluster_lines, cluster_plan

IDS = [str(page.relative_to(ROOT)) for page in PAGES]
TASK_PAGES = [
    *("predict", "explain", "segment", "anomaly", "zero_shot", "serving"),
    *("speed", "export", "optimize", "bulk", "doctor", "map", "pack"),
    *("training", "finetune", "masked", "machines", "evaluate", "compare", "probe", "study", "advise"),
]
COMMANDS = {"serving": "serve", "training": "train"} | {
    name: name
    for name in (
        *("predict", "explain", "segment", "anomaly", "export", "optimize", "doctor", "map", "pack"),
        *("finetune", "evaluate", "compare", "probe", "study"),
    )
}
"""Task pages about one command."""
HEADINGS = ("Commands", "Options", "Python", "How it works", "Measured", "Limits")
"""Second-level headings of every task page, in this order; "Measured" may be missing."""
LANGUAGES = {"", "python", "sh", "text", "json", "toml", "yaml", "nginx", "console"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in links(page):
        found = urlsplit(link)
        if found.scheme:
            assert found.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", found.netloc), link
            continue
        target = page.parent / found.path if found.path else page
        assert target.is_file(), f"{link}: no such file"
        if found.fragment:
            assert found.fragment in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("name", TASK_PAGES)
def test_task_pages_have_the_same_headings(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert headings == [heading for heading in HEADINGS if heading in headings or heading != "Measured"]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/start.md", "docs/concepts.md"])
def test_sentences_on_the_first_pages_are_short(name):
    text = re.sub(r"^```.*?^```$|^\|.*$|^#.*$|<!--.*?-->", "", (ROOT / name).read_text("utf-8"), flags=re.M | re.S)
    sentences = re.split(r"(?<=[.!?:])\s+|\n\n+", text)
    assert [sentence for sentence in sentences if len(sentence.split()) > 40] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_say_what_they_are(page):
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0
    assert {block.language for block in blocks(page)} <= LANGUAGES


def options() -> dict[str, set[str]]:
    """The options of every command, those of a group's commands under the group's name."""
    found: dict[str, set[str]] = {}
    for name, command in typer.main.get_command(app).commands.items():
        parts = [command, *getattr(command, "commands", {}).values()]
        found[name] = {word for part in parts for parameter in part.params for word in parameter.opts} | {"--help"}
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_the_text_exist_with_their_options(page):
    known = options()
    for span in spans(page):
        for command in re.findall(r"(?:^|\| |&& )vit (.*)", span):
            name, *words = command.split()
            if name.startswith("-"):
                continue
            assert name in known, f"`vit {command}`: no such command"
            for word in words:
                if word.startswith("--"):
                    assert word.split("=")[0] in known[name], f"`vit {command}`: no option {word}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_task_page_lists_options_of_its_command(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    section = text.partition("\n## Options\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(--[\w-]+)", section))
    assert listed
    assert listed <= options()[COMMANDS[name]]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_targets_and_extras_that_a_page_names_exist(page):
    said = [*spans(page), *(command for block in blocks(page) if is_shell(block) for command in commands(block))]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for text in said:
        for file in re.findall(r"\b(?:benchmarks|tests|src|docs)/[\w/.-]+\.(?:py|md|toml|csv|ipynb)\b", text):
            assert (ROOT / file).is_file(), f"`{text}`: no such file"
        assert set(re.findall(r"^make (\w+)", text)) <= set(targets), f"`{text}`: no such target"
        for names in re.findall(r"^pip install .*\[([\w,]+)\]", text):
            assert set(names.split(",")) <= set(extras), f"`{text}`: no such extra"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_names_in_the_text_exist(page):
    for name in re.findall(r"(?<![\w/.-])vitruvian(?:\.[A-Za-z_]\w*)+", " ".join(spans(page))):
        assert name.endswith(".json") or pkgutil.resolve_name(name) is not None


def test_the_map_in_contributing_names_modules_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The map")[2].partition("\n## ")[0]
    named = {
        name.rstrip("/") for row in re.findall(r"^\|.*$", text, re.MULTILINE) for name in re.findall(r"`([\w/]+)`", row)
    }
    paths = (ROOT / "src" / "vitruvian").rglob("*")
    assert named - {path.stem for path in paths} == {"open_dataset"}


def test_the_walks_in_contributing_name_functions_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert len(steps) == 20
    for function, file in steps:
        tree = ast.parse((ROOT / "src" / "vitruvian" / file).read_text(encoding="utf-8"))
        for name in function.split("."):
            tree = next(node for node in tree.body if getattr(node, "name", "") == name)


def test_costs_on_other_machines_are_those_of_the_command():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\|[^|]+\| `((?:paper|finetune|imagenet)[^`]*)` \| ([\d.,]+) \| ([^|]+) \| ([\d.]+) \|", text, re.M
    )
    assert len(rows) == 27
    for words, flops, time, days in rows:
        recipe, *more = words.split()
        settings = [more[place + 1] for place, word in enumerate(more) if word == "--set"]
        model = more[more.index("--arch") + 1] if "--arch" in more else None
        lines = "\n".join(cluster_lines(cluster_plan(recipe, "8 x A100", model=model, settings=settings)))
        assert f"({flops} exaFLOPs)" in lines, (words, lines)
        assert f"{time} on 8 x A100, {days} accelerator-days" in lines, (words, lines)


def pages_in(nav: object) -> list[str]:
    parts = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else [nav]
    return [nav] if isinstance(nav, str) else [page for part in parts for page in pages_in(part)]


def test_every_page_is_in_the_navigation_once():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    written = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent == ROOT / "docs"]
    assert sorted(pages_in(settings["nav"])) == sorted(written)


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: vitruvian\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(vitruvian.__all__) - {"ModelConfig"})  # a union of two that are there


@pytest.mark.parametrize("name", sorted(set(vitruvian.__all__) - {"ModelConfig"}))
def test_what_the_reference_shows_has_a_docstring(name):
    """The site leaves out what has none."""
    shown = getattr(vitruvian, name)
    parts = vars(shown) if inspect.isclass(shown) else {}
    found = {key: part.fget if isinstance(part, property) else part for key, part in parts.items() if key[0] != "_"}
    methods = {key: part for key, part in found.items() if callable(part) or isinstance(part, classmethod)}
    without = [key for key, part in methods.items() if not inspect.getdoc(part) and not key.startswith("check")]
    assert inspect.getdoc(shown)
    assert not without


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    for name in ("docs", "mkdocs.yml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name in ("src", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = sorted(Path(tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES) - 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?(https?:[^" >]+)', text), page.name
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert 'id="vitruvian.load"' in reference
    assert 'id="vitruvian.load.load"' not in reference, "the module is shown instead of the function"


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_import_what_exists(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vitruvian":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")


def test_commands_are_recognized_in_every_page_that_has_some():
    """So that a block of commands is not taken for output by mistake."""
    for page in PAGES:
        for block in blocks(page):
            if not block.language and not is_shell(block):
                assert not re.search(r"^(vit|torchrun|curl|pip) ", block.text, re.MULTILINE), block.where


@pytest.mark.parametrize("page", COPIES)
def test_a_copied_page_is_that_of_its_file(page):
    assert (ROOT / page).read_text(encoding="utf-8") == copy_of(COPIES[page]), "run `python tests/docs/copies.py`"

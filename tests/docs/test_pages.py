"""What a page tells to type runs, its commands and its Python, on tiny stand-ins for the files that it names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree

import httpx
import pytest
import torch
from pages import PAGES, ROOT, Block, blocks, commands, is_shell
from smaller import ELSEWHERE, NOT_RUN, RUN_ON, SMALLER_CODE, STAND_INS, TESTED_ELSEWHERE, UNAVAILABLE, smaller
from world import environment, make_world, names

from forked import Forked, Ran, ranks

SECONDS = 600
"""For a command, on however slow a machine."""

SHELL = r"""
said() { printf '%s\0' "$@" $'\n' >> "$CALLS"; }
sbatch() { SLURM_ARRAY_TASK_ID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=here bash -c "${@: -1}"; }
srun() { "$@"; }
scontrol() { echo localhost; }
""" + "".join(f'{name}() {{ said {name} "$@"; }}\n' for name in ("vit", "torchrun", "curl", *NOT_RUN))
"""Where a real shell has split and expanded a command, each program that it would start is written down."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


RUN_ONCE = {
    page: {command for block in blocks(ROOT / "docs" / page) if is_shell(block) for command in commands(block)}
    for page in RUN_ON.values()
}
"""The commands of the pages that run commands for all pages."""


class Page:
    """One page in a copy of the world: what it says is done in its order, and a service stays up to the end."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.names = names(root, name)
        self.services: list[Forked] = []
        self.address = ""

    def calls(self, command: str) -> Iterator[list[str]]:
        """The programs that a shell would start for a command, with their words."""
        for far, near in STAND_INS:
            command = command.replace(far, near)
        command = re.sub(r"\[(--[^]]+)\]", r"\1", command).replace("auto|jpeg|pixels", "auto")  # a usage line
        prelude, listed = self.root / "prelude.sh", self.root / "calls"
        prelude.write_text(SHELL)
        listed.unlink(missing_ok=True)
        env = {**os.environ, "BASH_ENV": str(prelude), "CALLS": str(listed)}
        shell = subprocess.run(["bash", "-euc", command], env=env, capture_output=True, text=True, timeout=60)
        assert shell.returncode == 0, f"{command}: {shell.stderr}"
        for call in listed.read_text().split("\0\n\0")[:-1]:
            yield call.split("\0")

    def do(self, command: str) -> Ran | None:
        """Run a command; the last program's result."""
        ran = None
        for program, *words in self.calls(command):
            if program == "curl":
                assert self.address, "no service is running"
                ran = self.curl(words)
            elif program == "torchrun":
                words = words[words.index("-m") + 2 :]
                for process in ranks(*smaller(words)):
                    ran = passed(process.wait(SECONDS), command)
            elif program == "vit" and words[0] == "serve":
                self.serve(words)
            elif program == "vit" and self.name != (page := RUN_ON.get(words[0])) and command in RUN_ONCE.get(page, ()):
                continue
            elif program == "vit" and not any(some in command for some in TESTED_ELSEWHERE):
                make_room(words)
                ran = passed(Forked(*smaller(words)).wait(SECONDS), command)
            else:
                assert program in NOT_RUN or program == "vit"
        return ran

    def serve(self, words: list[str]) -> None:
        self.services.append(Forked(*smaller(words)))
        told = partial(self.services[-1].printed, 2)
        self.services[-1].until(lambda: "serving http" in told())
        self.address = re.search(r"serving (http\S+)", told())[1]

    def curl(self, words: list[str]) -> Ran:
        """A form as curl would send it."""
        fields = [words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "-F"]
        files = [(name, Path(value[1:]).read_bytes()) for name, value in fields if value[0] == "@"]
        data = {name: value for name, value in fields if value[0] != "@"}
        answer = httpx.post(self.local(words[-1]), data=data, files=files, timeout=60)
        assert answer.status_code == 200, answer.text
        return Ran(0, answer.text, "")

    def local(self, text: str) -> str:
        return text.replace("http://127.0.0.1:8000", self.address or "http://127.0.0.1:8000")

    def run(self, block: Block) -> None:
        if is_shell(block):
            for command in commands(block):
                ran = self.do(command)
                if f"$ {command}" in block.text:
                    assert ran.out.strip() == block.text.partition("\n")[2].strip(), ran
        elif block.language == "python":
            padding = "\n" * block.line  # so that a traceback names the page's line
            text = self.local(block.text)
            for large, small in SMALLER_CODE:
                text = text.replace(large, small)
            code = compile(padding + text, block.where, "exec")
            if not re.search(rf"\b(import ({'|'.join(UNAVAILABLE)})|({'|'.join(UNAVAILABLE)})\.)", text):
                exec(code, self.names)
                sys.stdout.flush()  # before a copy of this process inherits it

    def close(self) -> None:
        for service in self.services:
            assert service.kill(signal.SIGTERM).code in (0, -signal.SIGTERM)


def make_room(words: list[str]) -> None:
    """Take away the model that stands for a run which a page makes itself."""
    makes = words[0] in ("train", "finetune") and "--out" in words
    out = Path(words[words.index("--out") + 1]) if makes else None
    if out and out.is_dir() and not any((out / f"{kind}.json").is_file() for kind in ("run", "sweep")):
        rmtree(out)


def passed(ran: Ran, command: str) -> Ran:
    assert ran.code == 0, f"{command}: exit {ran.code}\n{ran.out}\n{ran.err}"
    assert "Traceback" not in ran.err, f"{command}: {ran.err}"
    return ran


def to_type(page: Path) -> list[Block]:
    python = page.name != "CONTRIBUTING.md"  # its own is that of test_extending.py and test_extending_data.py
    return [block for block in blocks(page) if is_shell(block) or (python and block.language == "python")]


def hasten() -> None:
    """No compiler, one number of merged tokens, one other engine; and int8, which does not pay in tiny models, does."""
    from vitruvian.compress import fewer_tokens, optimize

    compiler = torch.compile
    torch.compile = lambda model: compiler(model, backend="eager")
    fewer_tokens.MERGED_SHARES = (0.25,)
    optimize.installed = lambda: ["torch", "onnxruntime"]
    optimize.quantize.__kwdefaults__["timer"] = lambda forwards, pixels: {"float": 2.0, "int8": 1.0}


NAMES = {str(page.relative_to(ROOT)): page for page in PAGES if to_type(page)}
HERE = {name: page for name, page in NAMES.items() if name not in ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_what_a_page_tells_to_type_works(name, base, tmp_path):
    copytree(base, tmp_path, symlinks=True, dirs_exist_ok=True)

    def all_of_it() -> None:
        os.chdir(tmp_path)
        hasten()
        here, wrong = Page(tmp_path, HERE[name].name), 0
        for block in to_type(HERE[name]):
            try:
                here.run(block)
            except (Exception, pytest.fail.Exception):
                wrong += 1
                print(f"\n{block.where}:\n{traceback.format_exc(limit=-3)}", file=sys.stderr, flush=True)
        here.close()
        sys.exit(wrong)

    ran = Forked(env=environment(tmp_path), work=all_of_it).wait(3 * SECONDS)
    assert ran.code == 0, ran.err

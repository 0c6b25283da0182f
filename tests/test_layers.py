"""Imports point down the rows of the design, and importing the package does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitruvian

PACKAGE = Path(vitruvian.__file__).parent
ROWS = [
    ["errors", "settings", "config", "catalog", "cost", "tasks"],
    ["files", "cache", "text", "progress", "machine", "report"],
    ["model"],
    ["data"],
    ["weights"],
    ["engines"],
    ["inference"],
    ["evaluation"],
    ["training", "explain", "bulk", "compress"],
    ["study"],
    ["cli", "serve", "__main__"],
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
STRANGERS = {"model": {"data"}, "data": {"model"}}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_parts(path):
    """First parts of the vitruvian modules a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "vitruvian" else [f"vitruvian.{a.name}" for a in node.names]
        for name in names:
            if name.startswith("vitruvian."):
                yield name.split(".")[1]


def violations():
    """Every import that points the wrong way, in words."""
    for path in modules():
        name = path.relative_to(PACKAGE)
        part = name.parts[0].removesuffix(".py")
        if part not in ROW:
            yield f"{name} has no row in the design"
            continue
        for other in set(imported_parts(path)) - {"__version__"}:
            if ROW[other] > ROW[part]:
                yield f"{name} imports {other}, which lies below it"
            if other in STRANGERS.get(part, ()):
                yield f"{name} imports {other}: the two must not know each other"


def test_modules_import_only_from_their_row_or_above():
    assert list(violations()) == []


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_loads_no_torch_and_sets_nothing_up():
    code = "import logging, sys, vitruvian; print({'torch', 'numpy'} & set(sys.modules), logging.root.handlers)"
    assert run(code) == "set() []"


def test_the_floor_loads_no_torch():
    code = (
        "import sys, vitruvian.files, vitruvian.text, vitruvian.progress; print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert run(code) == "set()"


NAMES = (
    "Certificate Classifier Explainer ImageResult Interrupted Listener MapSettings ModelConfig Numerics Prediction "
    "Preprocess Recipe ResNet ResNetConfig Run StemConfig ViT ViTConfig VitruvianError build convert create_model "
    "embed embed_images embed_texts evaluate export features finetune load merge optimize preprocess_image probe "
    "protocol_for quantize ray read_recipe resume save similar train transform with_merging with_words"
)


def test_public_names_are_these():
    assert vitruvian.__all__ == NAMES.split()
    for name in vitruvian.__all__:
        assert getattr(vitruvian, name) is not None


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="No vitruvian attribute transformer"):
        vitruvian.transformer  # noqa: B018


def test_no_two_test_files_share_a_name():
    """pytest imports them by that name alone, and would collect only one of the two."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []

"""Imports point down the rows of the design and form no cycles; a name is used once; importing has no effect."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import vitruvian

PACKAGE = Path(vitruvian.__file__).parent
ROWS = [
    ["text", "errors", "settings", "targets", "config", "catalog", "cost", "tasks"],
    ["files", "cache", "progress", "machine", "report"],
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


def module_name(path):
    parts = ("vitruvian", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module):
    """The vitruvian modules that a module imports anywhere: at its top, in functions, or for type checkers alone."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in TREES)
        elif isinstance(node, ast.ImportFrom) and node.module in TREES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in TREES else node.module


GRAPH = {module: set(imports(module)) - {module, "vitruvian"} for module in TREES}


def violations():
    """Every import that points the wrong way, as text."""
    for module in set(GRAPH) - {"vitruvian"}:
        part = module.split(".")[1]
        if part not in ROW:
            yield f"{module} has no row in the design"
            continue
        for other in {name.split(".")[1] for name in GRAPH[module]}:
            if ROW[other] > ROW[part]:
                yield f"{module} imports {other}, which is in a row below it"
            if other in STRANGERS.get(part, ()):
                yield f"{module} imports {other}: the two must not know each other"


def test_modules_import_only_from_their_row_or_above():
    assert list(violations()) == []


def reachable(module):
    reached, stack = set(), [module]
    while stack:
        new = GRAPH[stack.pop()] - reached
        reached |= new
        stack += new
    return reached


def test_no_modules_import_each_other_in_a_cycle():
    reach = {module: reachable(module) for module in GRAPH}
    cyclic = [module for module in GRAPH if module in reach[module]]
    cycles = {tuple(sorted(other for other in reach[module] if module in reach[other])) for module in cyclic}
    assert cycles == set()


def loaded_by_name():
    """Calls that import one of our own modules by a string."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                argument = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                text = argument.value if isinstance(argument, ast.Constant) else ""
                if function in ("import_module", "__import__", "require") and str(text).startswith(("vitruvian", ".")):
                    yield f"{module}, line {node.lineno}"


def test_no_module_of_ours_is_imported_by_a_string():
    assert list(loaded_by_name()) == []


def test_a_class_name_is_defined_once_in_the_package():
    classes = [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name, count in Counter(classes).items() if count > 1} == set()


def test_a_file_name_is_used_at_most_twice():
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert {name for name, count in names.items() if count > 2} == set()


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_importing_the_package_loads_no_torch_and_sets_nothing_up():
    code = "import logging, sys, vitruvian; print({'torch', 'numpy'} & set(sys.modules), logging.root.handlers)"
    assert run(code) == "set() []"


def test_the_floor_loads_no_torch():
    code = (
        "import sys, vitruvian.files, vitruvian.text, vitruvian.progress; print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert run(code) == "set()"


NAMES = (
    "AnomalyDetector Certificate Classifier Client Explainer FeatureModel ImageResult Interrupted Listener LoraConfig "
    "MapSettings ModelConfig ModelMeta Numerics Prediction Preprocess Recipe ResNet ResNetConfig Run Segmenter "
    "StemConfig ViT ViTConfig ViT_B_16_Weights ViT_B_32_Weights ViT_H_14_Weights ViT_L_16_Weights ViT_L_32_Weights "
    "VitruvianError add_classes add_lora advise build compare convert create_model embed embed_images embed_texts "
    "evaluate export features finetune list_models load merge open_dataset optimize preprocess_image probe "
    "protocol_for push quantize ray read_recipe resume save save_adapter similar train train_anomaly_detector "
    "train_segmenter transform vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 with_adapter with_merging with_words"
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

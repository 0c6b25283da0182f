"""The notebooks run as they are, offline, and carry no outputs."""

from __future__ import annotations

import ast
import json
import os
import tempfile

import pytest
from pages import ROOT
from world import environment

from forked import Forked

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(path):
    """Every cell in its order, as a notebook program does it: the value of a last expression is shown."""
    names, tempfile.tempdir = {"__name__": "__main__"}, os.getcwd()
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), names)
            print("shown:", type(value).__name__)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_as_it_is(path, tmp_path):
    ran = Forked(env=environment(tmp_path), first=lambda: os.chdir(tmp_path), work=lambda: run(path)).wait()
    assert ran.code == 0, ran.err
    assert "shown: Image" in ran.out, "no picture is shown"


def test_there_are_three_notebooks_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["figure-7", "looking-inside", "own-images"]
    for path in NOTEBOOKS:
        code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path.name

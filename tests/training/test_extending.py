"""CONTRIBUTING's loss, optimizer and schedule: each works from its few lines alone."""

import re
from pathlib import Path

import pytest
from runs import TINY

from vitruvian.errors import ConfigError
from vitruvian.training import Recipe, objective, optimizer, train

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("setting", "module", "table"),
    [
        ("loss=focal", objective, objective.LOSSES),
        ("optimizer=radam", optimizer, optimizer.OPTIMIZERS),
        ("schedule=square_root", optimizer, optimizer.SCHEDULES),
    ],
)
def test_a_function_and_a_row_are_all_that_a_new_one_needs(tmp_path, monkeypatch, setting, module, table):
    name = setting.partition("=")[2]
    (code,) = (block for block in re.findall("```python\n(.*?)```", TEXT, re.DOTALL) if f'"{name}"' in block)
    monkeypatch.setitem(table, name, None)  # taken out again afterwards
    exec(code, vars(module).copy())
    run = train("digits", out=tmp_path / "run", settings=[*TINY, "steps=5", setting])
    assert run.finished
    assert setting.replace("=", ' = "') in (run.folder / "recipe.toml").read_text()


@pytest.mark.parametrize("setting", ["loss", "optimizer", "schedule"])
def test_a_name_that_is_in_no_table_is_refused_when_the_recipe_is_made(setting):
    with pytest.raises(ConfigError, match=f"{setting}='consine' is not one of "):
        Recipe(epochs=1, **{setting: "consine"})

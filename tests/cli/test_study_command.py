"""`vit study`: its commands, what it prints, and one line for what is wrong."""

import json

import pytest
import typer

from vitruvian.cli.app import app

OPTIONS = {
    "table5": "--models --tasks --out --quick --recipe --seeds --set --data-root --json",
    "vtab": "--models --out --quick --recipe --seeds --set --data-root --json",
    "data-size": "--sizes --steps --recipes --out --set --plan --json",
    "compute": "--steps --images --recipes --out --set --plan --json",
}


def test_commands_and_their_options_are_these():
    commands = typer.main.get_command(app).commands["study"].commands
    found = {
        name: {flag for option in command.params for flag in option.opts if flag.startswith("-")} - {"--help"}
        for name, command in commands.items()
    }
    assert found == {name: set(flags.split()) for name, flags in OPTIONS.items()}
    assert all(option.help for command in commands.values() for option in command.params if option.name != "help")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["table5"], 2, "Missing option '--models'"),
        (["table5", "--models", ","], 2, "give weights to start from"),
        (["table5", "--models", "m", "--tasks", "petz"], 1, "pets"),
        (["table5", "--models", "./nothing", "--tasks", "pets"], 1, "error: nothing: no such file or folder"),
        (["data-size", "digits", "--sizes", "1e3"], 2, "for --sizes: '1e3' is not a list of positive integers"),
        (["data-size", "digits", "--sizes", "9999999"], 1, "max_train_samples=9999999: "),
        (["data-size", "./nowhere"], 1, "error: "),
        (["compute", "digits", "--recipes", "study-cnn"], 1, "study-cnn"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(vit, tmp_path, monkeypatch, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    found = vit("study", *arguments)
    assert found.code == code
    assert text in found.err
    assert found.out == ""


@pytest.mark.parametrize(("command", "words"), [(["table5", "--tasks", "pets"], "97.11"), (["vtab"], "77.63")])
def test_a_study_without_any_images_names_them_and_fails(vit, weights, tmp_path, command, words):
    found = vit("study", *command, "--models", weights, "--data-root", tmp_path, "--out", tmp_path / "study")
    assert found.code == 1
    assert words in found.out  # the paper's, beside what is missing
    assert "missing: " in found.out


@pytest.mark.slow
def test_a_compute_study_prints_its_cells_and_plans_them(vit, tmp_path):
    arguments = ["study", "compute", "digits", "--steps", "1,2", "--images", "40", "--recipes", "study-vit"]
    changes = ["--set", "workers=0", "--set", "batch_size=8", "--set", "image_size=16", "--out", tmp_path / "study"]
    planned = vit(*arguments, *changes, "--plan")
    assert planned.code == 0, planned.err
    assert "2 cells in" in planned.out
    assert not (tmp_path / "study").exists()
    done = vit(*arguments, *changes, "--json")
    assert done.code == 0, done.err
    first, second = map(json.loads, done.out.splitlines())
    assert (first["images"], first["steps"], second["steps"]) == (40, 1, 2)
    assert second["multiply_adds"] == 2 * first["multiply_adds"]
    shown = vit(*arguments, *changes)
    assert "multiply-adds" in shown.out
    assert "study.png" in shown.out

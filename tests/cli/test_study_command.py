"""`vit study`: its commands, what it prints, and one line for what is wrong."""

import json
import re

import pytest
import typer

from vitruvian.cli.app import app
from vitruvian.study.ablation import study_kinds

OPTIONS = {
    "table2": "--models --tasks --out --quick --recipe --seeds --set --data-root --json",
    "table5": "--models --tasks --out --quick --recipe --seeds --set --data-root --json",
    "vtab": "--models --out --quick --recipe --seeds --set --data-root --json",
    "speed": "--models --sizes --batches --memory --rounds --device --out --json",
    **dict.fromkeys(study_kinds(), "--recipe --rows --columns --seeds --out --set --plan --json"),
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
        (["data-size", "digits", "--columns", "1e3"], 1, "unknown column '1e3'"),
        (["data-size", "digits", "--columns", "9999999"], 1, "max_train_samples=9999999: "),
        (["speed", "--sizes", "1e3"], 2, "for --sizes: '1e3' is not a list of integers from 1 to 65,536"),
        (["speed", "--models", "ViT-Q/16"], 1, "ViT-Q/16"),
        (["head", "digits", "--recipe", "paper-jft-b"], 1, "set eval_fewshot to the data"),
        (["data-size", "./nowhere"], 1, "error: "),
        (["compute", "digits", "--rows", "study-cnn"], 1, "study-cnn"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(vit, tmp_path, monkeypatch, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    found = vit("study", *arguments)
    assert found.code == code
    assert text in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["table2"], r"L/16, JFT-300M +87\.76 ± 0\.03 +90\.54 ± 0\.03 .* 76\.28 ± 0\.46"),
        (["table5", "--tasks", "pets"], r"97\.11"),
        (["vtab"], r"vtab-Structured +mean of 0 of 8 +- +65\.0 +63\.0 +57\.5\b"),
    ],
)
def test_a_study_without_any_images_names_them_and_fails(vit, weights, tmp_path, command, words):
    found = vit("study", *command, "--models", weights, "--data-root", tmp_path, "--out", tmp_path / "study")
    assert found.code == 1
    assert re.search(words, found.out)  # the paper's, beside what is missing
    assert "arXiv 2010.11929v2; here the weights are those of --models" in found.out
    assert "missing: " in found.out


@pytest.mark.slow
def test_a_compute_study_prints_its_cells_and_plans_them(vit, tmp_path):
    arguments = ["study", "compute", "digits", "--columns", "1,2", "--rows", "ViT", "--seeds", "1"]
    settings = ("workers=0", "batch_size=8", "image_size=16", "max_train_samples=40")
    changes = [*(word for setting in settings for word in ("--set", setting)), "--out", tmp_path / "study"]
    planned = vit(*arguments, *changes, "--plan")
    assert planned.code == 0, planned.err
    assert "2 cells, 2 runs in" in planned.out
    assert not (tmp_path / "study").exists()
    done = vit(*arguments, *changes, "--json")
    assert done.code == 0, done.err
    first, second = map(json.loads, done.out.splitlines())
    assert (first["images"], first["steps"], second["steps"]) == (40, 1, 2)
    assert second["multiply_adds"] == 2 * first["multiply_adds"]
    shown = vit(*arguments, *changes)
    assert "multiply-adds" in shown.out
    assert "study.png" in shown.out
    assert "ViT-B/16, JFT-300M, 7 epochs" in shown.out
    assert "here models of up to 0.31 million parameters, 40 images of digits, top-1 accuracy, one seed" in shown.out


@pytest.mark.slow
def test_the_speed_study_prints_what_it_measured_and_what_it_could_not(vit, tmp_path):
    words = [
        "--models",
        "ViT-Ti/16",
        "--sizes",
        "32,40",
        "--batches",
        "1",
        "--rounds",
        "1",
        "--out",
        tmp_path / "study",
    ]
    shown = vit("study", "speed", *words)
    assert shown.code == 1
    assert shown.err.endswith("error: 1 cell of 2 could not be measured\n")
    assert re.search(r"ViT-Ti/16 +32 +[\d.]+ +1 +\d+\n", shown.out)
    assert "missing: ViT-Ti/16 at 40: " in shown.out
    assert json.loads(vit("study", "speed", *words, "--json").out.splitlines()[0])["image_size"] == 32

"""`vit train`: what it prints, and how it fails."""

import re

import typer
from runs import TINY
from typer.testing import CliRunner

from vitruvian.cli.train import train
from vitruvian.training import read_recipe, recipe_names

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(train)


def vit_train(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def small():
    return [word for setting in TINY for word in ("--set", setting)]


def test_a_run_says_how_good_its_model_is_and_where(tmp_path):
    done = vit_train("digits", "--out", tmp_path / "run", *small())
    assert done.exit_code == 0
    accuracy, report, model = done.stdout.splitlines()
    assert re.match(
        r"accuracy [\d.]+% \(95% confidence interval [\d.]+ to [\d.]+%\) on 359 images \(the split 'test'\), in",
        accuracy,
    )
    assert report == f"report: {tmp_path / 'run' / 'report.html'}"
    assert model.endswith(f", weights of step 12 of 12, the last (vit predict IMAGES --model {tmp_path / 'run'})")
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert accuracy.startswith(recipe.result)
    assert recipe.about == "ViT of depth 1, width 16, patch 4 trained on digits"
    assert recipe.command
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<dt>evaluated at</dt><dd>8 x 8 pixels</dd>" in page
    assert "<dt>batch_size</dt><dd>32</dd>" in page
    assert "<dt>grad_accum_steps</dt>" not in page
    for heading in ("recall", "precision", "F1"):
        assert f">{heading}</th>" in page
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"- measured: {recipe.result}\n" in card
    assert "- data: digits, 1,438 images for training\n- classes: 10: 0, 1, 2" in card
    assert f"- command: {recipe.command}\n" in card
    assert "- batch_size: 32\n" in card
    assert "grad_accum_steps" not in card
    assert "validation loss" in done.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_plan_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = vit_train("digits", "--plan", *small())
    assert done.exit_code == 0
    assert "12 of 32 images" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_recipes_are_listed_with_what_they_are_for():
    listed = vit_train("--recipes").stdout
    for name in recipe_names():
        assert name in listed
        assert read_recipe(name).about in " ".join(listed.split())


def test_data_or_a_run_must_be_given_and_not_both():
    assert vit_train().exit_code == 2
    assert vit_train("digits", "--resume", "run").exit_code == 2
    both = vit_train("--resume", "run", "--arch", "ViT-S/16")
    assert (both.exit_code, "--resume can be combined only with --workers, --epochs" in both.stderr) == (
        2,
        True,
    )

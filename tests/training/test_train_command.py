"""`vit train`: what it prints, and how it fails."""

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
    assert "% on 359 images (the split 'test'), in" in accuracy
    assert report == f"report: {tmp_path / 'run' / 'report.html'}"
    assert model.endswith(f"(vit predict IMAGES --model {tmp_path / 'run'})")
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
        assert read_recipe(name).about in listed


def test_data_or_a_run_must_be_given_and_not_both():
    assert vit_train().exit_code == 2
    assert vit_train("digits", "--resume", "run").exit_code == 2
    both = vit_train("--resume", "run", "--arch", "ViT-S/16")
    assert (both.exit_code, "--resume takes everything but --workers and some --set from the run" in both.stderr) == (
        2,
        True,
    )

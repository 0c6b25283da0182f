"""Families over data and compute: the cells, equal compute, going on, the page and the plot."""

import json

import pytest
from PIL import Image

from forked import ranks
from vitruvian.cost import multiply_adds
from vitruvian.errors import TrainingError
from vitruvian.study.growth import RECIPES as USUAL
from vitruvian.study.growth import SIZE_STEPS, SIZES, plan_study, run_study
from vitruvian.training import Interrupted, read_recipe
from vitruvian.training.initial_model import config_of
from vitruvian.training.journal import Listener

SMALL = ("workers=0", "batch_size=16", "image_size=16")
RECIPES = ("study-vit", "study-resnet")


def small_study(folder, **changes):
    chosen = {"sizes": [50, 0], "steps": [2], "recipes": RECIPES, "settings": SMALL, "out": folder}
    return plan_study("data-size", "digits", **(chosen | changes))


def test_the_families_train_alike_and_cost_about_the_same():
    recipes = [read_recipe(name).to_json() for name in USUAL]
    own = {"about", "command", "model", "image_size", "architecture", "augment"}
    assert all({key for key in recipe if recipe[key] != recipes[0][key]} <= own for recipe in recipes)
    costs = [multiply_adds(config_of(read_recipe(name), 10)) for name in USUAL]
    assert max(costs) < 1.25 * min(costs)


def test_cells_are_every_family_at_every_size_with_equal_steps(tmp_path):
    study = small_study(tmp_path / "study")
    names = [cell.folder.name for cell in study.cells]
    assert names == [f"{f}-{n}-images-2-steps" for n in (50, "all") for f in ("vit", "resnet")]
    assert [cell.images for cell in study.cells] == [50, 50, 1438, 1438]
    vit = study.cells[0]
    assert vit.multiply_adds == 3 * multiply_adds(config_of(vit.recipe, 10)) * 2 * 16
    assert study.cells[2].multiply_adds == vit.multiply_adds
    assert not (tmp_path / "study").exists()


def test_smaller_views_count_as_less_work(tmp_path):
    whole = small_study(tmp_path / "study").cells[0]
    half = small_study(tmp_path / "study", settings=[*SMALL, "train_scale=0.5"]).cells[0]
    assert half.multiply_adds < whole.multiply_adds / 3


def test_the_usual_study_has_twelve_cells():
    assert len(SIZES) * len(USUAL) == 12
    assert SIZE_STEPS > 0


class StopAt(Listener):
    def __init__(self, cell):
        self.left = cell

    def stepped(self, step):
        self.left -= 1
        if self.left == 0:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped_and_repeats_nothing(tmp_path):
    study = small_study(tmp_path / "study")
    with pytest.raises(Interrupted, match="stopped in resnet-50-images-2-steps; run the same command"):
        run_study(study, listeners=[StopAt(3)], report=lambda text: None)
    assert [cell.state for cell in study.cells] == ["done", "begun", "waiting", "waiting"]
    first = (study.cells[0].folder / "model" / "model.safetensors").stat().st_mtime_ns
    heard = []
    run_study(small_study(tmp_path / "study"), report=heard.append)
    assert [text.rpartition(": ")[2] for text in heard] == [
        "vit-50-images-2-steps (already done)",
        "resnet-50-images-2-steps (resuming)",
        "vit-all-images-2-steps",
        "resnet-all-images-2-steps",
    ]
    assert (study.cells[0].folder / "model" / "model.safetensors").stat().st_mtime_ns == first
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    assert [cell["state"] for cell in record["cells"]] == ["done"] * 4
    assert all(0 <= cell["top1"] <= 100 for cell in record["cells"])
    assert {name: [x for x, _ in points] for name, points in study.lines().items()} == {
        "vit": [50.0, 1438.0],
        "resnet": [50.0, 1438.0],
    }
    page = (tmp_path / "study" / "report.html").read_text()
    assert "4 of 4 runs done" in page
    with Image.open(tmp_path / "study" / "study.png") as plot:
        assert plot.width == 760
    other = small_study(tmp_path / "study", settings=["workers=0", "batch_size=8", "image_size=16"])
    with pytest.raises(TrainingError, match="batch_size=16 when the run began, not 8; choose another out="):
        run_study(other, report=lambda text: None)


@pytest.mark.slow
def test_two_processes_share_the_cells_and_one_speaks(tmp_path):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["study", "data-size", "digits", "--sizes", "50", "--steps", "2", "--recipes", "study-vit", "--json"]
    printed = []
    for count in (1, 2):
        done, *silent = [
            process.wait() for process in ranks(*words, *settings, "--out", tmp_path / str(count), count=count)
        ]
        assert done.code == 0, done.err
        assert done.err.count("cell 1 of 1: vit-50-images-2-steps") == 1
        assert [end.out for end in silent] == [""] * (count - 1)
        printed.append(json.loads(done.out))
    one, two = printed
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-4)  # sums in another order
    assert (two["state"], two["count"]) == ("done", one["count"])


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TrainingError, match="exists and is not a study; choose another out="):
        small_study(tmp_path)

"""Models x tasks: the paper's numbers, missing data, VTAB's means, and what is not done twice."""

import json
import statistics

import pytest
from PIL import Image

from vitruvian.catalog import imagenet_ids
from vitruvian.errors import CheckpointError, UnknownNameError
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.study.transfer import (
    TABLE2_RECIPES,
    TABLE2_TASKS,
    TransferCell,
    find_tasks,
    transfer,
    vtab_result,
)
from vitruvian.tasks import vtab_tasks
from vitruvian.training import Run, read_recipe


@pytest.fixture
def weights(tmp_path):
    from vitruvian.config import ViTConfig
    from vitruvian.model.build import build
    from vitruvian.weights.save import save

    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=3, depth=1, width=16, mlp_dim=16, num_heads=2)
    save(build(config), tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of tasks in which CIFAR-10 is present, ten images a split."""
    import numpy as np

    folder = tmp_path / "data" / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        rows = rng.integers(0, 256, (20, 3073), np.uint8)
        rows[:, 0] = np.arange(20) % 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_vtab_has_19_tasks_in_three_groups():
    groups = [task.group for task in vtab_tasks()]
    assert (groups.count("Natural"), groups.count("Specialized"), groups.count("Structured")) == (7, 4, 8)


SETUP = {"quick": True, "settings": ("steps=2", "batch_size=8", "grad_accum_steps=1", "image_size=16", "workers=0")}


def test_a_missing_task_leaves_its_cell_with_the_reason_and_the_others_run(tmp_path, weights, root):
    heard = []
    tasks = find_tasks(["pets", "ReaL", "CIFAR-10"])
    cells = transfer([str(weights)], tasks, tmp_path / "out", **SETUP, report=heard.append)
    pets, real, cifar = cells
    assert pets.mean is None
    assert "the task pets has no" in pets.missing
    assert "the task imagenet-real has no val/n*" in real.missing
    assert 0 <= cifar.values[0] <= 100
    assert cifar.metric == "top1"
    record = json.loads((tmp_path / "out" / "study.json").read_text())["cells"]
    assert [cell["task"] for cell in record] == ["pets", "imagenet-real", "cifar10"]
    heard.clear()
    assert transfer([str(weights)], tasks, tmp_path / "out", **SETUP, report=heard.append) == cells
    assert any("(already done)" in text for text in heard)


def test_table_2_has_a_recipe_of_its_own_for_imagenet(tmp_path, weights, root):
    assert {*TABLE2_RECIPES} <= {*TABLE2_TASKS}
    assert len(TABLE2_TASKS) == 6 + len(vtab_tasks())
    assert read_recipe(TABLE2_RECIPES["imagenet"]).image_size == 512
    setup = SETUP | {"recipes": {"cifar10": "finetune-small"}}
    transfer([str(weights)], find_tasks(["cifar10"]), tmp_path / "out", **setup, report=lambda text: None)
    (run,) = (tmp_path / "out").glob("*-cifar10/test-*")
    assert Run(run).recipe.layer_decay == 0.75  # of finetune-small


@pytest.mark.slow
def test_real_is_measured_on_the_runs_of_imagenet_and_these_are_trained_once(tmp_path, weights, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path / "data"))
    for split, number in (("train", 0), ("train", 2), ("val", 0), ("val", 2)):
        path = (
            tmp_path / "data" / "imagenet" / split / imagenet_ids()[number] / f"ILSVRC2012_val_0000000{number + 1}.JPEG"
        )
        path.parent.mkdir(parents=True)
        Image.new("RGB", (20, 20), (100 * number,) * 3).save(path)
    (tmp_path / "data" / "imagenet" / "real.json").write_text("[[2], [], [2, 0]]")
    heard, tasks = [], find_tasks(["imagenet", "ReaL"])
    imagenet, real = transfer([str(weights)], tasks, tmp_path / "out", **SETUP, report=heard.append)
    assert (imagenet.metric, real.metric) == ("top1", "real")
    assert (len(real.values), real.missing) == (1, "")
    assert real.values[0] == evaluate("imagenet-real", next((tmp_path / "out").glob("*-imagenet/test-*"))).real
    assert any("(already done)" in text for text in heard)


def test_weights_that_are_not_there_end_the_study_before_it_begins(tmp_path, root):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        transfer([str(tmp_path / "none")], find_tasks(["cifar10"]), tmp_path / "out", **SETUP)
    assert not (tmp_path / "out").exists()


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="pets"):
        find_tasks(["petz"])


def cells_with(missing=()):
    return [
        TransferCell(model="m", task=task, missing="not here")
        if task.name in missing
        else TransferCell(model="m", task=task, values=(v,))
        for v, task in enumerate(vtab_tasks())
    ]


def test_group_means_and_the_vtab_mean_are_plain_means():
    result = vtab_result("m", cells_with())
    assert result["vtab_mean"] == result["mean_of_measured"] == statistics.fmean(range(19))
    assert result["groups"]["Natural"] == {"mean": statistics.fmean(range(7)), "measured": 7, "tasks": 7}
    assert result["groups"]["Structured"] == {"mean": statistics.fmean(range(11, 19)), "measured": 8, "tasks": 8}
    assert result["paper"]["H/14, JFT-300M"]["vtab-kitti"] == 84.5


def test_without_all_19_tasks_there_is_no_vtab_mean():
    result = vtab_result("m", cells_with(missing=("vtab-dtd",)))
    assert result["missing"] == {"vtab-dtd": "not here"}
    assert result["vtab_mean"] is None
    assert (result["groups"]["Natural"]["measured"], result["groups"]["Natural"]["tasks"]) == (6, 7)

"""Models x tasks: the paper's numbers, missing data, VTAB's means, and what is not done twice."""

import json
import statistics

import pytest

from vitruvian.errors import CheckpointError, UnknownNameError
from vitruvian.study.transfer import (
    TABLE5,
    TABLE5_TASKS,
    Setup,
    TransferCell,
    find_tasks,
    published_results,
    transfer,
    vtab_result,
)
from vitruvian.tasks import TASKS, VTAB_TASKS


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


def test_table_5_has_14_rows_of_known_tasks():
    assert len(TABLE5) == 14
    assert all(len(row) == len(TABLE5_TASKS) for row in TABLE5.values())
    assert set(TABLE5_TASKS) <= set(TASKS)
    assert published_results("pets")["ImageNet-21k", "B/16"] == 94.43
    assert published_results("cifar10")["JFT-300M", "H/14"] == 99.50
    assert published_results("vtab-dtd") == {}


def test_vtab_has_19_tasks_in_three_groups():
    groups = [task.group for task in VTAB_TASKS]
    assert (groups.count("Natural"), groups.count("Specialized"), groups.count("Structured")) == (7, 4, 8)


SETUP = Setup(quick=True, settings=("steps=2", "batch_size=8", "grad_accum_steps=1", "image_size=16", "workers=0"))


def test_a_missing_task_leaves_its_cell_with_the_reason_and_the_others_run(tmp_path, weights, root):
    heard = []
    tasks = find_tasks(["pets", "ReaL", "CIFAR-10"])
    cells = transfer([str(weights)], tasks, tmp_path / "out", setup=SETUP, report=heard.append)
    pets, real, cifar = cells
    assert pets.mean is None
    assert "the task pets has no" in pets.missing
    assert "vit evaluate imagenet-real" in real.missing
    assert 0 <= cifar.values[0] <= 100
    assert cifar.metric == "top1"
    record = json.loads((tmp_path / "out" / "study.json").read_text())["cells"]
    assert [cell["task"] for cell in record] == ["pets", "imagenet-real", "cifar10"]
    heard.clear()
    assert transfer([str(weights)], tasks, tmp_path / "out", setup=SETUP, report=heard.append) == cells
    assert any("(already done)" in text for text in heard)


def test_weights_that_are_not_there_end_the_study_before_it_begins(tmp_path, root):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        transfer([str(tmp_path / "none")], find_tasks(["cifar10"]), tmp_path / "out", setup=SETUP)
    assert not (tmp_path / "out").exists()


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="pets"):
        find_tasks(["petz"])


def cells_with(missing=()):
    return [
        TransferCell(model="m", task=task, missing="not here")
        if task.name in missing
        else TransferCell(model="m", task=task, values=(v,))
        for v, task in enumerate(VTAB_TASKS)
    ]


def test_group_means_and_the_vtab_mean_are_plain_means():
    result = vtab_result("m", cells_with())
    assert result.is_complete
    assert result.mean == statistics.fmean(range(19))
    assert result.groups["Natural"] == (statistics.fmean(range(7)), 7, 7)
    assert result.groups["Structured"] == (statistics.fmean(range(11, 19)), 8, 8)
    assert result.to_json()["vtab_mean"] == result.mean
    assert result.to_json()["paper_vtab_mean"] == 77.63


def test_without_all_19_tasks_there_is_no_vtab_mean():
    result = vtab_result("m", cells_with(missing=("vtab-dtd",)))
    assert not result.is_complete
    assert result.missing == {"vtab-dtd": "not here"}
    assert result.to_json()["vtab_mean"] is None
    assert result.groups["Natural"][1:] == (6, 7)

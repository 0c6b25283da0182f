"""More classes for a trained model: fitted on frozen features, with the old classes measured before and after."""

import numpy as np
import pytest
import torch
from PIL import Image
from runs import weights

import vitruvian as vt
from forked import vit
from vitruvian.errors import TrainingError

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 220), "gray": (120, 120, 120)}
SETTINGS = [
    "steps=30",
    "batch_size=16",
    "image_size=16",
    "architecture.depth=1",
    "architecture.width=32",
    "architecture.mlp_dim=32",
    "architecture.num_heads=2",
    "architecture.patch_size=8",
    "workers=0",
    "warmup=0",
]


def photos(folder, names, count=12):
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = (np.array(COLORS[name]) + 12 * rng.normal(size=(16, 16, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("old")
    data = photos(root / "data", ("red", "green"))
    return vt.train(data, model="ViT-Ti/16", recipe="scratch", out=root / "run", settings=SETTINGS, progress=False)


def test_new_classes_are_recognized_and_old_ones_stay(run, tmp_path):
    more = photos(tmp_path / "more", ("blue", "green"))
    result = vt.add_classes(run, more, tmp_path / "model")
    assert result.added == ("blue",)
    assert result.before == pytest.approx(run.evaluation["top1"])
    assert result.after >= result.before
    assert result.new == 100
    assert result.counts == (2, 2)
    model = vt.load(tmp_path / "model")
    assert model.meta.labels == ("green", "red", "blue")
    before, after = weights(run.folder), model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("head."))
    assert vt.Classifier(model).predict([more / "blue" / "0.png"])[0][0].label == "blue"


def test_what_cannot_be_added_is_refused(run, tmp_path):
    with pytest.raises(TrainingError, match="has no class that the model does not have"):
        vt.add_classes(run, photos(tmp_path / "same", ("red", "green")), tmp_path / "model")
    more = photos(tmp_path / "more", ("blue", "gray"))
    with pytest.raises(TrainingError, match="more: exists; choose another out="):
        vt.add_classes(run, more, more)
    with pytest.raises(TrainingError, match=r"not a training run: it has no run\.json"):
        vt.add_classes(more, more)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_command_prints_the_accuracy_before_and_after(run, tmp_path):
    more = photos(tmp_path / "more", ("blue", "gray"))
    ran = vit("train", more, "--from", run.folder, "--add-classes", "--out", tmp_path / "model")
    assert ran.code == 0, ran.err
    assert "added blue, gray\nold classes: " in ran.out
    assert "% before, " in ran.out
    wrong = vit("train", more, "--add-classes")
    assert wrong.code == 2
    assert "--add-classes needs DATA and --from RUN" in wrong.err

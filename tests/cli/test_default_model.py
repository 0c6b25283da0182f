"""Where no model is named: the published default, or else the model in the package, which can say "none of these"."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.config import ViTConfig
from vitruvian.cost import parameters
from vitruvian.data.formats import open_dataset
from vitruvian.errors import CheckpointError, HubError
from vitruvian.model.build import build
from vitruvian.training.planning import choose_recipe
from vitruvian.weights import hub


def unreachable(name):
    raise HubError(f"{name}: no network")


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A stand-in for the model in the package that is sure of red and of nothing else."""
    shape = {
        "image_size": 8,
        "patch_size": 4,
        "depth": 1,
        "width": 8,
        "mlp_dim": 8,
        "num_heads": 2,
        "pos_embed": "none",
    }
    model = build(ViTConfig(**shape, num_classes=2, cls_token=False, pool="mean", final_norm=False))
    model.meta = model.meta.replace(labels=("red", "blue"), threshold=0.9)
    with torch.no_grad():
        for red, weight in zip((1.0, -1.0), model.head.weight):
            weight.copy_(torch.linspace(-red, red, 8))
        model.embed.patch.weight.zero_()
        model.embed.patch.weight[:, 0] = torch.linspace(-1, 1, 8)[:, None, None]
        for parameter in model.blocks.parameters():
            parameter.zero_()
    vt.save(model, tmp_path / "box")
    monkeypatch.setattr(hub, "BUNDLED", tmp_path / "box")
    monkeypatch.setattr(hub, "resolve_source", unreachable)
    return model


@pytest.fixture
def images(tmp_path):
    for name, red in (("gray", 127.5), ("red", 255)):
        Image.fromarray(np.full((8, 8, 3), (red, 0, 0), np.uint8)).save(tmp_path / f"{name}.png")
    return [tmp_path / "gray.png", tmp_path / "red.png"]


def test_the_model_in_the_package_answers_where_none_can_be_downloaded(vit, box, images):
    code, out, err = vit("predict", *images)
    assert code == 0
    assert (
        "no model given, and the default could not be downloaded: using the bundled model, which knows red, blue" in err
    )
    gray, red = out.split(str(images[1]))
    assert "rejected (none of the classes); the nearest:" in gray
    assert "none of these" not in red
    assert red.split()[0] == "red"


def test_a_missing_package_is_named_where_it_is_why_nothing_was_downloaded(vit, box, images, monkeypatch):
    monkeypatch.setattr(hub, "resolve_source", lambda name: hub.require("no_such_package", "hub"))
    _, _, err = vit("predict", images[0])
    assert (
        "the default could not be downloaded (this needs the package 'no_such_package': run pip install '.[hub]' in "
        in err
    )


def test_json_and_explanations_tell_that_an_image_is_none_of_the_classes(vit, box, images, tmp_path):
    _, out, _ = vit("predict", *images, "--json")
    assert [json.loads(line).get("rejected", False) for line in out.splitlines()] == [True, False]
    code, out, _ = vit("explain", *images, "--map", "gradient", "--out", tmp_path / "out")
    assert code == 0
    assert f"{images[0]}: rejected, nearest " in out
    assert f"{images[1]}: red " in out


def test_the_published_default_comes_first(monkeypatch, capsys):
    monkeypatch.setattr(hub, "resolve_source", lambda name: name)
    assert hub.default_source() == hub.DEFAULT
    assert hub.catalog.find_published(hub.DEFAULT).classes == 1000
    assert capsys.readouterr().err == f"no model given, using {hub.DEFAULT}\n"


def test_where_there_is_neither_the_error_names_the_option(vit, images, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "resolve_source", unreachable)
    monkeypatch.setattr(hub, "BUNDLED", tmp_path / "nothing")
    code, _, err = vit("predict", images[0])
    assert code == 1
    assert f"no model given, and the default cannot be downloaded: {hub.DEFAULT}: no network; pass --model" in err


def make_photos(folder):
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(6):
            pixels = (level + 20 * rng.normal(size=(8, 8, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.mark.slow
def test_training_starts_from_the_model_in_the_package_where_none_can_be_downloaded(vit, box, tmp_path):
    make_photos(tmp_path / "photos")
    settings = ("--epochs", 1, "--workers", 0, "--set", "enlarge=1", "--set", "train_scale=1")
    code, _, err = vit("train", tmp_path / "photos", "--out", tmp_path / "run", *settings)
    assert code == 0, err
    assert "no weights given, and the default could not be downloaded: starting from the bundled model" in err
    assert "with an input of 8 x 8 pixels" in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["weights"] == str(tmp_path / "box")
    assert vt.load(tmp_path / "run").meta.labels == ("dark", "light")


def test_training_starts_from_the_published_default_where_it_can_be_downloaded(box, tmp_path, monkeypatch, capsys):
    make_photos(tmp_path / "photos")
    monkeypatch.setattr(hub, "resolve_source", lambda name: tmp_path / "box")
    assert choose_recipe(str(tmp_path / "photos")).weights == hub.DEFAULT
    assert capsys.readouterr().err == f"no weights given, using {hub.DEFAULT}\n"
    assert choose_recipe(str(tmp_path / "photos"), model="ViT-Ti/16").weights == ""
    assert choose_recipe("digits").weights == ""
    assert capsys.readouterr().err == ""


def test_training_without_any_weights_names_the_option(vit, tmp_path, monkeypatch):
    make_photos(tmp_path / "photos")
    monkeypatch.setattr(hub, "resolve_source", unreachable)
    monkeypatch.setattr(hub, "BUNDLED", tmp_path / "nothing")
    code, _, err = vit("train", tmp_path / "photos")
    assert code == 1
    assert f"no weights given, and the default cannot be downloaded: {hub.DEFAULT}: no network; pass --from" in err


def test_a_threshold_is_kept_with_its_head_and_lost_with_a_new_one(box, tmp_path):
    assert vt.load(tmp_path / "box").meta.threshold == 0.9
    assert vt.load(tmp_path / "box", num_classes=3).meta.threshold == 0.0
    text = (tmp_path / "box" / "config.json").read_text().replace('"threshold": 0.9', '"threshold": 9')
    (tmp_path / "box" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"threshold=9.0 is not between 0.0 and 1.0"):
        vt.load(tmp_path / "box")


def test_energy_tells_apart_what_probabilities_have_lost(box, tmp_path):
    box.meta = box.meta.replace(threshold_on="energy", threshold=4.0)
    vt.save(box, tmp_path / "energy")
    again = vt.Classifier(tmp_path / "energy")
    little, much = torch.tensor([0.0, 3.0]), torch.tensor([2.0, 5.0])  # with the same probabilities
    assert again.rejects(torch.stack([little, much])) == [True, False]
    assert vt.load(tmp_path / "energy", num_classes=3).meta.threshold_on == "probability"
    path = tmp_path / "energy" / "config.json"
    path.write_text(path.read_text().replace('"energy"', '"logits"'))
    with pytest.raises(CheckpointError, match="threshold_on='logits' is not one of probability, energy"):
        vt.load(tmp_path / "energy")


@pytest.mark.skipif(not hub.BUNDLED.is_dir(), reason="the package carries no model yet")
def test_the_model_in_the_package_is_small_and_has_a_card():
    assert sum(path.stat().st_size for path in hub.BUNDLED.iterdir()) <= 8_000_000
    assert "vit train" in (hub.BUNDLED / "card.md").read_text()
    model = vt.load(hub.BUNDLED)
    assert len(model.meta.labels) == 10
    assert model.meta.threshold_on == "energy"
    assert parameters(model.config) == 3_624_874


@pytest.mark.skipif(not hub.BUNDLED.is_dir(), reason="the package carries no model yet")
def test_the_model_in_the_package_refuses_stripes_noise_and_digits():
    rng = np.random.default_rng(0)
    stripes = [np.sin(np.arange(64) * rng.uniform(0.3, 1.5)) * 127 + 128 for _ in range(10)]
    images = [Image.fromarray(np.broadcast_to(wave, (64, 64)).astype(np.uint8)) for wave in stripes]
    images += [Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)) for _ in range(10)]
    digits = open_dataset("digits").train
    images += [Image.fromarray(np.asarray(digits.read(number))).resize((64, 64)) for number in range(10)]
    found = [prediction.rejected for prediction in vt.Classifier(hub.BUNDLED).stream(images)]
    assert [sum(found[start : start + 10]) >= 8 for start in (0, 10, 20)] == [True] * 3

"""The temperature that a model carries: kept by every family, dropped with the head it was fitted to."""

from __future__ import annotations

import json

import pytest
import torch

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.inference import Classifier
from vitruvian.model.build import build
from vitruvian.weights.load import load
from vitruvian.weights.save import convert, save

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=64, mlp_dim=32, num_heads=1, num_classes=3)


@pytest.fixture
def native(tmp_path):
    model = build(TINY, seed=0)
    model.meta = model.meta.replace(temperature=1.75)
    save(model, tmp_path / "native")
    return tmp_path / "native"


def test_a_temperature_is_saved_and_loaded(native):
    assert load(native).meta.temperature == 1.75


@pytest.mark.parametrize(
    ("family", "name"), [("google", "a.npz"), ("timm", "a.safetensors"), ("huggingface", "folder")]
)
def test_foreign_files_carry_it_and_their_certificate_says_that_others_do_not_see_it(native, tmp_path, family, name):
    certificate = convert(native, tmp_path / name, to=family)
    assert load(tmp_path / name).meta.temperature == 1.75
    assert any(
        "other libraries do not divide the logits by this model's temperature 1.75" in n for n in certificate.notes
    )


def test_a_file_of_an_earlier_version_has_temperature_1(native):
    path = native / "config.json"
    content = json.loads(path.read_text())
    del content["temperature"]
    path.write_text(json.dumps(content))
    assert load(native).meta.temperature == 1.0


@pytest.mark.parametrize("value", [0, -1, "warm", None, float("nan")])
def test_an_impossible_temperature_is_refused(native, value):
    path = native / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": value}))
    with pytest.raises(CheckpointError, match=r"config.json: .*(temperature|float)"):
        load(native)


def test_a_new_head_has_no_temperature_of_the_old_one(native):
    assert load(native, num_classes=5).meta.temperature == 1.0
    assert load(native, head="new").meta.temperature == 1.0
    assert load(native, image_size=32).meta.temperature == 1.75


def test_probabilities_are_those_of_the_divided_logits_and_logits_stay_as_they_are(native):
    classifier = Classifier(native)
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    (ranked,) = classifier.rank(logits, 3)
    expected = (logits / 1.75).softmax(dim=1)[0].tolist()
    assert [answer.probability for answer in ranked] == pytest.approx(expected)
    pixels = torch.zeros(1, 3, 16, 16)
    with torch.inference_mode():
        assert torch.equal(classifier.logits(pixels), classifier.model(pixels))

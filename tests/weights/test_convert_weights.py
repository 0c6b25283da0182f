"""Conversions prove themselves, and leave nothing behind when they cannot."""

from __future__ import annotations

import hashlib
import importlib
import json

import pytest
import torch
from checkpoints import DESTINATIONS, TOLERANCE, largest_difference, path_of

from vitruvian.errors import ConversionError, UnknownNameError
from vitruvian.weights.load import load
from vitruvian.weights.save import convert, save

converting = importlib.import_module("vitruvian.weights.save")  # the module, not the function of the same name


@pytest.mark.parametrize("family", DESTINATIONS)
def test_a_certificate_is_written_beside_the_file_or_into_the_folder(family, tmp_path):
    destination = tmp_path / DESTINATIONS[family]
    certificate = convert(path_of("timm_vit"), destination, to=family, num_heads=4)
    folder = destination.is_dir()
    written = destination / "certificate.json" if folder else tmp_path / f"{destination.name}.certificate.json"
    saved = json.loads(written.read_text())
    assert saved == json.loads(json.dumps(certificate.to_json()))
    assert (saved["source_family"], saved["destination_family"]) == ("timm", family)
    assert certificate.largest_difference <= TOLERANCE
    assert certificate.largest_output > 0.5
    weights = destination / "model.safetensors" if folder else destination
    assert saved["destination_sha256"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert largest_difference(load(destination), "timm_vit") < TOLERANCE


def test_the_difference_another_reader_would_see_is_stated(tmp_path):
    certificate = convert(path_of("timm_vit"), tmp_path / "w.npz", to="google", num_heads=4)
    assert 1e-5 < certificate.reader_difference < 1e-2
    assert "google's code computes GELU with tanh, this model with erf" in certificate.notes
    assert f"differ by up to {certificate.reader_difference:.2g}" in str(certificate)
    assert any("mean" not in note and "fit squash (this model: crop)" in note for note in certificate.notes)


def test_the_stated_difference_is_what_reading_as_that_family_gives(tmp_path):
    certificate = convert(path_of("timm_vit"), tmp_path / "w.npz", to="google", num_heads=4, seed=5)
    pixels = torch.randn(certificate.batch_shape, generator=torch.Generator().manual_seed(5))
    model, stranger = load(path_of("timm_vit"), num_heads=4), load(tmp_path / "w.npz", family="google")
    with torch.no_grad():
        difference = float((model(pixels) - stranger(pixels)).abs().max())
    assert difference == pytest.approx(certificate.reader_difference, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_not_converted(value, tmp_path):
    model = load(path_of("timm_vit"), num_heads=4)
    model.head.weight.data[0, 0] = value
    save(model, tmp_path / "broken")
    with pytest.raises(ConversionError, match=r"broken: 'head.weight' contains NaN or infinity"):
        convert(tmp_path / "broken", tmp_path / "out", to="native")
    assert not (tmp_path / "out").exists()


def test_a_family_with_the_same_numerics_has_nothing_to_state(tmp_path):
    certificate = convert(path_of("torchvision_vit"), tmp_path / "hf", to="huggingface", num_heads=4)
    assert certificate.reader_difference <= TOLERANCE
    assert str(certificate).splitlines()[0].startswith("torchvision -> huggingface: largest difference ")


def test_a_head_of_zeros_does_not_hide_differences(tmp_path):
    certificate = convert(path_of("timm_vit"), tmp_path / "native", to="native", num_heads=4, num_classes=3)
    assert certificate.compared == "features"
    assert certificate.largest_output > 0


def test_options_of_load_apply(tmp_path):
    convert(path_of("google_vit_nohidden"), tmp_path / "w.pth", to="torchvision", image_size=48)
    assert load(tmp_path / "w.pth").config.grid == (6, 6)


def test_each_step_is_told(tmp_path):
    steps = []
    convert(path_of("google_vit"), tmp_path / "native", to="native", progress=steps.append)
    assert [step.split()[0] for step in steps] == ["reading", "writing", "comparing"]


@pytest.mark.parametrize("family", DESTINATIONS)
def test_weights_that_come_back_different_are_not_installed(family, tmp_path, monkeypatch):
    destination = tmp_path / DESTINATIONS[family]
    save(load(path_of("google_vit_nohidden")), destination, family)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    real = converting.load

    def wrong(path):
        model = real(path)
        model.head.bias.data[0] += 0.01
        return model

    monkeypatch.setattr(converting, "load", wrong)
    with pytest.raises(ConversionError, match=r"not written, the re-read .* weights differ by 0.01 where"):
        convert(path_of("timm_vit"), destination, to=family, num_heads=4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_weights_that_are_not_numbers_are_not_certified(tmp_path):
    model = load(path_of("timm_vit"), num_heads=4)
    model.head.bias.data[0] = float("nan")
    save(model, tmp_path / "native")
    with pytest.raises(ConversionError, match=r"'head\.bias' contains NaN or infinity"):
        convert(tmp_path / "native", tmp_path / "w.npz", to="google")


def test_the_source_is_never_its_own_destination(tmp_path):
    save(load(path_of("timm_vit"), num_heads=4), tmp_path / "native")
    with pytest.raises(ConversionError, match="is the source itself"):
        convert(tmp_path / "native", tmp_path / "native", to="native")


def test_an_unknown_family_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UnknownNameError, match="unknown family to write"):
        convert(tmp_path / "missing", tmp_path / "w", to="keras")

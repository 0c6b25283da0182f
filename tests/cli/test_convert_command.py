"""`vit convert`."""

from __future__ import annotations

import json

import pytest
import torch

import vitruvian as vt
from vitruvian.cli.models import FAMILIES
from vitruvian.config import LoraConfig
from vitruvian.model.lora import add_lora
from vitruvian.weights.adapter import save_adapter
from vitruvian.weights.families.registry import WRITERS


def test_the_families_are_those_that_can_be_written():
    assert FAMILIES == WRITERS


def test_the_certificate_is_printed_and_the_weights_are_there(vit, weights, photos, tmp_path):
    code, out, err = vit("convert", weights, tmp_path / "g.npz", "--to", "google")
    assert code == 0
    assert out.startswith("native -> google: largest difference ")
    assert out.endswith(f"wrote {tmp_path / 'g.npz'}\n")
    assert err.startswith("reading ")
    before, after = (vit("predict", photos, "--model", model).out for model in (weights, tmp_path / "g.npz"))
    assert before == after


def test_json_prints_the_certificate_as_one_object(vit, weights, tmp_path):
    out = vit("convert", weights, tmp_path / "t.npz", "--to", "google", "--image-size", "24x16", "--json").out
    certificate = json.loads(out)
    assert certificate["batch_shape"] == [2, 3, 24, 16]
    assert certificate["largest_difference"] <= 1e-5


def test_what_cannot_be_converted_is_one_line(vit, weights, tmp_path):
    code, out, err = vit("convert", weights, tmp_path / "x.npz", "--to", "timm")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'x.npz'}: timm weights are a file with suffix ")


def test_weights_are_not_written_into_a_folder_that_is_called_like_a_graph(vit, weights, tmp_path):
    code, _, err = vit("convert", weights, tmp_path / "model.onnx")
    assert code == 1
    assert "native weights are a folder, not a file; `vit export SRC" in err
    assert not (tmp_path / "model.onnx").exists()


def test_a_lora_adapter_is_merged_into_converted_and_exported_weights(vit, weights, photos, tmp_path):
    model = vt.load(weights)
    add_lora(model, LoraConfig(rank=2))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapter(model, tmp_path / "adapter", base=str(weights))
    adapter = ("--adapter", tmp_path / "adapter")
    expected = vit("predict", photos, "--model", weights, *adapter, "--json").out
    assert expected != vit("predict", photos, "--model", weights, "--json").out
    assert vit("convert", weights, tmp_path / "merged", "--overwrite", *adapter).code == 0
    assert vit("export", weights, tmp_path / "merged.onnx", *adapter).code == 0
    rows = [json.loads(line)["predictions"] for line in expected.splitlines()]
    for name in ("merged", "merged.onnx"):
        predicted = vit("predict", photos, "--model", tmp_path / name, "--json").out.splitlines()
        for row, line in zip(rows, predicted, strict=True):
            found = json.loads(line)["predictions"]
            assert [p["label"] for p in found] == [p["label"] for p in row]
            assert [p["probability"] for p in found] == pytest.approx([p["probability"] for p in row], abs=1e-4)
    code, _, err = vit("convert", weights, tmp_path / "other", *adapter, "--num-classes", "2")
    assert (code, err.splitlines()[-1]) == (
        1,
        "error: --num-classes and --patch-size cannot be combined with --adapter",
    )

"""`vit convert`."""

from __future__ import annotations

import json

from vitruvian.cli.models import FAMILIES
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

"""`vit export --to executorch`, with the real package where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import vitruvian as vt
from vitruvian.errors import ConversionError, MissingExtraError

RUN = """
import json, sys, torch
from executorch.runtime import Runtime
program = Runtime.get().load_program(sys.argv[1])
outputs = program.load_method("forward").execute([torch.load(sys.argv[2])])
description = json.loads(program.load_method("vitruvian").execute([])[0])
print("result " + json.dumps([[output.tolist() for output in outputs], description["labels"]]))
"""


def small(**settings):
    torch.manual_seed(0)
    size = {"image_size": 32, "patch_size": 16, "depth": 2, "width": 16, "mlp_dim": 32, "num_heads": 2}
    model = vt.build(vt.ViTConfig(**size, num_classes=3, **settings))
    torch.nn.init.normal_(model.head.weight)
    model.meta = model.meta.replace(labels=("a", "b", "c"))
    return model.eval()


def test_without_the_package_one_line_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(
        MissingExtraError, match=r"this needs the package 'executorch': run pip install '.\[executorch\]'"
    ):
        vt.export(small(), tmp_path / "model.pte", to="executorch")
    with pytest.raises(ConversionError, match=r"the file name of a graph for executorch must end in \.pte"):
        vt.export(small(), tmp_path / "model.onnx", to="executorch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("executorch"), reason="executorch is not installed")
@pytest.mark.parametrize("kind", ["GELU", "SwiGLU with registers"])
def test_a_program_computes_the_models_logits_and_features(tmp_path, kind):
    model = small(**({} if kind == "GELU" else {"mlp": "swiglu", "layer_scale": True, "reg_tokens": 2}))
    vt.save(model, tmp_path / "model")
    command = [sys.executable, "-m", "vitruvian", "export", tmp_path / "model", tmp_path / "model.pte", "--json"]
    done = subprocess.run(
        [*command, "--to", "executorch", "--batch-size", "2", "--features"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout)
    assert (certificate["format"], certificate["batch_size"]) == ("executorch", 2)
    assert certificate["largest_difference"] < 1e-4
    pixels = torch.randn(2, 3, 32, 32)
    torch.save(pixels, tmp_path / "pixels.pt")
    command = [sys.executable, "-c", RUN, str(tmp_path / "model.pte"), str(tmp_path / "pixels.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("result "))
    (logits, features), labels = json.loads(line.removeprefix("result "))
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(pixels), rtol=0, atol=1e-4)  # sums in another order
        torch.testing.assert_close(torch.tensor(features), model.features(pixels), rtol=0, atol=1e-4)
    assert labels == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("executorch"), reason="executorch is not installed")
def test_what_executorch_cannot_express_is_one_line(tmp_path):
    vt.save(small(), tmp_path / "vit")
    torch.manual_seed(0)
    resnet = vt.build(vt.ResNetConfig(image_size=32, stages=(1, 1), width=32, num_classes=3))
    torch.nn.init.normal_(resnet.head.weight)
    vt.save(resnet, tmp_path / "resnet")
    for name, more, reason in (
        ("resnet", (), "error: ExecuTorch cannot express this model: "),
        ("vit", ("--dynamic-size",), "error: a program for ExecuTorch has one image size, not --dynamic-size"),
    ):
        command = [sys.executable, "-m", "vitruvian", "export", tmp_path / name, tmp_path / "model.pte"]
        done = subprocess.run([*command, "--to", "executorch", *more], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith(reason)
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "model.pte").exists()

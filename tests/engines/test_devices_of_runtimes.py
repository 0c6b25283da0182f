"""Devices of ONNX Runtime and OpenVINO: chosen by name, and refused if they are missing or compute something else."""

import pytest
import torch

import vitruvian as vt
from vitruvian.config import ViTConfig
from vitruvian.engines import choose, graph, runtimes
from vitruvian.errors import CheckpointError, ConfigError, ConversionError
from vitruvian.model.build import build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    config = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    vt.export(model, path)
    return path


def test_a_missing_device_is_one_line(exported):
    for source in (exported, build(ViTConfig(depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3), seed=0)):
        with pytest.raises(ConfigError) as raised:
            vt.Classifier(source, engine="onnxruntime:cuda")
        assert str(raised.value).startswith("engine='onnxruntime:cuda' is not available: onnxruntime has only ")
        assert "CPU" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_the_command_names_a_missing_device_and_unknown_ones(exported):
    from vitruvian.cli.options import parse_engine

    assert parse_engine("onnxruntime:cpu") == "onnxruntime"
    with pytest.raises(Exception, match="'onnxruntime:gpu' is not one of torch, "):
        parse_engine("onnxruntime:gpu")


def test_a_runtime_that_falls_back_to_the_cpu_is_refused(exported, monkeypatch):
    """As the GPU build of ONNX Runtime does without a driver: it lists the provider, and opens the CPU's."""
    monkeypatch.setattr(runtimes, "runtime_devices", lambda engine: ["CUDA", "CPU"] if "onnx" in engine else ["CPU"])
    assert runtimes.present(runtimes.installed())[-1] == "onnxruntime:cuda"
    refused = pytest.raises(CheckpointError, match="onnxruntime:cuda cannot run it: CUDA cannot be used here")
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), refused:
        vt.Classifier(exported, engine="onnxruntime:cuda")


def test_a_device_with_other_logits_is_refused(exported, monkeypatch):
    pretend_cuda(monkeypatch, 1.001)
    with pytest.raises(ConversionError, match=r"the logits of onnxruntime:cuda differ from those of onnxruntime; use"):
        graph.open_graph(exported, engine="onnxruntime:cuda")


def test_a_device_with_the_same_logits_computes_whole_batches_and_is_measured(exported, monkeypatch):
    pretend_cuda(monkeypatch, 1.0)
    model = graph.open_graph(exported, engine="onnxruntime:cuda")
    pixels = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(pixels), graph.open_graph(exported)(pixels))
    assert choose.default_mode("onnxruntime:cuda", 16) == choose.RunMode("onnxruntime:cuda")
    assert "onnxruntime:cuda" in runtimes.present(runtimes.installed())


def pretend_cuda(monkeypatch, factor):
    """A device `CUDA` that is the CPU; its logits are multiplied by a factor."""
    monkeypatch.setattr(runtimes, "runtime_devices", lambda engine: ["CUDA", "CPU"] if "onnx" in engine else ["CPU"])
    opened = runtimes.open_onnxruntime

    def open_pretended(module, path, split, batch_size, device):
        result = opened(module, path, split, batch_size, "CPU")
        scale = factor if device == "CUDA" else 1.0
        return result._replace(run=lambda pixels, index: result.run(pixels, index) * scale + (scale - 1))

    monkeypatch.setitem(runtimes.OPENERS, "onnxruntime", open_pretended)

"""A runtime that would end the process costs one line."""

import pytest

from vitruvian.engines import trial
from vitruvian.engines.graph import open_graph
from vitruvian.engines.runtimes import is_quantized
from vitruvian.errors import CheckpointError, ConversionError

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def int8_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "int8.onnx"
    path.write_bytes(b"no graph, but the word QuantizeLinear")
    return path


@pytest.mark.openvino
def test_a_file_in_int8_that_ends_openvino_is_refused_before_it_is_opened(int8_file, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL", CRASH)
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(ConversionError, match="openvino ended with SIGILL here; take engine='onnxruntime'"):
            open_graph(int8_file, engine="openvino")


@pytest.mark.openvino
def test_a_file_in_int8_that_runs_is_tried_once(int8_file, monkeypatch, capsys):
    monkeypatch.setattr(trial, "TRIAL", "")
    trial.check_alive(int8_file, "openvino")
    assert "trying int8 in openvino in a process of its own" in capsys.readouterr().err
    monkeypatch.setattr(trial, "TRIAL", CRASH)
    trial.check_alive(int8_file, "openvino")
    assert capsys.readouterr().err == ""
    int8_file.write_bytes(int8_file.read_bytes() + b"another")
    with pytest.raises(ConversionError, match="SIGILL"):
        trial.check_alive(int8_file, "openvino")


def test_onnxruntime_and_files_in_float_need_no_trial(int8_file, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL", CRASH)
    trial.check_alive(int8_file, "onnxruntime")
    int8_file.write_bytes(b"float")
    trial.check_alive(int8_file, "openvino")
    int8_file.write_bytes(b"")
    assert not is_quantized(int8_file)


@pytest.mark.openvino
def test_what_is_no_graph_is_said_by_the_runtime_and_not_by_the_trial(int8_file):
    with pytest.raises(CheckpointError, match="openvino cannot run it"):
        open_graph(int8_file, engine="openvino")

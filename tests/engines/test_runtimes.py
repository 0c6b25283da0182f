"""Sessions of ONNX Runtime and OpenVINO, and graphs that crash a runtime."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vitruvian as vt
from vitruvian.engines import graph, runtimes
from vitruvian.engines.graph import open_graph
from vitruvian.engines.runtimes import is_quantized
from vitruvian.errors import CheckpointError, ConversionError

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def test_a_package_that_is_distributed_under_another_name_has_a_version(monkeypatch):
    """`onnxruntime-gpu` is imported as onnxruntime, and no package of that name is known."""
    import onnxruntime

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(runtimes, "version", unknown)
    assert runtimes.versions(["onnxruntime"]) == [f"onnxruntime {onnxruntime.__version__}"]


SIGNALED = """
import faulthandler, signal, sys
import torch
import vitruvian as vt
from vitruvian.engines.runtimes import Session
faulthandler.enable()  # gives signal handlers a stack of their own
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
small = {"depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2}
model = vt.build(vt.ViTConfig(image_size=(16, 16), patch_size=8, num_classes=2, **small))
torch.nn.init.normal_(model.head.weight)
vt.export(model, sys.argv[1], to="openvino")
first, second = (Session(sys.argv[1] + "/model.xml", "openvino") for _ in range(2))
del first
del second
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_signals_are_handled_after_sessions_of_openvino_are_closed(tmp_path):
    """Its CPU plugin replaces the stack of signal handlers, and restores the former one when it is unloaded."""
    done = subprocess.run([sys.executable, "-c", SIGNALED, tmp_path / "graph"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_even_pieces_have_their_own_session(tmp_path, monkeypatch):
    opened = []

    def open_session(path, engine, *, split, batch_size):
        opened.append(batch_size)
        return lambda pixels, output: torch.full((len(pixels), 1), float(batch_size))

    monkeypatch.setattr(runtimes, "Session", open_session)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = runtimes.SplitGraph(tmp_path / "model.onnx", "onnxruntime")
    sizes = [float(run(torch.zeros(batch, 3, 2, 2))[0]) for batch in (16, 8, 5, 12, 4, 16)]
    assert sizes == [4, 4, 1, 1, 1, 4]  # 12 and 4 would need a third session, for pieces of 3 and 2
    assert opened == [4, 1]


def test_the_first_call_runs_alone():
    """Two at once may deadlock; later ones run concurrently."""
    events, together = [], threading.Barrier(4, timeout=60)

    def work(number):
        events.append(("begin", number))
        time.sleep(0.02)
        events.append(("end", number))
        return number

    def called(number):
        together.wait()
        return alone(lambda: work(number))

    alone = runtimes.SerialFirstCall()
    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(called, range(4))) == [0, 1, 2, 3]
        assert events[:2] == [("begin", events[0][1]), ("end", events[0][1])]
        assert alone(lambda: list(threads.map(lambda n: alone(lambda: n), range(4)))) == [0, 1, 2, 3]


@pytest.mark.openvino
def test_every_openvino_inference_waits_for_the_first(tmp_path, monkeypatch):
    seen = []

    def noted(work):
        seen.append(threading.get_ident())
        return work()

    monkeypatch.setattr(runtimes, "_openvino_call", noted)
    config = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=0)
    vt.export(vt.build(config).eval(), tmp_path / "m.onnx")
    runtimes.Session(tmp_path / "m.onnx", "openvino")(torch.zeros(1, 3, 16, 16))
    assert seen == [threading.get_ident()]


@pytest.fixture
def int8_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "int8.onnx"
    path.write_bytes(b"no graph, but the word QuantizeLinear")
    return path


def test_an_int8_file_that_crashes_openvino_is_refused_before_it_is_opened(int8_file, monkeypatch):
    monkeypatch.setattr(graph, "CRASH_TEST", CRASH)
    for _ in range(2):  # a failure is not cached
        with pytest.raises(
            ConversionError, match=r"openvino crashed with SIGILL on this machine; use engine=.onnxruntime"
        ):
            open_graph(int8_file, engine="openvino")


def test_an_int8_file_that_hangs_openvino_is_refused(int8_file, monkeypatch):
    monkeypatch.setattr(graph, "CRASH_TEST", "import time; time.sleep(100)")
    monkeypatch.setattr(graph, "CRASH_TEST_SECONDS", 0.1)
    with pytest.raises(ConversionError, match=r"openvino did not finish within 0.1 s .*; use engine=.onnxruntime"):
        open_graph(int8_file, engine="openvino")


def test_an_int8_file_that_runs_is_tested_once(int8_file, monkeypatch, capsys):
    monkeypatch.setattr(graph, "CRASH_TEST", "")
    graph.check_survives(int8_file, "openvino")
    assert "testing int8 in openvino in a separate process" in capsys.readouterr().err
    monkeypatch.setattr(graph, "CRASH_TEST", CRASH)
    graph.check_survives(int8_file, "openvino")
    assert capsys.readouterr().err == ""
    int8_file.write_bytes(int8_file.read_bytes() + b"another")
    with pytest.raises(ConversionError, match="SIGILL"):
        graph.check_survives(int8_file, "openvino")


def test_onnxruntime_and_float_files_need_no_crash_test(int8_file, monkeypatch):
    monkeypatch.setattr(graph, "CRASH_TEST", CRASH)
    graph.check_survives(int8_file, "onnxruntime")
    int8_file.write_bytes(b"float")
    graph.check_survives(int8_file, "openvino")
    int8_file.write_bytes(b"")
    assert not is_quantized(int8_file)


@pytest.mark.openvino
def test_an_invalid_graph_is_reported_by_the_runtime_and_not_by_the_crash_test(int8_file):
    with pytest.raises(CheckpointError, match="openvino cannot run it"):
        open_graph(int8_file, engine="openvino")

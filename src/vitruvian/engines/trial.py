"""A graph tried in a process of its own, as a runtime may use instructions that a virtual machine lacks."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from vitruvian.cache import cache_folder
from vitruvian.engines.runtimes import is_quantized
from vitruvian.engines.sessions import versions
from vitruvian.errors import ConversionError, FileError, argument
from vitruvian.files import file_stamp, read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.progress import print_status

TRIAL = """
import sys, torch
from pathlib import Path
from vitruvian.engines.sessions import OpenGraph, open_session
path, engine = Path(sys.argv[1]), sys.argv[2]
session = open_session(path, engine)
for run in (session, OpenGraph(path, engine)):
    for batch in (1, 2, 7, 16, 32):
        run(torch.zeros(batch, *(side or 224 for side in session.shape[1:])))
"""
"""Any batch, and as `vit predict` runs a graph."""


def check_runs(path: Path, engine: str) -> None:
    """Refuse an int8 graph that its runtime cannot run at some batch, or that ends the runtime's process."""
    code, why = tried(path, engine)
    if code:
        raise ConversionError(
            f"{path}: {engine} cannot run int8 on this machine ({why}); take {argument('engine', 'onnxruntime')}"
        )


def check_alive(path: Path, engine: str) -> None:
    """Refuse a file in int8 that would end this process in OpenVINO; remembered for this file and machine."""
    if engine != "openvino" or not is_quantized(path):
        return
    key = short_hash([str(path.resolve()), file_stamp(path), processor_name(), versions([engine])])
    file = cache_folder() / "engines" / f"{key}.tried.json"
    with suppress(FileError):
        if read_object(file).get("alive") is True:
            return
    print_status(f"note: trying int8 in {engine} in a process of its own, once for this file ...")
    code, why = tried(path, engine)
    if code < 0:
        raise ConversionError(f"{path}: {engine} ended with {why} here; take {argument('engine', 'onnxruntime')}")
    with suppress(FileError):
        write_json(file, {"alive": True})


def tried(path: Path, engine: str) -> tuple[int, str]:
    """The exit code of a process that runs the graph, negative for a signal, and in words what ended it."""
    done = subprocess.run([sys.executable, "-c", TRIAL, str(path), engine], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return done.returncode, signal.Signals(-done.returncode).name
    lines = done.stderr.strip().splitlines()
    return done.returncode, lines[-1] if lines else "no reason given"

"""The corpus of bad inputs, made once, and a way to run `vit` on it that no input can hang or kill."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bad_inputs
import pytest

from vitruvian.cli import main

SECONDS = 40
"""After which a command counts as hanging, on however slow a machine."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def in_child(work: Callable[[], object], folder: Path) -> Ran:
    """Do the work in a copy of this process: what hangs is ended, and what is broken is gone with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of copies of a process with threads
        child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, name in ((1, ".stdout"), (2, ".stderr")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
            code = ended(work)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            texts = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in (".stdout", ".stderr"))
            return Ran(os.waitstatus_to_exitcode(status), *texts)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"hangs: {SECONDS} s")


def ended(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    made = in_child(lambda: bad_inputs.make(folder), folder)
    assert made.code == 0, made.err
    return folder


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ran]:
    """`vit(*arguments)`, in this process or, for what may hang, in a copy of it."""
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, apart: bool = False) -> Ran:
        monkeypatch.setattr(sys, "argv", ["vit", *arguments])
        if apart:
            return in_child(main, tmp_path)
        code = ended(main)
        return Ran(code, *capfd.readouterr())

    return run

"""The corpus of bad inputs, made once, and a way to run `vit` on it that no input can hang or kill."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import bad_inputs
import pytest

from forked import Forked, Ran, exit_code
from vitruvian.cli.app import main

SECONDS = 40
"""After which a command counts as hanging, on however slow a machine."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    made = Forked(work=lambda: bad_inputs.make(folder)).wait()
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
            return Forked(*arguments).wait(SECONDS)
        code = exit_code(main)
        return Ran(code, *capfd.readouterr())

    return run

"""Every command that works for long or writes: interrupted, killed, and with nowhere to write."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from PIL.ImageFile import ImageFile

import vitruvian.bulk.job
import vitruvian.data.doctor
import vitruvian.data.pack
import vitruvian.evaluation.report
import vitruvian.explain.explainer
import vitruvian.training.finetune  # noqa: F401, so that no copy of this process imports them
from forked import Forked, Ran
from vitruvian import __main__

STEPS = "--set steps=2 --set head_init=zero --set image_size=16 --batch-size 4 --workers 0"
WORK = {
    "predict": "predict {good}/data -m {good}/model --json",
    "embed": "embed {good}/data -m {good}/model --out {out}",
    "explain": "explain {good}/data/dark/0.png {good}/data/dark/1.png -m {good}/model --out {out}",
    "evaluate": "evaluate {good}/data -m {good}/model",
    "probe": "probe {good}/data -m {good}/model --only fewshot --shots 1",
    "doctor": "doctor {good}/data --workers 0",
    "pack": "pack {good}/data {out} --workers 0",
    "convert": "convert {good}/model {out} --to native",
    "train": f"train {{good}}/data --from {{good}}/model --out {{out}} {STEPS}",
    "finetune": f"finetune {{good}}/data --from {{good}}/model --out {{out}} --quick {STEPS}",
}
WRITE = [name for name in WORK if "{out}" in WORK[name]]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    # images that another test examined in this process would not be decoded again, so that no signal would be sent
    monkeypatch.setattr(import_module("vitruvian.data.doctor.scan"), "_remembered", {})


def words(name: str, corpus: Path, out: Path) -> list[str]:
    return [word.format(good=corpus / "good", out=out) for word in WORK[name].split()]


def send_at(number: int, name: str) -> None:
    """Send this process a signal in the middle of its work: while it decodes an image, or replaces a file."""
    owner, method = (os, "replace") if name == "convert" else (ImageFile, "load")
    original, calls = getattr(owner, method), iter(range(10_000))

    def counted(*given: object) -> object:
        if next(calls) == (0 if name == "convert" else 5):
            os.kill(os.getpid(), number)
        return original(*given)

    setattr(owner, method, counted)


def run(name: str, corpus: Path, out: Path, first: Callable[[], object] = lambda: None) -> Ran:
    return Forked(*words(name, corpus, out), first=first, work=__main__.main).wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_ctrl_c_ends_a_command_without_a_traceback(corpus, tmp_path, name):
    found = run(name, corpus, tmp_path / "out", partial(send_at, signal.SIGINT, name))
    assert found.code == 130, found
    assert "Traceback" not in found.err
    assert "internal error" not in found.err


def contents(folder: Path) -> dict[str, bytes]:
    """All files that do not tell the time or the folder."""
    kept = (".tar", ".parquet", ".safetensors", "classes.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.name.endswith(kept)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
def test_a_command_that_was_killed_is_simply_run_again(corpus, tmp_path, name):
    killed = run(name, corpus, tmp_path / "out", partial(send_at, signal.SIGKILL, name))
    assert killed.code == -signal.SIGKILL
    again = run(name, corpus, tmp_path / "out")
    if name == "train" and again.code:
        assert "--resume" in again.err
        again = Forked("train", "--resume", tmp_path / "out").wait()
    assert again.code == 0, again.err
    assert run(name, corpus, tmp_path / "whole").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def without_privileges() -> None:
    """Let permissions bind the superuser, too."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="capabilities are Linux's")
@pytest.mark.parametrize("name", WRITE)
def test_a_folder_that_cannot_be_written_to_is_one_line(corpus, tmp_path, name):
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    found = run(name, corpus, place / "out", without_privileges)
    assert found.code == 1, found
    assert "Permission denied" in found.err.splitlines()[-1]
    assert found.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in found.err
    assert "internal error" not in found.err
    assert list(place.iterdir()) == []

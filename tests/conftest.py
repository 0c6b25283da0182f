"""What tests of several folders use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Some virtual machines announce AMX and end a process that uses it; oneDNN then takes the kernels without it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for every test and for the processes it starts, so that numbers repeat on any machine.

    For the whole session: fixtures of a module are made before those of a test, and must compute alike.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def two_threads(one_thread: None) -> Iterator[None]:
    """Two threads for tensors, as a machine of two cores has them."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Ctrl-C reaches tests and their processes, also where the shell that started them in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real weights and images beside the project; tests that need it are skipped without it."""
    folder = Path(os.environ.get("VITRUVIAN_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here; set VITRUVIAN_SHARED")
    return folder

"""`vit` in a copy of this process: one to kill, limit or let hang, which has nothing to import first."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from typing import NamedTuple

import pytest

from vitruvian.cli.app import main

SECONDS = 120
"""After which a process counts as hanging, on however slow a machine."""


class Ran(NamedTuple):
    """How a process ended; the code is negative for a signal."""

    code: int
    out: str
    err: str


class Forked:
    """`vit` with these words, begun in a copy of this process; or any other work."""

    def __init__(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        first: Callable[[], object] = lambda: None,
        work: Callable[[], object] = main,
    ) -> None:
        self.ended: int | None = None
        self.texts: list[str] = []
        self.streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115, closed by wait
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of copies of a process with threads
            self.pid = os.fork()
        if self.pid == 0:
            self._begin([str(word) for word in words], env or {}, first, work)

    def _begin(
        self, words: list[str], env: Mapping[str, str], first: Callable[[], object], work: Callable[[], object]
    ) -> None:
        code = 99
        try:
            for number, stream in enumerate(self.streams, start=1):
                os.dup2(stream.fileno(), number)
            outputs = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # a copy may fork
            sys.stdout, sys.stderr = outputs
            os.environ.update(env)
            sys.argv = ["vit", *words]
            server = forkserver._forkserver  # of the parent, which a copy can neither wait for nor use
            server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
            first()
            code = exit_code(work)
        except BaseException:
            traceback.print_exc()
        finally:  # whatever fails: a copy that went on would run the tests again
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        if self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.ended = os.waitstatus_to_exitcode(status) if pid else None
        return self.ended

    def kill(self, number: int = signal.SIGKILL) -> Ran:
        """Send a signal and wait for the end."""
        if self.poll() is None:
            os.kill(self.pid, number)
        return self.wait()

    def wait(self, seconds: float = SECONDS) -> Ran:
        if not any(self.poll() is not None for _ in patience(seconds)):
            os.kill(self.pid, signal.SIGKILL)
            self.ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            pytest.fail(f"hangs: {seconds} s")
        for stream in self.streams[len(self.texts) :]:
            with stream:
                stream.seek(0)
                self.texts.append(stream.read().decode("utf-8", errors="replace"))
        return Ran(self.ended, *self.texts)

    def printed(self, stream: int = 1) -> str:
        """What has been printed so far; 2 is stderr."""
        return os.pread(self.streams[stream - 1].fileno(), 1 << 20, 0).decode()

    def until(self, happened: Callable[[], object]) -> Forked:
        """Wait for something that this process does before it ends."""
        for _ in patience(SECONDS):
            if happened():
                return self
            assert self.poll() is None, self.wait()
        pytest.fail("it never happened")


def patience(seconds: float) -> Iterator[None]:
    """Every few milliseconds of so many seconds; those in which this process was stopped do not count."""
    last = time.monotonic()
    while seconds > 0:
        yield
        time.sleep(0.003)
        last, before = time.monotonic(), last
        seconds -= min(last - before, 1.0)


def exit_code(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def vit(*words: object) -> Ran:
    """`vit` with these words, to its end."""
    return Forked(*words).wait()


def ranks(*words: object, count: int = 2, each: Sequence[Sequence[object]] = ()) -> list[Forked]:
    """`vit` with these words in as many processes as torchrun would begin, connected as it would connect them.

    `each`: further words for each of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "x"}
    return [
        Forked(*words, *own, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, own in enumerate(each or [()] * count)
    ]

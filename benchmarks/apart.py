"""Libraries side by side, each in a process of its own, asked in turn.

In one process the threads of a runtime take cores from the next one, and people use one library at a time.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peers import Forward, make_torchvision_importable

REST_SECONDS = 0.1
"""Before each is timed, in which the threads of the one before come to rest."""
CALLS = 6
"""Of a single image, which is too short a time to read off once."""


class Library:
    """What `build(*arguments)` gives, in its own process; `build` is a function at the top of a module."""

    def __init__(self, build: Callable[..., Forward], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=answer, args=(theirs, build, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it is built, so that the next one begins on free cores

    def ask(self, pixels: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The seconds of a forward pass, and the logits."""
        self._pipe.send(pixels.numpy())
        seconds, logits = self._pipe.recv()
        return seconds, torch.from_numpy(logits)

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


def answer(pipe: Connection, build: Callable[..., Forward], arguments: tuple[Any, ...]) -> None:
    """Time what was built on each batch that comes."""
    make_torchvision_importable()
    forward = build(*arguments)
    pipe.send("ready")
    while True:
        try:
            given: NDArray[np.float32] = pipe.recv()
        except EOFError:
            return
        pixels = torch.from_numpy(given)
        calls = max(1, CALLS // len(pixels))
        with torch.inference_mode():
            logits = forward(pixels) if calls > 1 else None
            start = time.perf_counter()
            for _ in range(calls):
                logits = forward(pixels)
            seconds = (time.perf_counter() - start) / calls
        assert logits is not None
        pipe.send((seconds, logits.numpy()))


@contextmanager
def apart(builders: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Library]]:
    """Each library with its builder and the arguments of that, one process after the other."""
    libraries: dict[str, Library] = {}
    try:
        for name, (build, *arguments) in builders.items():
            libraries[name] = Library(build, *arguments)
        yield libraries
    finally:
        for library in libraries.values():
            library.end()


def in_turn(
    libraries: dict[str, Library], pixels: torch.Tensor, rounds: int
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Seconds of each in each round, in an order drawn anew; and the logits of each, which a first call gave."""
    names, order = list(libraries), random.Random(0)
    logits = {name: libraries[name].ask(pixels)[1] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            time.sleep(REST_SECONDS)
            seconds[name].append(libraries[name].ask(pixels)[0])
    return seconds, logits

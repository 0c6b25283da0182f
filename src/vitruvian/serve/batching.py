"""Two threads own a model and take, whenever the model is free, whatever images are waiting.

Clients that were answered together ask again together; so that the cores are not idle until then, two batches may
overlap, each with half of what was accepted. A request reserves room for its images before any of them is decoded, so
that what cannot be answered in time is refused at once. Images of different requests share a batch; an image that
breaks the batch is found by running its images one by one, and only its own request sees the error.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

LONGEST_RETRY_SECONDS = 60
THREADS = 2
"""Batches of one model that can overlap."""


class Full(Exception):
    """There is no room for these images now."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class Closed(Exception):
    """The batcher stops and takes nothing new."""


@dataclass(frozen=True, slots=True, eq=False)
class Work(Generic[T, R]):
    """What is done with a batch; only jobs of the same work share one."""

    run: Callable[[list[T]], Sequence[R]]
    """From the values of a batch to as many results, in their order."""
    largest: int
    """Values in a batch, at most."""
    at_once: int = 1
    """Batches of it that may overlap, up to THREADS; it never overlaps with other work."""


@dataclass(slots=True, eq=False)
class Job:
    work: Work[Any, Any]
    value: Any
    future: Future[Any] = field(default_factory=Future)


class Batcher:
    """The queue of one model, bounded in images, and the threads that empty it."""

    def __init__(
        self, *, queue: int, name: str = "model", told: Callable[[int, float], None] = lambda images, seconds: None
    ) -> None:
        """`queue` images are accepted at a time; `told` hears the images and seconds of every batch."""
        self.queue = queue
        self.accepted = 0
        """Images that are reserved, waiting or being computed."""
        self._told = told
        self._image_seconds = 0.05  # a guess until the first batch is done
        self._jobs: deque[Job] = deque()
        self._open = True
        self._running: list[Work[Any, Any]] = []
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._loop, name=f"batch-{name}", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def reserve(self, images: int) -> Place:
        """Room for this many images, all or none; raises Full or Closed."""
        with self._changed:
            if not self._open:
                raise Closed("the service is shutting down")
            if self.accepted + images > self.queue:
                raise Full(self.retry_seconds())
            self.accepted += images
        return Place(self, images)

    def retry_seconds(self) -> int:
        """When what is accepted now will be done, about."""
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(self.accepted * self._image_seconds)))

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Refuse what is new, finish what was accepted; whether that was done in time."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _release(self, images: int) -> None:
        with self._changed:
            self.accepted -= images
            self._changed.notify_all()

    def _put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def _loop(self) -> None:
        while batch := self._take():
            work = batch[0].work
            self._run(batch)
            del batch  # images are not kept while the thread waits
            with self._changed:
                self._running.remove(work)
                self._changed.notify_all()

    def _take(self) -> list[Job]:
        """The jobs of the oldest one's work, in their order; none when all that was accepted is done."""
        with self._changed:
            while True:
                self._jobs = deque(job for job in self._jobs if not job.future.cancelled())
                if self._jobs and self._may_start(self._jobs[0].work):
                    break
                if not self._open and not self.accepted:
                    return []
                self._changed.wait()
            work = self._jobs[0].work
            most = self._share(work)
            batch: list[Job] = []
            others: deque[Job] = deque()
            for job in self._jobs:
                (batch if job.work is work and len(batch) < most else others).append(job)
            self._jobs = others
            self._running.append(work)
        return batch

    def _may_start(self, work: Work[Any, Any]) -> bool:
        """Whether the model is free, or busy with the same work alone while a whole share of it waits."""
        if not self._running:
            return True
        if len(self._running) >= work.at_once or any(each is not work for each in self._running):
            return False
        return sum(job.work is work for job in self._jobs) >= self._share(work)

    def _share(self, work: Work[Any, Any]) -> int:
        return min(work.largest, -(-self.accepted // work.at_once))

    def _run(self, batch: list[Job]) -> None:
        batch = [job for job in batch if job.future.set_running_or_notify_cancel()]
        if not batch:
            return
        work, started = batch[0].work, time.monotonic()
        results: list[tuple[Any, Exception | None]]
        try:
            results = [(value, None) for value in work.run([job.value for job in batch])]
            assert len(results) == len(batch), f"{len(batch)} values gave {len(results)} results"
        except Exception as error:
            results = [(None, error)] if len(batch) == 1 else [self._alone(job) for job in batch]
        seconds = time.monotonic() - started
        each = seconds / len(batch) / len(self._running)  # overlapping batches share the cores
        self._image_seconds += 0.2 * (each - self._image_seconds)
        self._told(len(batch), seconds)
        self._release(len(batch))  # first, so that whoever has a result finds the room free
        for job, (value, problem) in zip(batch, results):
            if problem is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(problem)

    def _alone(self, job: Job) -> tuple[Any, Exception | None]:
        try:
            (value,) = job.work.run([job.value])
            return value, None
        except Exception as error:
            return None, error


class Place:
    """Room for some images in a batcher, given back when their jobs are done or the block is left."""

    def __init__(self, batcher: Batcher, images: int) -> None:
        self._batcher = batcher
        self._unused = images

    def put(self, work: Work[T, R], values: Sequence[T]) -> list[Future[R]]:
        """Each value's future result; a future that is cancelled in time is never computed."""
        assert len(values) <= self._unused, "more images than were reserved"
        self._unused -= len(values)
        jobs = [Job(work, value) for value in values]
        for job in jobs:
            job.future.add_done_callback(lambda future: self._batcher._release(1) if future.cancelled() else None)
        self._batcher._put(jobs)
        return [job.future for job in jobs]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unused:
            self._batcher._release(self._unused)
            self._unused = 0

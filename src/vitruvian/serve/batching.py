"""The limits of the service, and dynamic batching: threads take whatever images wait whenever the model is free.

Two batches of one model may overlap, each with half of the accepted images: clients that were served together send
their next image together, and the cores would be idle until then. All others, and so all single images, are computed in
one thread: OpenMP waits actively for the next operation only if no other thread has a team of workers, which makes a
forward pass of one image up to twice as fast. A request reserves room for its images before any
of them is decoded, so that requests beyond the limit are refused at once. Images of different requests share a batch.
If a batch fails, its images are computed one by one, so that only the image at fault gets the error.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import starmap
from typing import Annotated, Any, Generic, Self, TypeVar

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.settings import MAX_INT, BatchSize, Range, Settings

T = TypeVar("T")
R = TypeVar("R")

Count = Annotated[int, Range(1, MAX_INT)]

MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits(Settings):
    """Limits of one request and of all requests together."""

    batch_size: BatchSize = DEFAULT_BATCH_SIZE  # maximum batch size of the model
    queue: Count = 64  # accepted images per model; further requests get status 429
    max_images: Count = 32  # images per request
    max_bytes: Count = 20_000_000  # bytes in the body of a request
    max_pixels: Count = 40_000_000  # pixels per image, whatever the size of its file
    max_seconds: Annotated[float, Range(0.01, 1e6)] = 30.0  # each for headers, body, decoding and response


class Refused(Exception):
    """A request that is not served: HTTP status, message for the client, and additional headers."""

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def queue_full(retry_seconds: int) -> Refused:
    """There is no room for these images now."""
    message = f"the queue is full; try again in {retry_seconds} s"
    return Refused(429, message, headers={"retry-after": str(retry_seconds)})


@dataclass(frozen=True, slots=True, eq=False)
class BatchFunction(Generic[T, R]):
    """A computation over batches; only values of the same function share a batch."""

    run: Callable[[list[T]], Sequence[R]]  # from the values of a batch to one result for each, in the same order
    max_batch: int
    max_parallel: int = 1  # overlapping batches, up to 2; they never overlap with another function


@dataclass(slots=True, eq=False)
class QueuedValue:
    """A value that waits for its function."""

    function: BatchFunction[Any, Any]
    value: Any
    future: Future[Any] = field(default_factory=Future)


class Batcher:
    """The queue of one model, bounded in images, and the threads that process it.

    Args:
        queue: Number of images that are accepted at a time.
        on_batch: Called with the images and seconds of every batch.
    """

    def __init__(
        self, *, queue: int, name: str = "model", on_batch: Callable[[int, float], None] = lambda images, seconds: None
    ) -> None:
        self.queue = queue
        self.accepted = 0  # images that are reserved, waiting or being computed
        self.seconds_per_image = 0.05  # moving average; a guess until the first batch is done
        self._on_batch = on_batch
        self._waiting: deque[QueuedValue] = deque()
        self._open = True
        self._running: list[tuple[BatchFunction[Any, Any], int]] = []  # functions and images of the current batches
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._loop, args=(helps,), name=f"batch-{name}", daemon=True)
            for helps in (False, True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_full(self) -> bool:
        return self.accepted >= self.queue

    def reserve(self, images: int) -> "Reservation":
        """Room for all of these images; raises Refused."""
        with self._changed:
            if not self._open:
                raise Refused(503, "the service is shutting down", headers={"retry-after": "1"})
            if self.accepted + images > self.queue:
                raise queue_full(self.retry_seconds())
            self.accepted += images
        return Reservation(self, images)

    def retry_seconds(self) -> int:
        """Estimated time until the accepted images are done."""
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self.accepted * self.seconds_per_image)))

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Refuse new images and finish the accepted ones; returns whether that was done in time."""
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

    def _loop(self, helps: bool) -> None:
        """Compute batches; a thread that `helps` computes only those that overlap with another."""
        while batch := self._take(helps):
            if helps:  # in a thread whose team of workers ends with it
                helper = threading.Thread(target=self._run, args=(batch,), daemon=True)
                helper.start()
                helper.join()
                del helper
            else:
                self._run(batch)
            del batch  # do not keep the images while the thread waits

    def _take(self, helps: bool) -> list[QueuedValue]:
        """The next batch, of the oldest value's function; empty when the batcher has stopped."""
        with self._changed:
            while True:
                self._waiting = deque(value for value in self._waiting if not value.future.cancelled())
                if self._waiting and self._may_start(self._waiting[0].function) and (self._running or not helps):
                    break
                if not self._open and not self.accepted:
                    return []
                self._changed.wait()
            function = self._waiting[0].function
            size = self._batch_size(function)
            batch: list[QueuedValue] = []
            remaining: deque[QueuedValue] = deque()
            for value in self._waiting:
                (batch if value.function is function and len(batch) < size else remaining).append(value)
            self._waiting = remaining
            self._running.append((function, len(batch)))
            self._changed.notify_all()  # another batch may overlap with this one
        return batch

    def _may_start(self, function: BatchFunction[Any, Any]) -> bool:
        """Whether the model is free, or runs only this function and enough values for another batch wait.

        All cores share a single image, so it does not overlap with others.
        """
        if not self._running:
            return True
        size, is_apart = self._batch_size(function), lambda other, images: other is not function or images == 1
        if size == 1 or len(self._running) >= function.max_parallel or any(starmap(is_apart, self._running)):
            return False
        return sum(value.function is function for value in self._waiting) >= size

    def _batch_size(self, function: BatchFunction[Any, Any]) -> int:
        return min(function.max_batch, -(-self.accepted // function.max_parallel))

    def _run(self, batch: list[QueuedValue]) -> None:
        function, size = batch[0].function, len(batch)
        batch = [value for value in batch if value.future.set_running_or_notify_cancel()]
        started = time.monotonic()
        results = _results(function, [queued.value for queued in batch]) if batch else []
        seconds = time.monotonic() - started
        if batch:
            seconds_per_image = seconds / len(batch) / len(self._running)  # overlapping batches share the cores
            self.seconds_per_image += 0.2 * (seconds_per_image - self.seconds_per_image)
            self._on_batch(len(batch), seconds)
        with self._changed:  # before the results, so that a client can send its next image at once
            self._running.remove((function, size))
            self.accepted -= len(batch)
            self._changed.notify_all()
        for queued, result in zip(batch, results):
            if isinstance(result, Exception):
                queued.future.set_exception(result)
            else:
                queued.future.set_result(result)


def _results(function: BatchFunction[Any, Any], values: list[Any]) -> list[Any]:
    """The result or the exception of each value; those of a batch that fails are computed one by one."""
    try:
        results = list(function.run(values))
        assert len(results) == len(values), f"{len(values)} values gave {len(results)} results"
        return results
    except BaseException as error:  # Rust libraries panic with a BaseException, which would end the thread
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return [error] if len(values) == 1 else [_results(function, [value])[0] for value in values]


class Reservation:
    """Room for some images in a batcher, released when they are done or when the `with` block is left."""

    def __init__(self, batcher: Batcher, images: int) -> None:
        self._batcher = batcher
        self._unused = images

    def put(self, function: BatchFunction[T, R], values: Sequence[T]) -> list[Future[R]]:
        """Queue values; a future that is cancelled in time is never computed."""
        assert len(values) <= self._unused, "more images than reserved"
        self._unused -= len(values)
        queued = [QueuedValue(function, value) for value in values]
        for value in queued:
            value.future.add_done_callback(lambda future: self._batcher._release(1) if future.cancelled() else None)
        with self._batcher._changed:
            self._batcher._waiting.extend(queued)
            self._batcher._changed.notify_all()
        return [value.future for value in queued]

    def release(self, images: int) -> None:
        """Give back the room of images that are not queued yet."""
        self._unused -= images
        self._batcher._release(images)

    def extend(self, images: int) -> None:
        """Room for more images; raises Refused."""
        self._batcher.reserve(images)
        self._unused += images

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unused:
            self.release(self._unused)

"""Worker processes and threads that apply a function to items and return the results in order.

The processes come from a fork server: a clean process without threads, from which forking is safe whatever this one
runs (CUDA, OpenMP, file systems with threads), and which imports PyTorch once for all workers. A script that uses
workers therefore needs the usual `if __name__ == "__main__":`.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import chain, islice
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Generic, TypeVar

from vitruvian.errors import DataError, VitruvianError, argument
from vitruvian.settings import Workers as WorkerCount
from vitruvian.settings import validate
from vitruvian.text import describe_error

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 2  # number of results that each worker prefetches
TOO_MANY, NOT_PICKLABLE = "This DataLoader will create", "Got pickle error"
"""Prefixes of two PyTorch warnings: about more workers than cores, the user's choice, and before an error."""


class CallDataset:
    """The results of a function as a dataset; an error is an item too, as a VitruvianError, which can be pickled."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.function(item)
        except VitruvianError as error:
            return error
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{last.filename}, line {last.lineno}"
            return DataError(f"{type(error).__name__} in a data worker: {describe_error(error)} ({line})")


class ItemSampler:
    """The items to call the function with; replaced for each iteration."""

    items: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Workers(Generic[Item, Result]):
    """One or more processes that live until `close`, or until this object is deleted or this process ends."""

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        import torch  # takes seconds, and is not needed without workers
        from torch.utils.data import DataLoader

        context: BaseContext = multiprocessing.get_context("spawn")  # on Windows, which has no fork server
        if "forkserver" in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch.utils.data", __name__])
            forkserver.ensure_running()  # it starts to import PyTorch now
        self._items = ItemSampler()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", TOO_MANY)
            options: dict[str, Any] = {"num_workers": count, "prefetch_factor": AHEAD, "persistent_workers": True}
            self._loader: Iterable[Any] | None = DataLoader(
                CallDataset(function),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._items,
                collate_fn=identity,
                worker_init_fn=start_worker,
                multiprocessing_context=context,
                generator=torch.Generator(),  # otherwise the global generator would depend on the workers
                **options,
            )

    def results(self, items: Iterable[Item]) -> Iterator[Result]:
        """The result for each item, in order; ends the iteration of an earlier call."""
        if self._loader is None:
            raise DataError("the data workers are closed")
        self._items.items = items
        try:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", f"{TOO_MANY}|{NOT_PICKLABLE}")
                    results = iter(self._loader)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self.close()
                raise DataError(
                    f"the dataset or the transform cannot be sent to data workers ({describe_error(error)}): define "
                    "its classes and functions at the top of a module, without lambdas, or use "
                    f"{argument('workers', 0)}"
                ) from error
            for result in results:
                if isinstance(result, VitruvianError):
                    raise result.replace()  # a copy, or its traceback would keep the workers alive
                yield result
        except (RuntimeError, ConnectionError, EOFError) as error:  # the memory of a result is fetched from its worker
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            self.close()
            reason = f"a data worker died ({describe_error(error)}); if memory or /dev/shm is short, use fewer workers"
            raise DataError(reason) from error

    def close(self) -> None:
        self._loader = None  # deleting the iterator stops its processes


def identity(result: Result) -> Result:
    return result


def start_worker(_: int) -> None:
    """Initialize a worker: ignore Ctrl-C, which the parent handles, and exit if the parent is killed.

    PyTorch only watches the process that forked the worker, which is the fork server.
    """
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def unguarded_script() -> str:
    """The line of the running script that called us without `if __name__ == "__main__":` above it, or "".

    A worker imports the script again and would start workers itself. Code without a file, such as a notebook, is not
    imported, nor is the `__main__` of a package.
    """
    for frame, line in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            path, spec = frame.f_globals.get("__file__"), frame.f_globals.get("__spec__")
            if path != frame.f_code.co_filename or (spec is not None and spec.name.endswith(".__main__")):
                return ""
            with suppress(OSError):
                above = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[:line]
                return "" if any("__main__" in text for text in above) else f"line {line} of {path}"
    return ""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, chunk: int = 1
) -> Iterator[Result]:
    """Apply `function` in worker processes (0: in this one), `chunk` items per task; yields results in order."""
    if validate("workers", WorkerCount, workers) == 0:
        yield from map(function, items)
        return
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, chunk)), [])
    with closing(Workers(partial(call_each, function), workers)) as processes:
        yield from chain.from_iterable(processes.results(chunks))


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int
) -> Iterator[Result]:
    """Apply `function` to the items in threads, up to `ahead` items in advance; yields the results in order."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def call_each(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    return list(map(function, items))

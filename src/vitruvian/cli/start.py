"""What a command does before its work: import quickly, keep other libraries' remarks and processes off the terminal."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitruvian.__main__ import leave
from vitruvian.progress import print_status


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside this block without garbage collection, now and when the process ends; Pillow is quiet afterwards.

    torch brings a million objects that stay; looking through them again and again takes a quarter of the time
    of `vit predict` for one image. Ctrl-C ends the process here without an exception, which an import could swallow.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, leave)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
    # No remarks about odd metadata: an image decodes all the same or gives an error of ours.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


def note_replaced(destination: str | Path) -> None:
    """Say what a command will write over, while it can still be stopped."""
    path = Path(destination).expanduser()
    with suppress(OSError):
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            print_status(f"note: {path}: exists; files of the same names are replaced when the new ones are complete")


def speaks() -> bool:
    """Whether this process prints the result: it is alone, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"

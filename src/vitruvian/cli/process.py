"""The process of a command: its streams, quick imports, and whether it is the one that prints.

This module imports little, because `vit` runs it before anything else.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def exit_at_once(*_: object) -> None:
    """Exit with 130 and without a message, as a handler of Ctrl-C."""
    os._exit(130)


def protect_streams() -> None:
    """Open closed standard streams on /dev/null, and keep C libraries from writing to stderr.

    Otherwise the next file that is opened would take the place of a closed stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    if sys.stderr is not None and not os.environ.get("VIT_TRACEBACK"):
        sys.stderr.flush()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
        os.close(silent)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside this block without garbage collection, then exempt the imported objects from it.

    torch creates a million objects that stay alive; traversing them again and again takes a quarter of the time of
    `vit predict` for one image. Ctrl-C exits here without an exception, which an import could swallow.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if handler is signal.default_int_handler and in_main_thread:
        signal.signal(signal.SIGINT, exit_at_once)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
    silence_pillow()


def silence_pillow() -> None:
    """Silence warnings about invalid metadata: such an image is decoded anyway, or we raise our own error."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


def prints_results() -> bool:
    """Whether this process prints the result: it runs alone, or is rank 0 of torchrun."""
    return os.environ.get("RANK", "0") == "0"

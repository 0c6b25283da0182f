"""`vit`, also as `python -m vitruvian`: Ctrl-C ends it at once, even while it imports, and libraries keep quiet."""

from __future__ import annotations

import os
import signal
import sys


def leave(*_: object) -> None:
    """End without a word; an exception could be swallowed by a package that is being imported."""
    os._exit(130)


def open_streams() -> None:
    """Keep what the caller closed from being opened again as some file, and C libraries from writing to stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stderr is not None and not os.environ.get("VIT_TRACEBACK"):
        sys.stderr.flush()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
        os.close(silent)


def main() -> None:
    interrupt = signal.getsignal(signal.SIGINT)  # ignored where the shell asks for it
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    open_streams()
    from vitruvian.cli import main as run

    signal.signal(signal.SIGINT, interrupt)
    try:
        run()
    except KeyboardInterrupt:
        leave()


if __name__ == "__main__":
    main()

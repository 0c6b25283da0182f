"""The entry point of `vit` and of `python -m vitruvian`; handles Ctrl-C and the streams before importing much."""

import os
import signal
import sys


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


def main() -> None:
    """Run `vit`. Ctrl-C ends it at once, also during imports, where a package could swallow an exception."""
    handler = signal.getsignal(signal.SIGINT)  # SIG_IGN if the shell started us in the background
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    protect_streams()
    from vitruvian.cli.app import main as run

    signal.signal(signal.SIGINT, handler)
    try:
        run()
    except KeyboardInterrupt:
        exit_at_once()


if __name__ == "__main__":
    main()

"""The entry point of `vit` and of `python -m vitruvian`."""

from __future__ import annotations

import signal

from vitruvian.cli.process import exit_at_once, protect_streams


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

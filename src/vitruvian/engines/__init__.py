"""Models as graphs for other runtimes: export, sessions, the choice of the fastest, measurements."""

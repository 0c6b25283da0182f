"""The tables and figures of the paper, measured: models x tasks, and families over data and compute."""

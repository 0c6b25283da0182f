"""The tables and figures of the paper, measured: models x tasks, and kinds of models over data and compute."""

STUDY_FILE = "study.json"
"""In a study's folder: its cells, as far as they are measured."""

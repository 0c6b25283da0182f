"""The paper's tables and figures: transfer of models to tasks, and accuracy over data size and compute."""

STUDY_FILE = "study.json"
"""The cells of a study, in its folder."""

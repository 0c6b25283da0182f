"""The paper's tables, figures and ablations: transfer of models to tasks, trained models, and speed."""

STUDY_FILE = "study.json"  # the cells of a study, in its folder

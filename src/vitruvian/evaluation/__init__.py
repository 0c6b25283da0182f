"""Evaluation: accuracy, calibration and probes of a model, with reports."""

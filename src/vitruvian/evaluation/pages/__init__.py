"""The reports of evaluations and probes."""

"""How good a model is, and pages that show it."""

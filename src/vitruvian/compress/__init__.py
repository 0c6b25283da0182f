"""Faster models and the accuracy they lose: int8, token merging, cascades, and the search among them."""

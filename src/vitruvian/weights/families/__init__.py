"""One two-way table per foreign family of weights."""

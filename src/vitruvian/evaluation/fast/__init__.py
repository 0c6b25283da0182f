"""A faster model, and what it costs: int8, fewer tokens, and the search among them within a loss."""

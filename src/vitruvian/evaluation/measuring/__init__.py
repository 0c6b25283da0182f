"""How good a model is on labeled images, and whether its probabilities can be believed."""

"""Tensors: the Vision Transformer, its hybrids and the BiT ResNet."""

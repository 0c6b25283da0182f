"""Weights: every published family in and out, and the native folder between them."""

from vitruvian.weights.convert import Certificate, convert
from vitruvian.weights.load import load
from vitruvian.weights.save import save

__all__ = ["Certificate", "convert", "load", "save"]

"""Weights: every published family in and out, and the native folder between them."""

from vitruvian.weights.load import load
from vitruvian.weights.save import Certificate, convert, save

__all__ = ["Certificate", "convert", "load", "save"]

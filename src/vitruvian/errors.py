"""Every error a user can meet, as one tree, and the hints that go into their texts.

VitruvianError
├── ConfigError         a setting that cannot be (also a ValueError)
│   └── UnknownNameError  a name nobody knows, answered with the nearest ones
├── CheckpointError     weights that cannot be read, or do not fit the model
│   └── ConversionError   weights that another family cannot express
├── HubError            a published file that could not be had
├── NotFiniteError      a model whose answers are no finite numbers
├── ImageError          an image that cannot be decoded
├── DataError           a data set that cannot be used
├── TrainingError       a run that cannot start or go on
│   ├── Interrupted       a run stopped by a signal, safely (training.signals)
│   └── Diverged          a run whose loss or weights are no numbers any more (training.loop)
└── MissingExtraError   an optional package that is not installed (also an ImportError)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class VitruvianError(Exception):
    """Base of all errors raised on purpose; its text is one line meant for the user."""


class ConfigError(VitruvianError, ValueError):
    """A setting that cannot be."""


class UnknownNameError(ConfigError):
    """A name nobody knows; the text lists the nearest known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        near = nearest(name, known)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint}{' ' + see if see else ''}")


class CheckpointError(VitruvianError):
    """Weights that cannot be read, or do not fit the model."""


class ConversionError(CheckpointError):
    """Weights that another family cannot express."""


class HubError(VitruvianError):
    """A published file that could not be had."""


class NotFiniteError(VitruvianError):
    """A model whose answers are no finite numbers."""


class ImageError(VitruvianError):
    """An image that cannot be decoded."""


class DataError(VitruvianError):
    """A data set that cannot be used."""


class TrainingError(VitruvianError):
    """A run that cannot start or go on."""


class MissingExtraError(VitruvianError, ImportError):
    """An optional package that is not installed."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` known names that look like `name`, best first; case and punctuation count little."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    return [by_plain[match] for match in difflib.get_close_matches(plain(name), by_plain, most, 0.6)]


def require(module: str, extra: str) -> ModuleType:
    """The imported module, or a MissingExtraError that names the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {module.split('.')[0]!r}: pip install 'vitruvian[{extra}]'"
        ) from error

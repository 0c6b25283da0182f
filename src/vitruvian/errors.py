"""Every error a user can meet, as one tree, and the hints that go into their texts.

VitruvianError
├── ConfigError         a setting that cannot be (also a ValueError)
│   └── UnknownNameError  a name nobody knows, answered with the nearest ones
├── FileError           a file that cannot be read, written or locked
├── CheckpointError     weights that cannot be read, or do not fit the model
│   ├── DamagedFileError  a file that is cut short, or that holds no weights
│   └── ConversionError   weights that another family cannot express
├── HubError            a published file that could not be downloaded
├── NotFiniteError      a model whose answers are no finite numbers
├── ImageError          an image that cannot be decoded
├── DataError           a dataset that cannot be used
├── TrainingError       a run that cannot start or go on
│   ├── Interrupted       a run stopped by a signal, with its work kept
│   └── Diverged          a run whose loss or weights are no numbers any more (training.loop)
└── MissingExtraError   an optional package that is not installed (also an ImportError)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

LONGEST = 100
"""Characters of a value that an error text shows."""


class VitruvianError(Exception):
    """Base of all errors raised on purpose; its text is one line meant for the user.

    It names an argument as Python code does, `heads=` or `heads=3`; a command shows its own option instead.
    """

    exit_code = 1
    """Of a command that ends with this error."""


class ConfigError(VitruvianError, ValueError):
    """A setting that cannot be."""


class UnknownNameError(ConfigError):
    """A name nobody knows; the text lists the nearest known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, see: str = "") -> None:
        near = nearest(name, known)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {shown(name)}{hint}{' ' + see if see else ''}")


class FileError(VitruvianError):
    """A file that cannot be read, written or locked."""


class CheckpointError(VitruvianError):
    """Weights that cannot be read, or do not fit the model."""


class DamagedFileError(CheckpointError):
    """A file that is cut short, or that holds no weights."""


class ConversionError(CheckpointError):
    """Weights that another family cannot express."""


class HubError(VitruvianError):
    """A published file that could not be downloaded."""


class NotFiniteError(VitruvianError):
    """A model whose answers are no finite numbers."""


class ImageError(VitruvianError):
    """An image that cannot be decoded."""


class DataError(VitruvianError):
    """A dataset that cannot be used."""


class TrainingError(VitruvianError):
    """A run that cannot start or go on."""


class Interrupted(TrainingError):
    """A run that was asked to stop and has kept its work."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number
        """Of the signal."""
        self.exit_code = 128 + number


class MissingExtraError(VitruvianError, ImportError):
    """An optional package that is not installed."""


def shown(value: object) -> str:
    """A value as an error text shows it: as Python writes it, in one line of at most about 100 characters."""
    if isinstance(value, int) and value.bit_length() > 300:
        return f"{'-' if value < 0 else ''}10**{int(value.bit_length() * 0.30103)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits inside, or nested thousands deep
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}...{text[-17:]}"


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` known names that look like `name`, best first; case and punctuation count little."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    return [by_plain[match] for match in difflib.get_close_matches(plain(name[:LONGEST]), by_plain, most, 0.6)]


def require(module: str, extra: str) -> ModuleType:
    """The imported module, or a MissingExtraError that names the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {module.split('.')[0]!r}: pip install 'vitruvian[{extra}]'"
        ) from error

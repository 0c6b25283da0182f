"""Every error that Vitruvian raises on purpose, as one tree, and the helpers that write their texts.

VitruvianError
├── ConfigError           an invalid setting or argument (also a ValueError)
│   └── UnknownNameError    a name that is not in a table; the text suggests similar names
├── FileError             a file cannot be read, written or locked
├── CheckpointError       weights cannot be read, or do not fit the model
│   ├── DamagedFileError    a file is truncated, or contains no weights
│   └── ConversionError     another family cannot express these weights
├── HubError              a published file could not be downloaded
├── NotFiniteError        the model produced NaN or infinite outputs
├── ImageError            an image cannot be decoded
├── DataError             a dataset cannot be used
├── TrainingError         a run cannot start or continue
│   ├── Interrupted         a run was stopped by a signal; its progress is saved
│   └── Diverged            the loss or the weights became NaN or infinite (training.loop)
└── MissingExtraError     an optional package is not installed (also an ImportError)

An error is built from fields, and its text is formatted in one place, `VitruvianError.__str__`:

    raise CheckpointError("the head has 10 classes, there are 5 labels", where=path, hint=f"pass {argument('labels')}")

reads "path: the head has 10 classes, there are 5 labels; pass labels=", and on the command line "...; pass --labels".
Code that handles an error reads its fields and never its text.
"""

import copy
import copyreg
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vitruvian.text import describe_error, printable, shorten

MAX_VALUE_CHARS = 100  # maximum number of characters of a value in an error text
MAX_CHARS = 1000  # maximum number of characters of an error text

_MARK = "\x1f"  # around arguments in a reason or a hint, from `argument` until the text is formatted


def python_spelling(name: str, value: str) -> str:
    """An argument as Python code spells it: `num_heads=` or `num_heads=3`."""
    return f"{name}={value}"


class VitruvianError(Exception):
    """Base of all errors raised on purpose. Its text, one line, is meant for the user: "where: reason; hint".

    Args:
        reason: What is wrong, in a sentence without a period. Values and limits belong here.
        where: The file, directory, URL or setting that the error is about.
        hint: What to do about it.
    """

    exit_code = 1
    """Exit code of a command that ends with this error."""
    spell: Callable[[str, str], str] = staticmethod(python_spelling)
    """How the text spells an argument and its value ("" if it has none); commands set it to their options."""

    def __init__(self, reason: str, *, where: object = None, hint: str = "") -> None:
        super().__init__(reason)
        self._reason, self._hint = reason, hint
        self.where = where
        """The file, directory, URL or setting that the error is about."""

    @property
    def reason(self) -> str:
        """What is wrong."""
        return self._format(self._reason)

    @property
    def hint(self) -> str:
        """What to do about it; empty if there is no advice."""
        return self._format(self._hint)

    @property
    def parameter(self) -> str:
        """The first argument that reason or hint spell with `argument`; empty if the error is not about one."""
        return "".join((self._reason + self._hint).split(_MARK)[1:2]).partition("=")[0]

    def __str__(self) -> str:
        where = "" if self.where is None else f"{self.where}: "
        hint = f"; {self.hint}" if self._hint else ""
        return shorten(printable(f"{where}{self.reason}{hint}"), MAX_CHARS)  # names in files may contain anything

    def _format(self, text: str) -> str:
        parts = text.split(_MARK)
        parts[1::2] = [self.spell(*part.split("=", 1)) for part in parts[1::2]]
        return "".join(parts)

    def replace(
        self, kind: "type[VitruvianError] | None" = None, *, where: object = None, hint: str = ""
    ) -> "VitruvianError":
        """A copy of this error, optionally of another class, with `where` prepended and `hint` appended."""
        error = copy.copy(self) if kind is None else kind(self._reason, where=self.where, hint=self._hint)
        if where is not None:
            error.where = where if self.where is None else f"{where}: {self.where}"
        error._hint = "; ".join(filter(None, (self._hint, hint)))
        return error

    def __reduce__(self) -> tuple[Any, ...]:  # pickled by fields: subclasses have other arguments
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(VitruvianError, ValueError):
    """An invalid setting or argument."""


class UnknownNameError(ConfigError):
    """A name that is not in a table; the text suggests similar names.

    Args:
        kind: What the name should have been, such as "model".
        name: The unknown name.
        known: The names that are in the table.
        see: Where to find all of them, in parentheses; ends the text.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, see: str = "", where: object = None) -> None:
        self.kind, self.name = kind, name
        near = nearest(name, known)
        see = f" {see}" if see else ""
        reason = f"unknown {kind} {short_repr(name)}"
        if near:
            super().__init__(reason, where=where, hint=f"did you mean {' or '.join(near)}?{see}")
        else:
            super().__init__(reason + see, where=where)


class FileError(VitruvianError):
    """A file cannot be read, written or locked."""


class CheckpointError(VitruvianError):
    """Weights cannot be read, or do not fit the model."""


class DamagedFileError(CheckpointError):
    """A file is truncated, or contains no weights."""


class ConversionError(CheckpointError):
    """Another family cannot express these weights."""


class HubError(VitruvianError):
    """A published file could not be downloaded."""


class NotFiniteError(VitruvianError):
    """The model produced NaN or infinite outputs."""


class ImageError(VitruvianError):
    """An image cannot be decoded."""


class DataError(VitruvianError):
    """A dataset cannot be used."""


class TrainingError(VitruvianError):
    """A run cannot start or continue."""


class Interrupted(TrainingError):
    """A run was stopped by a signal; its progress is saved."""

    def __init__(self, reason: str, signal_number: int) -> None:
        super().__init__(reason)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class MissingExtraError(VitruvianError, ImportError):
    """An optional package is not installed."""


@contextmanager
def parsing(where: object, raises: type[VitruvianError], *, reason: str = "", hint: str = "") -> Iterator[None]:
    """The boundary around a parser of untrusted files: any exception becomes `raises`, one line that names the file.

    Libraries raise nearly anything for a damaged file, and so does our own code for values of unexpected types. Errors
    that the parser raises on purpose pass through. With a `reason`, an OSError without errno, as libraries
    raise it for damaged content, counts as damage.
    """
    try:
        yield
    except VitruvianError as error:
        is_setting = isinstance(error, ConfigError) and not issubclass(raises, ConfigError)  # in the file
        raise (error.replace(raises, where=where) if is_setting and error.where is None else error) from error.__cause__
    except Exception as error:
        text = f"{reason or 'damaged or not supported'} ({describe_error(error)})"
        if isinstance(error, OSError) and not (reason and error.errno is None):
            text, where = f"cannot be read: {describe_error(error)}", error.filename or where
        raise raises(text, where=where, hint=hint) from error


_NO_VALUE = object()


def argument(name: str, value: object = _NO_VALUE, format_spec: str = "") -> str:
    """An argument to name in the reason or the hint of an error, optionally with its value (its repr unless formatted).

    It reads `num_heads=` or `num_heads=3` in Python, and `--num-heads` or `--num-heads 3` in the error of a command.
    """
    text = "" if value is _NO_VALUE else format(value, format_spec) if format_spec else short_repr(value)
    return f"{_MARK}{name}={text}{_MARK}"


def short_repr(value: object) -> str:
    """The repr of a value for an error text: one line of at most about 100 characters."""
    if isinstance(value, int) and value.bit_length() > 300:
        return f"{'-' if value < 0 else ''}10**{int(value.bit_length() * 0.30103)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits inside, or nested thousands deep
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 20]}...{text[-17:]}"


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` known names that are similar to `name`, best first, ignoring case and punctuation."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    matches = difflib.get_close_matches(plain(name[:MAX_VALUE_CHARS]), by_plain, most, 0.6)
    return [by_plain[match] for match in matches]


def require(module: str, extra: str) -> ModuleType:
    """Import and return a module; a MissingExtraError names the pip command if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"this needs the package {module.split('.')[0]!r}: {install_hint(extra)}") from error


def install_hint(extra: str) -> str:
    """How to install an extra; the package is in no index."""
    return f"run pip install '.[{extra}]' in a copy of the repository"

"""Frozen settings whose values are checked against the types and limits of their fields."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from vitruvian.errors import ConfigError, UnknownNameError, argument, nearest, short_repr

Size = tuple[int, int]
"""Rows, columns."""
MAX_SIDE = 2**14
"""Maximum side of a model's input, in pixels."""
MAX_INT = 2**63 - 1
"""Limit of integers that have no other limit."""
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Mapping: "a table"}


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of a number, both inclusive: `depth: Annotated[int, Range(1, 1024)] = 12`."""

    least: float
    most: float = math.inf

    def check(self, name: str, value: float) -> None:
        if not self.least <= value <= self.most:
            limits = f"at least {self.least}" if self.most == math.inf else f"between {self.least} and {self.most}"
            raise ConfigError(f"{argument(name, value)} is not {limits}")


Share = Annotated[float, Range(0.0, 1.0)]
Seed = Annotated[int, Range(0, MAX_INT)]
BatchSize = Annotated[int, Range(1, 2**20)]
Workers = Annotated[int, Range(0, 1024)]
"""Number of worker processes."""


class Settings:
    """Base of frozen dataclasses of numbers, strings, tuples and other settings: validation, and JSON in and out."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            value = getattr(self, name)
            if type(value) is hint and hint in (bool, str):
                continue
            valid = validate(name, hint, value)
            if valid is not value:
                object.__setattr__(self, name, valid)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if values contradict each other; each one alone has been validated."""

    def to_json(self) -> dict[str, Any]:
        """The settings as a dictionary that can be written as JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """The settings that `to_json` wrote.

        Args:
            data: Values by field; missing fields keep their defaults.
            where: Prefix of the names in errors, such as "augment".

        Raises:
            ConfigError: If a value is invalid, or a key unknown.
        """
        return cls(**{key: validate_field(cls, key, value, where) for key, value in data.items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, which is validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def field_types(settings: Any) -> dict[str, Any]:
    """The types of all fields of a settings class, with their limits."""
    return _field_types(settings)  # a plain function, since mypy does not consider dataclass types hashable


@cache
def _field_types(settings: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def validate_field(settings: type[Settings], key: str, value: Any, where: str = "") -> Any:
    """Validate the value of one field of a settings class; an unknown field is an UnknownNameError."""
    hints = field_types(settings)
    prefix = f"{where}." if where else ""
    if key not in hints:
        raise UnknownNameError("setting", f"{prefix}{key}", [prefix + known for known in hints])
    return validate(prefix + key, hints[key], value)


def validate(name: str, hint: Any, value: Any) -> Any:
    """Check that `value` has the type and the limits of `hint`, and convert it to that type.

    Raises:
        ConfigError: If it does not; the text names the setting and what it accepts.
    """
    kind = get_origin(hint) or hint
    if kind is Annotated:
        valid = validate(name, get_args(hint)[0], value)
        for limits in get_args(hint)[1:]:
            limits.check(name, valid)
        return valid
    if hint is Any:
        return value
    if hint == Size:
        return as_size(value, name)
    if kind is Literal:
        check_choice(name, value, get_args(hint))
        return value
    if kind in (Union, types.UnionType):
        return _validate_union(name, get_args(hint), value)
    if kind is tuple:
        return _validate_tuple(name, get_args(hint), value)
    if isinstance(kind, type) and issubclass(kind, Settings):
        if isinstance(value, Mapping):
            value = kind.from_json(value, name)
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{argument(name, value)} is not a table of settings", hint=f"write {name}.KEY=VALUE")
    return _validate_scalar(name, kind, value)


def _validate_union(name: str, hints: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is not type(None):
            try:
                return validate(name, hint, value)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def _validate_tuple(name: str, hints: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{argument(name, value)} is not a list, such as [1, 2]")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise ConfigError(f"{argument(name, list(value))} does not have {len(hints)} values")
    items = tuple(validate(name, hint, item) for hint, item in zip(hints, value))
    return value if isinstance(value, tuple) and items == value else items


def _validate_scalar(name: str, kind: Any, value: Any) -> Any:
    valid = value
    if kind in (int, float) and not isinstance(value, bool) and isinstance(value, numbers.Real):
        valid = _validate_number(name, kind, value)
    elif kind is str and isinstance(value, os.PathLike):
        valid = os.fspath(value)
    if not isinstance(valid, kind) or (kind is int and isinstance(valid, bool)):
        raise ConfigError(f"{argument(name, value)} is not {TYPE_NAMES.get(kind, getattr(kind, '__name__', kind))}")
    return valid


def _validate_number(name: str, kind: type, value: Any) -> Any:
    """Convert a number of any library to Python's type; a float without a fraction is accepted as an integer."""
    try:
        converted = float(value)
        if not math.isfinite(converted):
            raise ConfigError(f"{argument(name, value)} is not a finite number")
        if kind is int:
            converted = int(value) if converted.is_integer() and isinstance(value, float) else operator.index(value)
    except TypeError:
        return value
    except OverflowError:
        converted = math.inf
    if abs(converted) > (MAX_INT if kind is int else sys.float_info.max):
        raise ConfigError(f"{argument(name, value)} is too large")
    return value if type(value) is kind else converted


def as_size(value: int | Size | list[int], name: str = "image_size") -> Size:
    """Convert `384` or `(rows, columns)` to (rows, columns)."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(type(side) is not bool and hasattr(side, "__index__") and side > 0 for side in pair):
        raise ConfigError(f"{argument(name, value)} is not a positive number or (rows, columns)")
    if max(pair) > MAX_SIDE:
        raise ConfigError(f"{argument(name, value)} has a side above {MAX_SIDE}")
    return int(pair[0]), int(pair[1])


def check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    """Raise ConfigError if `value` is not one of `choices`; the text suggests a similar one."""
    known = list(map(str, choices))
    if value not in known:
        near = nearest(value, known, 1) if isinstance(value, str) else []
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{argument(name, value)} is not one of {', '.join(known)}", hint=hint)


def environment_number(name: str, default: int) -> int:
    """An integer from an environment variable, such as those that torchrun sets."""
    text = os.environ.get(name) or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise ConfigError(f"the environment variable {name}={short_repr(text)} is not an integer", hint="unset it")
    return int(text)


def check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise ConfigError if `value` is outside of [`least`, `most`]."""
    Range(least, most).check(name, value)

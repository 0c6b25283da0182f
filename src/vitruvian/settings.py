"""Frozen settings: each value has the type and the limits that its field states, whoever makes them."""

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
"""Pixels of the longest side that a model or its view may ask for."""
LARGEST = 2**63 - 1
"""Of whole numbers that state no limit."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Mapping: "a table"}


@dataclass(frozen=True, slots=True)
class Range:
    """The limits of a number, both of them allowed: `layers: Annotated[int, Range(1, 1024)] = 12`."""

    least: float
    most: float = math.inf

    def check(self, name: str, value: float) -> None:
        if not self.least <= value <= self.most:
            wanted = f"at least {self.least}" if self.most == math.inf else f"between {self.least} and {self.most}"
            raise ConfigError(f"{argument(name, value)} is not {wanted}")


Share = Annotated[float, Range(0.0, 1.0)]
Seed = Annotated[int, Range(0, LARGEST)]
BatchSize = Annotated[int, Range(1, 2**20)]
Workers = Annotated[int, Range(0, 1024)]
"""Processes."""


class Settings:
    """Checks and JSON round trip for a dataclass of numbers, strings, tuples and other settings."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            value = getattr(self, name)
            if type(value) is hint and hint in (bool, str):
                continue
            found = validate(name, hint, value)
            if found is not value:
                object.__setattr__(self, name, found)
        self.check()

    def check(self) -> None:
        """Refuse values that do not fit together; each alone is as its field states."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """The settings written by `to_json`; an unknown key is answered with the nearest. `where` begins names."""
        return cls(**{key: validate_field(cls, key, value, where) for key, value in data.items()})

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def hints_of(settings: Any) -> dict[str, Any]:
    """The types of all fields of a class of settings, with their limits."""
    return _hints_of(settings)


@cache
def _hints_of(settings: Any) -> dict[str, Any]:  # takes a while
    hints = typing.get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def validate_field(settings: type[Settings], key: str, value: Any, where: str = "") -> Any:
    """The value of one field of some settings; an unknown field is answered with the nearest."""
    hints = hints_of(settings)
    prefix = f"{where}." if where else ""
    if key not in hints:
        raise UnknownNameError("setting", f"{prefix}{key}", [prefix + known for known in hints])
    return validate(prefix + key, hints[key], value)


def validate(name: str, hint: Any, value: Any) -> Any:
    """`value` as the type `hint` has it; a ConfigError names the setting and what it takes."""
    kind = get_origin(hint) or hint
    if kind is Annotated:
        found = validate(name, get_args(hint)[0], value)
        for limits in get_args(hint)[1:]:
            limits.check(name, found)
        return found
    if hint is Any:
        return value
    if hint == Size:
        return as_size(value, name)
    if kind is Literal:
        check_choice(name, value, get_args(hint))
        return value
    if kind in (Union, types.UnionType):
        return _typed_union(name, get_args(hint), value)
    if kind is tuple:
        return _typed_tuple(name, get_args(hint), value)
    if isinstance(kind, type) and issubclass(kind, Settings):
        if isinstance(value, Mapping):
            value = kind.from_json(value, name)
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{argument(name, value)} is not a table of settings; write {name}.KEY=VALUE")
    return _typed_scalar(name, kind, value)


def _typed_union(name: str, hints: tuple[Any, ...], value: Any) -> Any:
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


def _typed_tuple(name: str, hints: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{argument(name, value)} is not a list, such as [1, 2]")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise ConfigError(f"{argument(name, list(value))} does not have {len(hints)} values")
    found = tuple(validate(name, hint, item) for hint, item in zip(hints, value))
    return value if isinstance(value, tuple) and found == value else found


def _typed_scalar(name: str, kind: Any, value: Any) -> Any:
    found = value
    if kind in (int, float) and not isinstance(value, bool) and isinstance(value, numbers.Real):
        found = _number(name, kind, value)
    elif kind is str and isinstance(value, os.PathLike):
        found = os.fspath(value)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ConfigError(f"{argument(name, value)} is not {WORDS.get(kind, getattr(kind, '__name__', kind))}")
    return found


def _number(name: str, kind: type, value: Any) -> Any:
    """A number of any library as Python's own; a float without a fraction is a whole number, too."""
    try:
        found = float(value)
        if not math.isfinite(found):
            raise ConfigError(f"{argument(name, value)} is not a finite number")
        if kind is int:
            found = int(value) if found.is_integer() and isinstance(value, float) else operator.index(value)
    except TypeError:
        return value
    except OverflowError:
        found = math.inf
    if abs(found) > (LARGEST if kind is int else sys.float_info.max):
        raise ConfigError(f"{argument(name, value)} is too large a number")
    return value if type(value) is kind else found


def as_size(value: int | Size | list[int], name: str = "image_size") -> Size:
    """`384` or `(rows, columns)` as (rows, columns)."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(type(side) is not bool and hasattr(side, "__index__") and side > 0 for side in pair):
        raise ConfigError(f"{argument(name, value)} is not a positive number or (rows, columns)")
    if max(pair) > MAX_SIDE:
        raise ConfigError(f"{argument(name, value)} is larger than {MAX_SIDE} a side")
    return int(pair[0]), int(pair[1])


def check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    known = list(map(str, choices))
    if value not in known:
        near = nearest(value, known, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{argument(name, value)} is not one of {', '.join(known)}{hint}")


def environment_number(name: str, default: int) -> int:
    """A whole number that the environment has, as torchrun sets it."""
    text = os.environ.get(name) or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise ConfigError(f"the environment has {name}={short_repr(text)}, which is not a whole number; unset it")
    return int(text)


def check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    Range(least, most).check(name, value)

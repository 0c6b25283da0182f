"""Frozen settings whose values are checked against the types and limits of their fields."""

import dataclasses
import json
import math
import numbers
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from vitruvian.errors import ConfigError, UnknownNameError, argument, nearest, short_repr

Size = tuple[int, int]  # rows, columns
MAX_SIDE = 2**14  # maximum side of a model's input, in pixels
MAX_INT = 2**63 - 1  # limit of integers that have no other limit
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
Workers = Annotated[int, Range(0, 1024)]  # number of worker processes


class Record:
    """Base of dataclasses that can be written as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that can be written as JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def to_dict(self) -> dict[str, Any]:
        """`to_json`, as the loggers of transformers' Trainer call it."""
        return self.to_json()

    def to_json_string(self) -> str:
        """The fields as JSON text, as the loggers of transformers' Trainer call it."""
        return json.dumps(self.to_json())


class Settings(Record):
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


def _field_types(settings: Any) -> dict[str, Any]:
    """The types of all fields of a settings class, with their limits."""
    hints = typing.get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


field_types: Callable[[Any], dict[str, Any]] = cache(_field_types)  # mypy takes dataclass types for unhashable


def validate_field(settings: type[Settings], key: str, value: Any, where: str = "") -> Any:
    """Validate the value of one field of a settings class. Raises UnknownNameError if there is no such field."""
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
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        valid = validate(name, parts[0], value)
        for limits in parts[1:]:
            limits.check(name, valid)
        return valid
    if hint is Any:
        return value
    if hint == Size:
        return as_size(value, name)
    if kind is Literal:
        check_choice(name, value, parts)
        return value
    if kind in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        errors = []
        for part in parts:
            if part is not type(None):
                try:
                    return validate(name, part, value)
                except ConfigError as error:
                    errors.append(error)
        raise errors[0]
    if kind is tuple:
        if not isinstance(value, list | tuple):
            example = '["a", "b"]' if parts[0] is str else "[1, 2]"
            raise ConfigError(f"{argument(name, value)} is not a list, such as {example}")
        hints = (parts[0],) * len(value) if parts[1:] == (Ellipsis,) else parts
        if len(value) != len(hints):
            raise ConfigError(f"{argument(name, list(value))} does not have {len(hints)} values")
        items = tuple(validate(name, part, item) for part, item in zip(hints, value))
        return value if isinstance(value, tuple) and items == value else items
    if isinstance(kind, type) and issubclass(kind, Settings):
        if isinstance(value, Mapping):
            value = kind.from_json(value, name)
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{argument(name, value)} is not a table of settings", hint=f"write {name}.KEY=VALUE")
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


def check_index(kind: str, index: Any, count: int) -> int:
    """An index from 0 among `count` things of a kind; a negative one counts from the end. Raises ConfigError."""
    if not isinstance(index, int) or not -count <= index < count:
        raise ConfigError(f"{kind} {index!r} does not exist: the model has {kind}s 0 to {count - 1}")
    return index % count


def environment_number(name: str, default: int) -> int:
    """An integer from an environment variable, such as those that torchrun sets."""
    text = os.environ.get(name) or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise ConfigError(f"the environment variable {name}={short_repr(text)} is not an integer", hint="unset it")
    return int(text)


def check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise ConfigError if `value` is outside of [`least`, `most`]."""
    Range(least, most).check(name, value)

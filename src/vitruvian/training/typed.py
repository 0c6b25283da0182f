"""Values from TOML, JSON or a command line in the type that a setting has."""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from vitruvian.config import Settings, Size
from vitruvian.errors import ConfigError, UnknownNameError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a table"}


def typed(name: str, hint: Any, value: Any) -> Any:
    """`value` as the type `hint` has it; a ConfigError names the setting and what it takes."""
    kind = get_origin(hint) or hint
    if hint == Size and isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if kind is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, get_args(hint)))}")
        return value
    if kind in (Union, types.UnionType):
        return typed_union(name, get_args(hint), value)
    if kind is tuple:
        return typed_tuple(name, get_args(hint), value)
    if isinstance(kind, type) and issubclass(kind, Settings):
        if isinstance(value, dict):
            value = kind.from_json({key: typed_field(kind, key, item, name) for key, item in value.items()})
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{name}={value!r} is not a table of settings; write {name}.KEY=VALUE")
    return typed_scalar(name, kind, value)


def typed_field(settings: type[Settings], key: str, value: Any, where: str = "") -> Any:
    """The value of one field of some settings; an unknown field is answered with the nearest."""
    hints = hints_of(settings)  # type: ignore[arg-type]  # mypy asks whether an instance can be hashed
    prefix = f"{where}." if where else ""
    if key not in hints:
        raise UnknownNameError("setting", prefix + key, [prefix + known for known in hints])
    return typed(prefix + key, hints[key], value)


@cache
def hints_of(settings: type[Any]) -> dict[str, Any]:
    """The types of all fields; working them out takes a while."""
    return typing.get_type_hints(settings)


def typed_union(name: str, hints: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is not type(None):
            try:
                return typed(name, hint, value)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def typed_tuple(name: str, hints: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name}={value!r} is not a list, such as [1, 2]")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise ConfigError(f"{name}={list(value)!r} does not have {len(hints)} values")
    return tuple(typed(name, hint, item) for hint, item in zip(hints, value))


def typed_scalar(name: str, kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name}={value!r} is not {WORDS.get(kind, kind.__name__)}")
    return value

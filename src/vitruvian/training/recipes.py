"""Recipe files: those of the package by name, others by path, and changes to them from a command line."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitruvian.config import Preprocess, ResNetConfig, Settings, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.training.recipe import Recipe
from vitruvian.training.typed import typed_field

TABLES: dict[str, tuple[type[Settings], ...]] = {"architecture": (ViTConfig, ResNetConfig), "view": (Preprocess,)}
"""Tables of changes, and the settings that they may change."""

OWNED = {"augment.image_size": "image_size", "augment.mean": "view.mean", "augment.std": "view.std"}
"""Settings of training views that follow from others."""


def recipe_names() -> list[str]:
    """The recipes that the package carries."""
    folder = files("vitruvian") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str | Path) -> Recipe:
    """The recipe of this name, or in this TOML file."""
    return recipe_from(read_table(name), str(name))


def read_table(name: str | Path) -> dict[str, Any]:
    """What a recipe file says, on top of what the recipe that it names as `base` says."""
    text = str(name)
    if text.endswith(".toml"):
        try:
            content = Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{text}: the recipe cannot be read: {error.strerror}") from error
    elif text in recipe_names():
        content = (files("vitruvian") / "recipes" / f"{text}.toml").read_bytes()
    else:
        raise UnknownNameError("recipe", text, recipe_names(), see="(see `vit train --recipes`)")
    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:
        raise ConfigError(f"{text}: not a TOML file: {error}") from error
    base = table.pop("base", None)
    return table if base is None else merged(read_table(base), table)


def recipe_from(table: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from what TOML or JSON gives."""
    try:
        values = {key: typed_field(Recipe, key, value) for key, value in table.items()}
        for name, owners in TABLES.items():
            if name in values:
                values[name] = {key: typed_change(owners, key, value, name) for key, value in values[name].items()}
        return Recipe(**values)
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def typed_change(owners: tuple[type[Settings], ...], key: str, value: Any, where: str) -> Any:
    known = {field.name: owner for owner in reversed(owners) for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
    if key not in known:
        raise UnknownNameError("setting", f"{where}.{key}", [f"{where}.{name}" for name in known])
    return typed_field(known[key], key, value, where)


def changed(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The recipe after changes such as `epochs=20` or `augment.flip=0`."""
    table = recipe.to_json()
    for change in changes:
        key, sign, text = change.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(f"{change!r} is not of the form KEY=VALUE")
        if key in OWNED:
            raise ConfigError(f"{key} follows from {OWNED[key]}: set that")
        table = merged(table, nested(key, parsed(text.strip())))
        if key in ("epochs", "steps"):
            table["steps" if key == "epochs" else "epochs"] = 0
    return recipe_from(table, "")


def parsed(text: str) -> Any:
    """The value that a text means in TOML; what means nothing there is the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changes, inner tables merged in the same way."""
    result = dict(table)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Nested tables of numbers, texts and lists as TOML; None is left out."""
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if not skipped(value)]
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            name = f"{path}{key}"
            lines += ["", f"[{name}]", to_toml(value, f"{name}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def skipped(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)

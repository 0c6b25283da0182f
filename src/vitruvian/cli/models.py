"""`vit models`: the models there are, what they cost, and the weights others published for them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitruvian.text import table

if TYPE_CHECKING:
    from vitruvian.catalog import Published


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, such as B/16, augreg or dinov2.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each model.")] = False,
) -> None:
    """List models: parameters, multiply-adds, published weights.

    With a PATTERN, every published name that fits is shown; `--model` takes these names.
    """
    found = matching(pattern)
    if as_json:
        for name, weights in found.items():
            print(json.dumps(as_object(name, weights)))
        return
    print(table(HEADINGS, [as_row(name, weights) for name, weights in found.items()]))
    published = [row for weights in found.values() for row in weights]
    if pattern and published:
        rows = [
            (row.name, row.variant, row.family, str(row.image_size), str(row.classes or "-"), row.note)
            for row in published
        ]
        print("\n" + table(WEIGHTS_HEADINGS, rows))
    elif not pattern:
        print("\n`vit models PATTERN` shows the weights by name, for instance `vit models B/16`.")


def matching(pattern: str) -> dict[str, list[Published]]:
    """The models that fit, each with its published weights: all for a model's name, else those that fit."""
    from vitruvian.catalog import PUBLISHED, VARIANTS, canonical

    weights: dict[str, list[Published]] = {name: [] for name in VARIANTS}
    for row in PUBLISHED.values():
        weights[row.variant].append(row)
    wanted = pattern.lower()
    found = {}
    for name, rows in weights.items():
        fitting = [row for row in rows if any(wanted in alias.lower() for alias in (row.name, *row.aliases))]
        if wanted in name.lower():
            found[name] = rows
        elif fitting:
            found[name] = fitting
    if not found:
        name, _ = canonical(pattern)
        found[name] = weights[name]
    return found


def as_object(name: str, weights: list[Published]) -> dict[str, Any]:
    from vitruvian.catalog import VARIANTS
    from vitruvian.cost import multiply_adds, parameters

    config = VARIANTS[name]
    return {
        "name": name,
        "parameters": parameters(config),
        "multiply_adds": multiply_adds(config),
        "image_size": config.image_size,
        "published": [
            {"name": row.name, "family": row.family, "image_size": row.image_size, "classes": row.classes}
            for row in weights
        ],
    }


HEADINGS = ("model", ">parameters", ">multiply-adds", ">input", "published weights")
WEIGHTS_HEADINGS = ("weights", "model", "family", ">input", ">classes", "trained on")


def as_row(name: str, weights: list[Published]) -> tuple[str, ...]:
    facts = as_object(name, weights)
    rows, columns = facts["image_size"]
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return (
        name,
        f"{facts['parameters'] / 1e6:.1f} M",
        f"{facts['multiply_adds'] / 1e9:.2f} G",
        f"{rows}x{columns}",
        f"{weights[0].name}{more}" if weights else "-",
    )

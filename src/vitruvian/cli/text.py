"""Text laid out in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines with aligned columns under their headings; a heading that starts with `>` aligns right."""
    lines = [[heading.removeprefix(">") for heading in headings], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    sides = [">" if heading.startswith(">") else "<" for heading in headings]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths)).rstrip() for line in lines
    )

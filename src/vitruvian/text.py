"""Words and numbers for people: one line, columns, durations, counts."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence


def printable(text: str) -> str:
    """The text in one line that any terminal can show: control characters and broken bytes as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_error(error: BaseException) -> str:
    """Why something failed: the reason of the operating system, else the error's text, else its kind."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(" ".join(text.split())[:300]) or type(error).__name__


def brief(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c and 7 more`; `none` where there are none."""
    names = list(map(str, items))
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "none"


def plural(count: int, noun: str, verb: str = "") -> str:
    """`1 image`, `2,000 images`, `3 classes`; with the verb `is|are`, `1 image is`, `3 classes are`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    one, many = verb.split("|") if verb else ("", "")
    return f"{count:,} {noun if count == 1 else plural} {one if count == 1 else many}".rstrip()


def format_duration(seconds: float) -> str:
    """`0.25 s`, `48 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 1:
        return f"{seconds:.2g} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 72 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def format_bytes(count: float) -> str:
    """Bytes as `512 bytes`, `3.4 MB`, `1.25 GB`, `466.6 TB`."""
    if count >= 1e13:
        return f"{count / 1e12:,.1f} TB"
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines with aligned columns under their headings; a heading that starts with `>` aligns right.

    Where they are printed on a terminal, long cells are wrapped to its width.
    """
    lines = [[heading.removeprefix(">") for heading in headings], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    if sys.stdout is not None and sys.stdout.isatty():
        widths = narrowed(widths, shutil.get_terminal_size().columns - 2 * (len(widths) - 1))
    sides = [">" if heading.startswith(">") else "<" for heading in headings]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(part, sides, widths)).rstrip()
        for line in lines
        for part in wrapped(line, widths)
    )


def narrowed(widths: Sequence[int], total: int) -> list[int]:
    """Widths that add up to `total` at most, or nearly: the widest columns give way, none below 12 characters."""
    widths = list(widths)
    while sum(widths) > total and max(widths) > 12:
        widths[widths.index(max(widths))] -= 1
    return widths


def wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterator[list[str]]:
    """The lines that the cells of one row fill."""
    cells = [textwrap.wrap(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths)]
    for number in range(max(map(len, cells))):
        yield [cell[number] if number < len(cell) else "" for cell in cells]

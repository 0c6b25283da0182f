"""Text for terminals and messages: single lines, tables, durations, sizes, counts; the tables in the package."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import zip_longest
from typing import Any, TextIO


def printable(text: str) -> str:
    """Escape control characters and invalid bytes, so that the text is one line that any terminal can show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class PrintableStream:
    """A text stream that escapes control characters, such as those in file names, labels and names of tensors.

    Line breaks and tabs are kept, except in the parts of the paths that are among `words`, a command line.
    """

    def __init__(self, stream: TextIO, words: Iterable[str] = ()) -> None:
        self.stream = stream
        parts = {part for word in words for part in re.split("[/=]", word)}
        self.names = [part for part in parts if not part.isprintable() and part.strip()]

    def write(self, text: str) -> int:
        return self.stream.write(self.escape(text))

    def escape(self, text: str) -> str:
        if text.isprintable():
            return text
        for name in self.names:
            text = text.replace(name, printable(name))
        return "".join(c if c in "\n\t" else printable(c) for c in text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def shorten(text: str, most: int) -> str:
    """Shorten a text of more than `most` characters to its beginning and its end."""
    start = most * 3 // 4
    return text if len(text) <= most else f"{text[:start]}...{text[start + 3 - most :]}"


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: the system's reason, else its text, else its type."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "set_int_max_str_digits" in text:
        return "a number has thousands of digits"
    if isinstance(error, MemoryError) and not text:
        return "not enough memory"
    text = f"KeyError: {text}" if isinstance(error, KeyError) and text else text
    return shorten(printable(" ".join(text.split())), 300) or type(error).__name__


def brief(items: Iterable[object], most: int = 5) -> str:
    """Join items, such as `a, b, c and 7 more`; `none` for no items."""
    names = [shorten(str(item), 100) for item in items]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "none"


def plural(count: int, noun: str, verb: str = "") -> str:
    """Format a count: `1 image`, `3 classes`; with the verb `is|are`, `1 image is`, `3 classes are`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    one, many = verb.split("|") if verb else ("", "")
    return f"{count:,} {noun if count == 1 else plural} {one if count == 1 else many}".rstrip()


def format_duration(seconds: float) -> str:
    """Format a duration: `0.25 s`, `48 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    rounded = round(seconds)
    if rounded < 1:
        return f"{seconds:.2g} s"
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 72 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600:02d} h"


def format_bytes(count: float) -> str:
    """Format a size: `512 bytes`, `3.4 MB`, `1.25 GB`, `466.6 TB`."""
    if count >= 1e13:
        return f"{count / 1e12:,.1f} TB"
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows with aligned columns under headings; a heading that starts with `>` aligns its column right.

    If stdout is a terminal, long cells are wrapped to its width.
    """
    lines = [[heading.removeprefix(">") for heading in headings], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    if sys.stdout is not None and sys.stdout.isatty():
        total = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
        while sum(widths) > total and max(widths) > 12:  # shrink the widest columns, but none below 12 characters
            widths[widths.index(max(widths))] -= 1
    sides = [">" if heading.startswith(">") else "<" for heading in headings]
    text = []
    for line in lines:
        cells = [textwrap.wrap(cell, width) if len(cell) > width else [cell] for cell, width in zip(line, widths)]
        for part in zip_longest(*cells, fillvalue=""):
            aligned = (f"{cell:{side}{width}}" for cell, side, width in zip(part, sides, widths))
            text.append("  ".join(aligned).rstrip())
    return "\n".join(text)


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that puts `class2` before `class10`."""
    parts = re.split(r"(\d+)", name.casefold())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part], name


def fold(name: str) -> str:
    """A name without case and punctuation: `ViT-B/16` and `vit_b_16` become equal, and `CIFAR-10` and `cifar10`."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def package_table(name: str) -> dict[str, Any]:
    """The content of a TOML file in the package."""
    import tomllib  # `vit --help` reads no file

    return tomllib.loads((files("vitruvian") / name).read_text(encoding="utf-8"))

"""The parts of an HTML page that needs no other file: text, sections, tables, tiles and bars."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vitruvian.files import atomic_path, json_bytes
from vitruvian.report.style import STYLE
from vitruvian.text import printable

PAGE = "report.html"
"""The usual name of a page's file."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser lets the page do: no scripts, no requests, whatever a class or file is called."""


class Html(str):
    """Text that is HTML already; any other text is escaped where it enters a page."""

    __slots__ = ()


def text(value: object) -> Html:
    """A value as HTML: names of files and classes are shown as they are, whatever characters they have."""
    if isinstance(value, Html):
        return value
    return Html(escape(printable(str(value))))


def joined(parts: Iterable[Html], between: str = "\n") -> Html:
    return Html(between.join(parts))


def page(title: str, parts: Iterable[Html], *, script: str = "", style: str = "") -> str:
    """A whole page; of scripts, a browser runs only the one given here."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{allowed}'" if script else POLICY
    run = f"<script>{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{text(title)}</title>\n<style>\n{STYLE}{style}\n</style>\n</head>\n"
        f"<body>\n{joined(parts)}\n{run}</body>\n</html>\n"
    )


def short_name(name: str) -> str:
    """A path's last part; a name such as ViT-B/16 as it is."""
    return Path(name).name if Path(name).expanduser().exists() else name


def paragraph(value: object) -> Html:
    return Html(f"<p>{text(value)}</p>")


def remark(value: object) -> Html:
    """A paragraph that explains what stands beside it, in small soft letters."""
    return Html(f'<p class="soft small">{text(value)}</p>')


def heading(title: str, note: str = "") -> Html:
    below = f'<p class="soft">{text(note)}</p>' if note else ""
    return Html(f"<header><h1>{text(title)}</h1>{below}</header>")


def section(title: object, *parts: Html, note: str = "") -> Html:
    """A part of the page with a title, and a sentence on how to read it."""
    below = remark(note) if note else ""
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{below}{joined(parts)}\n</section>")


def columns(*parts: Html) -> Html:
    """Parts side by side where the screen is wide enough."""
    return Html(f'<div class="columns">\n{joined(parts)}\n</div>')


def notice(message: str) -> Html:
    """A sentence that must not be missed."""
    return Html(f'<p class="notice">{text(message)}</p>')


def tiles(values: Mapping[str, str]) -> Html:
    """The few numbers that matter most, by what they are."""
    each = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in values.items())
    return Html(f'<div class="tiles">{"".join(each)}</div>')


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, tall: bool = False) -> Html:
    """A table; numbers, and HTML that stands for them, are set to the right. `tall` lets a long one scroll."""
    lines = [[cell(value) for value in row] for row in rows]
    right = [bool(lines) and 'class="number"' in lines[0][i] for i in range(len(titles))]
    head = "".join(f"<th{' class=number' if to_right else ''}>{text(t)}</th>" for t, to_right in zip(titles, right))
    body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    place = "scroll tall" if tall else "scroll"
    return Html(
        f'<div class="{place}"><table class="plain">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{number(value)}</td>'
    kind = ' class="number"' if isinstance(value, Html) else ""
    return f"<td{kind}>{text(value)}</td>"


def facts(values: Mapping[str, object]) -> Html:
    """Names and their values, one a line; settings inside settings are named `outer.inner`."""
    rows = "\n".join(f"<div><dt>{text(name)}</dt><dd>{text(shown)}</dd></div>" for name, shown in flat(values))
    return Html(f'<dl class="facts">\n{rows}\n</dl>')


def flat(values: Mapping[str, Any], outer: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{outer}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{outer}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{outer}{name}", "none" if value is None or value == "" or value == {} else str(value)


def number(value: float) -> str:
    """A number as people write it: 12,345, 0.125, 3e-05."""
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    size = abs(value)
    return f"{value:.3g}" if 0 < size < 1 else f"{value:,.2f}"


def percent_bar(percent: float) -> Html:
    """A percentage with a bar; a dash where there is none."""
    if math.isnan(percent):
        return Html("–")
    return Html(f'{percent:.1f}&nbsp;%<span class="bar"><i style="width:{percent:.1f}%"></i></span>')


def write_report(folder: Path, *, name: str, numbers: dict[str, Any], page: str) -> Path:
    """Write numbers as JSON, called `name`, and the page into a folder that appears whole; gives the page's path."""
    with atomic_path(folder) as draft:
        draft.mkdir()
        (draft / name).write_bytes(json_bytes(numbers))
        (draft / PAGE).write_text(page, encoding="utf-8")
    return folder / PAGE

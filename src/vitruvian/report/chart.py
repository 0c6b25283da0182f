"""One chart: lines and dots over linear or logarithmic axes, as SVG in a page or as an image where SVG cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image, ImageDraw, ImageFont

from vitruvian.report.color import COLORS, INK, LINE, PAPER, SOFT
from vitruvian.report.html import Html, text

LEFT, RIGHT, TOP, BOTTOM = 60, 14, 12, 46
"""Space around the drawing, for the labels of the axes."""
MOST_POINTS = 300
"""Longer lines are thinned: each point is then the mean of several."""
MARKED = 40
"""A line of so few points has a dot at each."""
DASHES = ("", "7 5", "2 5", "9 4 2 4", "12 5", "4 3")
SCALE = 2
"""An image is drawn so much larger and reduced: smooth lines and round dots."""
FONT_PIXELS = 14
IMAGE_COLORS = {"line": LINE, "soft": SOFT, "text": INK} | {f"c{i}": color for i, color in enumerate(COLORS)}
"""The stylesheet's variables, as an image shows them."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name and its points, from left to right; points that are not finite are left out."""

    name: str
    points: Sequence[Point]
    joined: bool = True
    """False for a cloud of dots."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The range that one axis shows, and the values that are labeled."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the lower end, 1 at the upper end."""
        low, high, at = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (at - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn; `svg` and `image` draw it."""

    title: str
    lines: Sequence[Line]
    x_label: str
    log_x: bool = False
    log_y: bool = False
    y_from: float | None = None
    """A value that the upright axis reaches down to, however high the lines lie."""
    size: tuple[int, int] = (480, 280)
    """Width and height in pixels, without title and legend."""

    def __post_init__(self) -> None:
        assert len(self.lines) <= len(COLORS), "there are no more colors"

    def svg(self) -> Html:
        """A part of a page; the legend and a summary in words go with it."""
        drawn = self.shown()
        start = f'<div class="chart" style="max-width:{1.25 * self.size[0]:.0f}px"><h3>{text(self.title)}</h3>'
        if not any(line.points for line in drawn):
            return Html(f'{start}<p class="soft small">no numbers to draw</p></div>')
        pen = SvgPen()
        self.draw(pen, drawn)
        entries = ((number, line) for number, line in enumerate(drawn) if line.points)
        legend = "".join(f"<span>{sample(line, number)}{text(line.name)}</span>" for number, line in entries)
        return Html(
            f'{start}<div class="legend">{legend}</div><svg viewBox="0 0 {self.size[0]} {self.size[1]}" role="img" '
            f'aria-label="{text(self.summary(drawn))}">{"".join(pen.parts)}</svg></div>'
        )

    def image(self) -> Image.Image | None:
        """The chart with its title and legend on white; None where there are no numbers to draw."""
        drawn = self.shown()
        if not any(line.points for line in drawn):
            return None
        entries = legend_places([line.name for line in drawn if line.points], self.size[0])
        head = round(entries[-1][1]) + 14
        pen = ImagePen((self.size[0], self.size[1] + head))
        pen.text((LEFT, 16), self.title, anchor="start", color="text")
        numbers = [number for number, line in enumerate(drawn) if line.points]
        for number, (x, y, name) in zip(numbers, entries):
            if drawn[number].joined:
                pen.line([(x, y), (x + 22, y)], f"c{number}")
            else:
                pen.dot((x + 11, y), f"c{number}")
            pen.text((x + 28, y), name, anchor="start", color="text")
        pen.down = head
        self.draw(pen, drawn)
        return pen.canvas.resize((self.size[0], self.size[1] + head), Image.Resampling.LANCZOS)

    def shown(self) -> list[Line]:
        """The lines without what has no place on the axes, and no longer than can be seen."""
        return [thinned(line, [point for point in line.points if self.has_place(point)]) for line in self.lines]

    def has_place(self, point: Point) -> bool:
        logs = zip(point, (self.log_x, self.log_y))
        return all(math.isfinite(value) and (value > 0 or not log) for value, log in logs)

    def draw(self, pen: Pen, lines: Sequence[Line]) -> None:
        width, height = self.size
        points = [point for line in lines for point in line.points]
        x_axis = across_axis([x for x, _ in points], log=self.log_x)
        y_axis = upright_axis([y for _, y in points], low=self.y_from, log=self.log_y)

        def place(point: Point) -> Point:
            x = LEFT + x_axis.share(point[0]) * (width - LEFT - RIGHT)
            return x, height - BOTTOM - y_axis.share(point[1]) * (height - TOP - BOTTOM)

        for value, label in zip(y_axis.ticks, labels(y_axis)):
            _, y = place((x_axis.low, value))
            pen.grid((LEFT, y), (width - RIGHT, y))
            pen.text((LEFT - 8, y), label, anchor="end")
        for value, label in zip(x_axis.ticks, labels(x_axis)):
            x, _ = place((value, y_axis.low))
            pen.text((x, height - BOTTOM + 13), label, anchor="end" if x > width - RIGHT - 18 else "middle")
        pen.text(((LEFT + width - RIGHT) / 2, height - 10), self.x_label, anchor="middle")
        for number, line in enumerate(lines):
            draw_line(pen, line, number, place)

    def summary(self, lines: Sequence[Line]) -> str:
        """The chart in words, for those who cannot see it."""
        ends = (f"{a.name} from {a.points[0][1]:.4g} to {a.points[-1][1]:.4g}" for a in lines if a.points)
        return f"{self.title}: {', '.join(ends)}"


def draw_line(pen: Pen, line: Line, number: int, place: Callable[[Point], Point]) -> None:
    places = [place(point) for point in line.points]
    if line.joined and places:
        pen.line(places, f"c{number}", dash=DASHES[number])
    if not line.joined or len(places) <= MARKED:
        for at in places:
            pen.dot(at, f"c{number}")


class Pen(Protocol):
    """What a chart is drawn with; colors are variables of the stylesheet."""

    def grid(self, start: Point, end: Point) -> None: ...
    def line(self, places: Sequence[Point], color: str, *, dash: str = "") -> None: ...
    def dot(self, at: Point, color: str) -> None: ...
    def text(self, at: Point, words: str, *, anchor: str, color: str = "soft") -> None: ...


class SvgPen:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def grid(self, start: Point, end: Point) -> None:
        (x1, y1), (x2, y2) = start, end
        self.parts.append(f'<line class="grid" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')

    def line(self, places: Sequence[Point], color: str, *, dash: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" style="stroke:var(--{color})"{dashes}/>')

    def dot(self, at: Point, color: str) -> None:
        self.parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="2.6" style="fill:var(--{color})"/>')

    def text(self, at: Point, words: str, *, anchor: str, color: str = "soft") -> None:
        place = f'x="{at[0]:.1f}" y="{at[1] + 4:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} style="fill:var(--{color})">{text(words)}</text>')


class ImagePen:
    def __init__(self, size: tuple[int, int]) -> None:
        self.canvas = Image.new("RGB", (SCALE * size[0], SCALE * size[1]), PAPER)
        self.pen = ImageDraw.Draw(self.canvas)
        self.down = 0
        """Added to every row: what lies above belongs to title and legend."""

    def at(self, place: Point) -> Point:
        return SCALE * place[0], SCALE * (place[1] + self.down)

    def grid(self, start: Point, end: Point) -> None:
        self.pen.line([self.at(start), self.at(end)], fill=LINE, width=SCALE)

    def line(self, places: Sequence[Point], color: str, *, dash: str = "") -> None:
        self.pen.line([self.at(place) for place in places], fill=IMAGE_COLORS[color], width=2 * SCALE, joint="curve")

    def dot(self, at: Point, color: str) -> None:
        x, y = self.at(at)
        self.pen.ellipse((x - 8, y - 8, x + 8, y + 8), fill=IMAGE_COLORS[color], outline=PAPER, width=SCALE)

    def text(self, at: Point, words: str, *, anchor: str, color: str = "soft") -> None:
        side = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        font = ImageFont.load_default(SCALE * FONT_PIXELS)
        self.pen.text(self.at(at), words, fill=IMAGE_COLORS[color], anchor=side, font=font)


def sample(line: Line, number: int) -> str:
    """A piece of a line for the legend."""
    pen = SvgPen()
    if line.joined:
        pen.line([(1, 6), (25, 6)], f"c{number}", dash=DASHES[number])
    else:
        pen.dot((13, 6), f"c{number}")
    return f'<svg viewBox="0 0 26 12">{"".join(pen.parts)}</svg>'


def legend_places(names: Sequence[str], width: int) -> list[tuple[float, float, str]]:
    """Where each entry of an image's legend begins, in as many rows as are needed."""
    font = ImageFont.load_default(FONT_PIXELS)
    x, y, places = float(LEFT), 40.0, []
    for name in names:
        length = 28 + font.getlength(name)
        if x > LEFT and x + length > width - RIGHT:
            x, y = float(LEFT), y + 22
        places.append((x, y, name))
        x += length + 24
    return places


def thinned(line: Line, points: list[Point]) -> Line:
    """At most MOST_POINTS: means of equally many neighbors, the ends kept where they are."""
    if not line.joined or len(points) <= MOST_POINTS:
        return Line(line.name, points, line.joined)
    size = -(-len(points) // (MOST_POINTS - 2))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return Line(f"{line.name} (means of {size})", [points[0], *means, points[-1]])


def across_axis(values: Sequence[float], *, log: bool) -> Axis:
    """From the least to the greatest value; from zero where that is near."""
    low, high = min(values), max(values)
    if log:
        low, high = (low, high) if low < high else (low / 2, high * 2)
        return Axis(low, high, log_ticks(low, high), log)
    if 0 < low < high / 5:  # so near to zero that one looks for it
        low = 0.0
    if low == high:
        low, high = low - 1, high + 1
    whole = all(value == int(value) for value in values)
    return Axis(low, high, [tick for tick in ticks(low, high, whole=whole) if low <= tick <= high])


def upright_axis(values: Sequence[float], *, low: float | None, log: bool) -> Axis:
    """Between round numbers around the values."""
    least, most = min(values), max(values)
    if log:
        least, most = (least, most) if least < most else (least / 2, most * 2)
        return Axis(least, most, log_ticks(least, most), log)
    if low is not None:
        least = min(least, low)
    if least == most:
        least, most = least - (abs(least) * 0.1 or 1), most + (abs(most) * 0.1 or 1)
    marks = ticks(least, most)
    return Axis(min(least, marks[0]), max(most, marks[-1]), marks)


def ticks(low: float, high: float, most: int = 7, *, whole: bool = False) -> list[float]:
    """Round numbers, at most `most`, from at or below `low` to at or above `high`; `whole` ones if asked for."""
    rough = (high - low) / (most - 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2, 5, 10 ... between two positive numbers; only powers of ten, or some of them, where those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1,)):
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if 2 <= len(found) <= most:
            return found
    if len(found) > most:
        return found[:: -(-len(found) // most)]
    return [tick for tick in ticks(low, high) if low <= tick <= high]


def labels(axis: Axis) -> list[str]:
    """The numbers of one axis, all written in the same way; very small and large ones as 2e-5."""
    if axis.log:
        return [f"{v:,.6g}" if 1e-3 <= v < 1e6 else re.sub(r"e\+?(-?)0*", r"e\1", f"{v:.0e}") for v in axis.ticks]
    largest = max(map(abs, axis.ticks))
    if largest and not 1e-3 <= largest < 1e6:
        power = math.floor(math.log10(largest) + 1e-9)
        return [f"{value / 10.0**power:.3g}e{power}" if value else "0" for value in axis.ticks]
    return [f"{value:,.6g}" if largest < 1e4 else f"{value:,.0f}" for value in axis.ticks]

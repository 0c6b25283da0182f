"""A chart of lines and dots over linear or logarithmic axes, as SVG in a page or as an image."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from vitruvian.report.color import COLORS, INK, LINE, PAPER, SOFT
from vitruvian.report.html import render

LEFT, RIGHT, TOP, BOTTOM = 60, 14, 12, 46  # margins for the axis labels, in pixels
MAX_POINTS = 300  # longer lines are averaged down to this many points
MAX_DOTS = 40  # lines of at most this many points have a dot at each point
DASHES = ("", "7 5", "2 5", "9 4 2 4", "12 5", "4 3")  # SVG dash patterns, so that lines differ without color, too
SCALE = 2  # images are drawn this much larger and reduced, which smooths them
FONT_PIXELS = 14

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name and its points from left to right. Points that are not finite are dropped."""

    name: str
    points: Sequence[Point]
    scatter: bool = False  # draw dots instead of a line
    color: int | None = None  # index into COLORS; by default the position among the lines
    spread: Mapping[float, float] = field(default_factory=dict)  # x: half the length of an error bar


@dataclass(frozen=True, slots=True)
class Axis:
    """Range of an axis and its labeled values."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def fraction(self, value: float) -> float:
        """Position of a value: 0 at the lower end, 1 at the upper end."""
        low, high, at = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (at - low) / (high - low)


class Label(NamedTuple):
    """A text centered vertically at y; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line with its points in pixels, its color (an index into COLORS) and its style."""

    line: Line
    color: int
    pixels: list[Point]
    bars: list[tuple[Point, Point]]  # error bars

    @property
    def dash(self) -> str:
        return DASHES[self.color]

    @property
    def has_dots(self) -> bool:
        return self.line.scatter or len(self.pixels) <= MAX_DOTS


class Drawing(NamedTuple):
    """A chart in pixels, which `Chart.svg` and `Chart.image` draw."""

    grid: list[tuple[Point, Point]]
    labels: list[Label]
    lines: list[DrawnLine]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The content of a chart; `svg` and `image` draw it."""

    title: str
    lines: Sequence[Line]
    x_label: str
    log_x: bool = False
    log_y: bool = False
    y_from: float | None = None  # a value that the vertical axis includes, for example 0
    size: tuple[int, int] = (480, 280)  # width and height in pixels, without title and legend

    def __post_init__(self) -> None:
        assert len(self.lines) <= len(COLORS), "more lines than colors"

    def svg(self) -> Markup:
        """The chart as a part of a page, with a legend and a text for screen readers."""
        drawing, (width, height) = self.drawing(), self.size
        lines = [drawn.line for drawn in drawing.lines] if drawing else []
        ends = [f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in lines]
        summary = f"{self.title}: {', '.join(ends)}"
        return render("chart.html", title=self.title, drawing=drawing, width=width, height=height, summary=summary)

    def image(self) -> Image.Image | None:
        """The chart with title and legend on white; None if there are no points to draw."""
        drawing, (width, height) = self.drawing(), self.size
        if drawing is None:
            return None
        font = ImageFont.load_default(FONT_PIXELS)
        entries: list[Point] = []  # where each entry of the legend starts, in as many rows as needed
        x, y = float(LEFT), 40.0
        for drawn in drawing.lines:
            length = 28 + font.getlength(drawn.line.name)
            if x > LEFT and x + length > width - RIGHT:
                x, y = float(LEFT), y + 22
            entries.append((x, y))
            x += length + 24
        top = round(entries[-1][1]) + 14
        canvas = ImageCanvas(width, height + top)
        canvas.text(LEFT, 16, self.title, "start", INK)
        for drawn, (x, y) in zip(drawing.lines, entries):
            if drawn.line.scatter:
                canvas.dot((x + 11, y), COLORS[drawn.color])
            else:
                canvas.line([(x, y), (x + 22, y)], COLORS[drawn.color])
            canvas.text(x + 28, y, drawn.line.name, "start", INK)
        canvas.top = top
        for start, end in drawing.grid:
            canvas.line([start, end], LINE, width=1)
        for label in drawing.labels:
            canvas.text(label.x, label.y, label.text, label.anchor, SOFT)
        for drawn in drawing.lines:
            if not drawn.line.scatter:
                canvas.line(drawn.pixels, COLORS[drawn.color])
            for bar in drawn.bars:
                canvas.line(bar, COLORS[drawn.color], width=1)
            for point in drawn.pixels if drawn.has_dots else ():
                canvas.dot(point, COLORS[drawn.color])
        return canvas.image.resize((width, height + top), Image.Resampling.LANCZOS)

    def drawing(self) -> Drawing | None:
        """The chart in pixels; None if there are no points to draw."""
        logs, lines = (self.log_x, self.log_y), []
        for position, line in enumerate(self.lines):
            valid = [p for p in line.points if all(math.isfinite(v) and (v > 0 or not log) for v, log in zip(p, logs))]
            if valid:  # points that the axes can show
                lines.append((position if line.color is None else line.color, average_points(line, valid)))
        if not lines:
            return None
        width, height = self.size
        bars = [[(x, y, line.spread[x]) for x, y in line.points if x in line.spread] for _, line in lines]
        xs, ys = zip(*(point for _, line in lines for point in line.points))
        ys += tuple(y + side for drawn in bars for _, y, half in drawn for side in (-half, half))
        x_axis = log_axis(xs) if self.log_x else horizontal_axis(xs)
        y_axis = log_axis(ys) if self.log_y else vertical_axis(ys, include=self.y_from)

        def pixel(x: float, y: float) -> Point:
            column = LEFT + x_axis.fraction(x) * (width - LEFT - RIGHT)
            return column, height - BOTTOM - y_axis.fraction(y) * (height - TOP - BOTTOM)

        grid, labels = [], []
        for value, text in zip(y_axis.ticks, tick_labels(y_axis)):
            _, y = pixel(x_axis.low, value)
            grid.append(((float(LEFT), y), (float(width - RIGHT), y)))
            labels.append(Label(LEFT - 8, y, text, "end"))
        for value, text in zip(x_axis.ticks, tick_labels(x_axis)):
            x, _ = pixel(value, y_axis.low)
            labels.append(Label(x, height - BOTTOM + 13, text, "end" if x > width - RIGHT - 18 else "middle"))
        labels.append(Label((LEFT + width - RIGHT) / 2, height - 10, self.x_label, "middle"))
        drawn = [
            DrawnLine(
                line,
                color,
                [pixel(*point) for point in line.points],
                [(pixel(x, y - half), pixel(x, y + half)) for x, y, half in line_bars],
            )
            for (color, line), line_bars in zip(lines, bars)
        ]
        return Drawing(grid, labels, drawn)


class ImageCanvas:
    """Draws enlarged with Pillow; `top` is added to every row."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (SCALE * width, SCALE * height), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.top = 0

    def scaled(self, point: Point) -> Point:
        return SCALE * point[0], SCALE * (point[1] + self.top)

    def line(self, points: Sequence[Point], color: str, *, width: int = 2) -> None:
        self.draw.line([self.scaled(point) for point in points], fill=color, width=width * SCALE, joint="curve")

    def dot(self, point: Point, color: str) -> None:
        x, y = self.scaled(point)
        self.draw.ellipse((x - 8, y - 8, x + 8, y + 8), fill=color, outline=PAPER, width=SCALE)

    def text(self, x: float, y: float, text: str, anchor: str, color: str) -> None:
        side = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        font = ImageFont.load_default(SCALE * FONT_PIXELS)
        self.draw.text(self.scaled((x, y)), text, fill=color, anchor=side, font=font)


def average_points(line: Line, points: list[Point]) -> Line:
    """The line with at most MAX_POINTS: means of groups of equal size, between the unchanged ends."""
    if line.scatter or len(points) <= MAX_POINTS:
        return replace(line, points=points)
    size = -(-len(points) // (MAX_POINTS - 2))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return replace(line, name=f"{line.name} (means of {size})", points=[points[0], *means, points[-1]])


def log_axis(values: Sequence[float]) -> Axis:
    """A logarithmic axis from the minimum to the maximum."""
    low, high = min(values), max(values)
    low, high = (low, high) if low < high else (low / 2, high * 2)
    return Axis(low, high, log_ticks(low, high), log=True)


def horizontal_axis(values: Sequence[float]) -> Axis:
    """A linear axis from the minimum, or from zero if that is close, to the maximum."""
    low, high = min(values), max(values)
    if 0 < low < high / 5:
        low = 0.0
    if low == high:
        low, high = low - 1, high + 1
    integers = all(value == int(value) for value in values)
    return Axis(low, high, [tick for tick in ticks(low, high, integers=integers) if low <= tick <= high])


def vertical_axis(values: Sequence[float], *, include: float | None) -> Axis:
    """A linear axis between the round numbers that enclose the values."""
    low, high = min(values), max(values)
    if include is not None:
        low = min(low, include)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    marks = ticks(low, high)
    return Axis(min(low, marks[0]), max(high, marks[-1]), marks)


def ticks(low: float, high: float, most: int = 7, *, integers: bool = False) -> list[float]:
    """At most `most` round numbers, from at or below `low` to at or above `high`."""
    rough = (high - low) / (most - 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2, 5, 10 ... between two positive numbers; powers of ten, or some of them, if those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1,)):
        marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        marks = [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]
        if 2 <= len(marks) <= most:
            return marks
    if len(marks) > most:
        return marks[:: -(-len(marks) // most)]
    return [mark for mark in ticks(low, high) if low <= mark <= high]


def tick_labels(axis: Axis) -> list[str]:
    """The ticks of one axis in one format; very small and large ones as 2e-5."""
    if axis.log:
        return [f"{v:,.6g}" if 1e-3 <= v < 1e6 else re.sub(r"e\+?(-?)0*", r"e\1", f"{v:.0e}") for v in axis.ticks]
    largest = max(map(abs, axis.ticks))
    if largest and not 1e-3 <= largest < 1e6:
        power = math.floor(math.log10(largest) + 1e-9)
        return [f"{value / 10.0**power:.3g}e{power}" if value else "0" for value in axis.ticks]
    return [f"{value:,.6g}" if largest < 1e4 else f"{value:,.0f}" for value in axis.ticks]

"""Line charts as SVG inside a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vitruvian.evaluation.page import Html, text
from vitruvian.evaluation.style import COLORS

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 12, 46
"""Space around the drawing, for the labels of the axes."""
MOST_POINTS = 300
"""Longer lines are thinned: each point is then the mean of several."""
MARKED = 40
"""A line of so few points has a dot at each."""
DASHES = ("", "7 5", "2 5", "9 4 2 4", "12 5", "4 3")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name and its points, from left to right; points that are not finite are left out."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axes:
    """Where the numbers of a chart lie on the screen."""

    x: tuple[float, float]
    y: tuple[float, float]
    y_ticks: list[float] = field(default_factory=list)

    def place(self, point: Point) -> Point:
        across = (point[0] - self.x[0]) / (self.x[1] - self.x[0])
        up = (point[1] - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, lines: Sequence[Line], *, across: str, least: float | None = None) -> Html:
    """The lines over a common axis `across`; the upright axis shows what they span, and `least` where given."""
    assert len(lines) <= len(COLORS), "there are no more colors"
    drawn = [thinned(line.name, finite(line.points)) for line in lines]
    points = [point for line in drawn for point in line.points]
    if not points:
        return Html(f'<div class="chart"><h3>{text(title)}</h3><p class="soft small">no numbers to draw</p></div>')
    axes = axes_of(points, least)
    body = "".join([*grid(axes), *(curve(line, number, axes) for number, line in enumerate(drawn))])
    middle = (LEFT + WIDTH - RIGHT) / 2
    return Html(
        f'<div class="chart"><h3>{text(title)}</h3>{legend(drawn)}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(summary(title, drawn))}">{body}'
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{text(across)}</text></svg></div>'
    )


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thinned(name: str, points: list[Point]) -> Line:
    """At most MOST_POINTS: means of equally many neighbors, the ends kept where they are."""
    if len(points) <= MOST_POINTS:
        return Line(name, points)
    size = -(-len(points) // (MOST_POINTS - 2))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return Line(f"{name} (means of {size})", [points[0], *means, points[-1]])


def axes_of(points: Sequence[Point], least: float | None) -> Axes:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    if least is not None:
        low = min(low, least)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    up = ticks(low, high)
    left, right = min(xs), max(xs)
    if 0 < left < right / 5:  # so near to zero that one looks for it
        left = 0.0
    if left == right:
        left, right = left - 1, right + 1
    return Axes((left, right), (min(low, up[0]), max(high, up[-1])), up)


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers, at most `most`, from at or below `low` to at or above `high`."""
    rough = (high - low) / (most - 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """The numbers of one axis, all written in the same way; very small and large ones as 2e-5."""
    largest = max(map(abs, values))
    if largest and not 1e-3 <= largest < 1e6:
        power = math.floor(math.log10(largest) + 1e-9)
        return [f"{value / 10.0**power:.3g}e{power}" if value else "0" for value in values]
    return [f"{value:,.6g}" if largest < 1e4 else f"{value:,.0f}" for value in values]


def grid(axes: Axes) -> list[str]:
    parts = []
    for value, label in zip(axes.y_ticks, labels(axes.y_ticks)):
        _, y = axes.place((axes.x[0], value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    inside = [value for value in ticks(*axes.x) if axes.x[0] <= value <= axes.x[1]]
    for value, label in zip(inside, labels(inside)):
        x, _ = axes.place((value, axes.y[0]))
        anchor = "end" if x > WIDTH - RIGHT - 18 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="{anchor}">{label}</text>')
    return parts


def curve(line: Line, number: int, axes: Axes) -> str:
    places = [axes.place(point) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = ""
    if len(places) <= MARKED:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" style="fill:var(--c{number})"/>' for x, y in places)
    return f"{stroke(path, number)}{dots}"


def stroke(path: str, number: int) -> str:
    """The line of this number through the points of a path."""
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    return f'<polyline points="{path}" style="stroke:var(--c{number})"{dash}/>'


def legend(lines: Sequence[Line]) -> str:
    names = (
        f'<span><svg viewBox="0 0 26 12">{stroke("1,6 25,6", number)}</svg>{text(line.name)}</span>'
        for number, line in enumerate(lines)
        if line.points
    )
    return f'<div class="legend">{"".join(names)}</div>'


def summary(title: str, lines: Sequence[Line]) -> str:
    """The chart in words, for those who cannot see it."""
    ends = (f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in lines if line.points)
    return f"{title}: {', '.join(ends)}"

"""A line chart as a Pillow image, for pages that cannot hold SVG: accuracy over a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from PIL import Image, ImageDraw

from vitruvian.evaluation.chart import labels, ticks
from vitruvian.evaluation.style import COLORS, INK, LINE, PAPER, SOFT
from vitruvian.explain.draw import TEXT_PIXELS, write

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 62
SCALE = 2
"""Drawn so much larger and reduced: smooth lines and round dots."""

Points = Sequence[tuple[float, float]]
Place = Callable[[float, float], tuple[float, float]]
"""Where a point lies in the image."""


def line_plot(title: str, lines: Mapping[str, Points], *, across: str) -> Image.Image:
    """The lines over `across`, which is logarithmic; every position that has a point is labeled."""
    shown = {name: points for name, points in lines.items() if points}
    xs = sorted({x for points in shown.values() for x, _ in points})
    ys = [y for points in shown.values() for _, y in points]
    marks = ticks(min(ys), max(ys) if max(ys) > min(ys) else min(ys) + 1)
    low, high = math.log(xs[0]), math.log(xs[-1]) if xs[-1] > xs[0] else math.log(xs[0]) + 1

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - low) / (high - low)
        up = (y - marks[0]) / (marks[-1] - marks[0])
        return LEFT + 12 + right * (WIDTH - LEFT - RIGHT - 24), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    canvas = Image.new("RGB", (SCALE * WIDTH, SCALE * HEIGHT), PAPER)
    pen = ImageDraw.Draw(canvas)
    for mark in marks:
        y = SCALE * place(xs[0], mark)[1]
        pen.line((SCALE * LEFT, y, SCALE * (WIDTH - RIGHT), y), fill=LINE, width=SCALE)
    for points, color in zip(shown.values(), COLORS):
        places = [(SCALE * x, SCALE * y) for x, y in (place(*point) for point in points)]
        pen.line(places, fill=color, width=2 * SCALE, joint="curve")
        for x, y in places:
            pen.ellipse((x - 9, y - 9, x + 9, y + 9), fill=color, outline=PAPER, width=SCALE)
    canvas = canvas.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(canvas)
    for mark, label in zip(marks, labels(marks)):
        write(pen, (LEFT - 8, place(xs[0], mark)[1]), label, anchor="rm", color=SOFT)
    label_positions(pen, xs, place)
    write(pen, (LEFT, 10), title, anchor="lt")
    write(pen, ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10), across, anchor="mb")
    legend(pen, list(shown))
    return canvas


def label_positions(pen: ImageDraw.ImageDraw, xs: Sequence[float], place: Place) -> None:
    """The values below the axis, leaving out those that would touch the one before."""
    end = -math.inf
    for x in xs:
        text = f"{x:,.0f}" if x < 1e6 else f"{x:.2g}"
        at, half = place(x, 0.0)[0], 4.2 * len(text)
        if at - half > end:
            write(pen, (at, HEIGHT - BOTTOM + 10), text, anchor="mt", color=SOFT)
            end = at + half + 6


def legend(pen: ImageDraw.ImageDraw, names: Sequence[str]) -> None:
    x = float(LEFT)
    for name, color in zip(names, COLORS):
        pen.line((x, 44, x + 22, 44), fill=color, width=3)
        write(pen, (x + 28, 44), name, anchor="lm", color=INK)
        x += 28 + pen.textlength(name, font_size=TEXT_PIXELS) + 26

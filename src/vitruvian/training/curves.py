"""The curves of a run, drawn from its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vitruvian.report.chart import Chart
from vitruvian.report.chart import Line as Curve
from vitruvian.report.html import Html
from vitruvian.training.journal import Line

CHARTS = (
    ("loss", "Loss"),
    ("top1", "Top-1 accuracy, %"),
    ("lr", "Learning rate"),
    ("images_per_second", "Images per second"),
)
"""What is drawn, and its title; a number that no line has is left out."""


def curves(lines: Iterable[Line]) -> Iterator[Html]:
    """A chart for each number, with a line for each split."""
    recorded = list(lines)
    splits = list(dict.fromkeys(str(line.get("split", "")) for line in recorded))
    for name, title in CHARTS:
        drawn = [Curve(split or "run", points(recorded, split, name)) for split in splits]
        drawn = [curve for curve in drawn if curve.points]
        if drawn:
            yield Chart(title=title, lines=drawn, x_label="step", y_from=0.0 if name != "top1" else None).svg()


def points(lines: Iterable[Line], split: str, name: str) -> list[tuple[float, float]]:
    """Step and value, in the order of steps; of lines with the same step, the last counts."""
    found = {
        float(line["step"]): float(line[name])
        for line in lines
        if str(line.get("split", "")) == split and isinstance(line.get(name), int | float)
    }
    return sorted(found.items())

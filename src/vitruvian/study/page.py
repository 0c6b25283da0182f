"""The results of a study on one HTML page, with its chart, and the chart as a PNG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitruvian.files import write_text
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, Html, heading, page, section, table
from vitruvian.report.images import write_image
from vitruvian.study.growth import Cell, Study
from vitruvian.text import format_duration

PLOT = "study.png"
TITLES = {
    "data-size": ("Accuracy over the number of training images", "images to train on"),
    "compute": ("Accuracy over the compute of training", "multiply-adds of training"),
}
HEADINGS = "recipe", "images", "steps", "epochs", "parameters", "multiply-adds of training", "top-1", "time", "state"


def write_page(study: Study) -> Path:
    """Write `report.html`, and `study.png` once there is a point to draw; gives the page's path."""
    title = f"{study.kind} study on {study.data.short_name}"
    drawn = chart(study).image()
    if drawn is not None:
        write_image(study.folder / PLOT, drawn)
    return write_text(study.folder / PAGE, page(title, sections(title, study)))


def chart(study: Study) -> Chart:
    """Top-1 of each recipe, as far as it is measured."""
    name, across = TITLES[study.kind]
    lines = [Line(name, points) for name, points in study.lines().items()]
    return Chart(title=f"{name}: top-1, %", lines=lines, x_label=f"{across} (logarithmic)", log_x=True, size=(760, 400))


def sections(title: str, study: Study) -> Iterator[Html]:
    done = sum(cell.state == "done" for cell in study.cells)
    yield heading(title, f"{done} of {len(study.cells)} cells done")
    if any(study.lines().values()):
        note = "All models are trained from scratch in the same way; top-1 on held-out images, in percent."
        yield section(TITLES[study.kind][0], chart(study).svg(), note=note)
    yield section("Cells", table(HEADINGS, map(row, study.cells)))


def row(trained: Cell) -> list[object]:
    cell = trained.to_json()
    top1 = Html(f"{cell['top1']:.2f}&nbsp;%") if "top1" in cell else Html("–")
    time = format_duration(cell["seconds"]) if "seconds" in cell else "–"
    work = Html(f"{cell['multiply_adds']:.3g}")
    counts = [cell["images"], cell["steps"], float(cell["epochs"]), cell["parameters"]]
    return [cell["recipe"], *counts, work, top1, time, cell["state"]]

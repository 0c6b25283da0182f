"""The results of a study on one HTML page, with its chart, and the chart as a PNG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from vitruvian.evaluation.images import embedded
from vitruvian.evaluation.page import Html, duration, heading, page, section, table
from vitruvian.evaluation.report_files import PAGE, write_html
from vitruvian.explain.files import write_image
from vitruvian.study.growth import Cell, Study, family_name
from vitruvian.study.plot import line_plot

PLOT = "study.png"
TITLES = {
    "data-size": ("Accuracy over the number of training images", "images to train on"),
    "compute": ("Accuracy over the compute of training", "multiply-adds of training"),
}


def write_page(study: Study) -> Path:
    """Write `report.html`, and `study.png` once there is a point to draw; gives the page's path."""
    title = f"{study.kind} study on {Path(study.data).name}"
    drawn = plot(study)
    if drawn is not None:
        write_image(study.folder / PLOT, drawn)
    return write_html(study.folder / PAGE, page(title, sections(title, study, drawn)))


def plot(study: Study) -> Image.Image | None:
    """The figure of the study, as far as it is measured."""
    lines = study.lines()
    if not any(lines.values()):
        return None
    name, across = TITLES[study.kind]
    return line_plot(f"{name}: top-1, %", lines, across=f"{across} (logarithmic)")


def sections(title: str, study: Study, drawn: Image.Image | None) -> Iterator[Html]:
    done = sum(cell.state == "done" for cell in study.cells)
    yield heading(title, f"{done} of {len(study.cells)} cells done")
    name, _ = TITLES[study.kind]
    if drawn is not None:
        note = "All families are trained from scratch with the same recipe; top-1 on held-out images, in percent."
        exact = drawn.convert("RGBA")  # with transparency it is kept as PNG
        yield section(name, embedded(exact, name, kind="whole"), note=note)
    yield section("Cells", table(HEADINGS, map(row, study.cells)))


HEADINGS = [
    "family",
    "images",
    "steps",
    "epochs",
    "parameters",
    "multiply-adds of training",
    "top-1",
    "time",
    "state",
]


def row(trained: Cell) -> list[object]:
    cell = trained.to_json()
    top1 = Html(f"{cell['top1']:.2f}&nbsp;%") if "top1" in cell else Html("–")
    time = duration(cell["seconds"]) if "seconds" in cell else "–"
    work = Html(f"{cell['multiply_adds']:.3g}")
    counts = [cell["images"], cell["steps"], float(cell["epochs"]), cell["parameters"]]
    return [family_name(cell["family"]), *counts, work, top1, time, cell["state"]]

"""The sections of a page that show measures, confusions among them: of a training run and of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor

from vitruvian.data.doctor.page import thumbnail_of
from vitruvian.data.sources import Source
from vitruvian.evaluation.measuring.metrics import MEASURE_NAMES, Counts, Measures, Mistake
from vitruvian.report.color import COLORS
from vitruvian.report.html import Html, columns, paragraph, percent_bar, section, table, text
from vitruvian.report.images import embedded, gallery

MOST_UNREADABLE = 50
"""Unreadable files that are listed one by one; the number tells of all."""


def measure_tiles(measures: Measures) -> dict[str, str]:
    """The single numbers by name, for `tiles`."""
    numbers = measures.scalars()
    shown = {key: name for key, name in MEASURE_NAMES.items() if key != "top5" or measures.top5_tells}
    return {name: f"{numbers[key]:.2f} %" for key, name in shown.items()} | {
        "cross-entropy": f"{measures.loss:.4f}",
        "images": f"{measures.count:,}",
    }


def measure_sections(measures: Measures, classes: Sequence[str], source: Source | None = None) -> Iterator[Html]:
    """Confusions, the most confident mistakes with their images from `source`, and the classes, worst first."""
    if measures.confusion is not None:
        note = (
            "Rows are true classes, columns what the model says. Blue is right, vermilion wrong; "
            "the stronger, the larger the share of the true class."
        )
        if len(classes) > MOST_IN_TABLE:
            note += " The list has the pairs that are confused most often."
        yield section("Confusion matrix", confusion_view(measures.confusion, classes), note=note)
    if measures.mistakes and source is not None:
        figures = ((thumbnail_of(source, m.index), caption(m, classes, source)) for m in measures.mistakes)
        note = "The wrong answers that the model is surest of. Often the label is wrong, or the image shows both."
        yield section("Most confident mistakes", gallery(figures), note=note)
    yield section(
        "Classes",
        table(["class", "images", "right", "accuracy"], class_rows(measures, classes), tall=len(classes) > 15),
        note="The worst first.",
    )


def unreadable_parts(unreadable: Mapping[str, str]) -> list[Html]:
    """How many images could not be read, and the first of them with the reasons; nothing where there are none."""
    if not unreadable:
        return []
    shown = list(unreadable.items())[:MOST_UNREADABLE]
    which = f"; the first {len(shown)}:" if len(unreadable) > len(shown) else ":"
    line = paragraph(f"{len(unreadable):,} images could not be read and were skipped{which}")
    return [line, table(["file", "why"], shown)]


def caption(mistake: Mistake, classes: Sequence[str], source: Source) -> Html:
    said = f"<b>{text(classes[mistake.prediction])}</b> {100 * mistake.probability:.1f}&nbsp;%"
    truth = f"labeled <b>{text(classes[mistake.label])}</b>"
    return Html(f'{said}<br>{truth}<br><small class="soft">{text(source.key(mistake.index))}</small>')


def class_rows(measures: Measures, classes: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Class, examples, right answers and accuracy; classes without examples come last."""
    accuracy = measures.class_accuracy
    for number in np.lexsort((-measures.class_counts, np.nan_to_num(accuracy, nan=np.inf))).tolist():
        counts = int(measures.class_counts[number]), int(measures.class_correct[number])
        yield classes[number], *counts, percent_bar(float(accuracy[number]))


# K classes; rows are labels, columns predictions

MOST_IN_TABLE = 30
"""Classes up to which each pair has a cell with its number."""
SHORT = 3
"""Letters of class names up to which they need not be turned over the columns."""
MOST_PAIRS = 20
MAP_SIDE = 512
"""Pixels of the image's side; of more classes, each pixel shows the largest of several shares."""
RIGHT, WRONG = (ImageColor.getrgb(color) for color in COLORS[:2])
"""Blue for right answers, vermilion for wrong ones; visible on white and on black."""


def confusion_view(confusion: Counts, classes: Sequence[str]) -> Html:
    """The matrix in the form that suits its size."""
    if len(classes) <= MOST_IN_TABLE:
        return matrix(confusion, classes)
    pairs = list(confused_pairs(confusion, classes))
    listed = table(["true class", "taken for", "examples", "share"], pairs) if pairs else Html("")
    return columns(confusion_image(confusion), listed)


def shares(confusion: Counts) -> NDArray[np.float64]:
    """Each row as shares of its sum; zero where a class has no examples."""
    return np.asarray(confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1))


def matrix(confusion: Counts, classes: Sequence[str]) -> Html:
    """A table with the numbers, colored by their share of the true class."""
    head = "".join(f"<th>{name(label)}</th>" for label in classes)
    rows = "\n".join(
        f'<tr><th scope="row">{name(label)}</th>{"".join(cells(number, counts, part))}</tr>'
        for number, (label, counts, part) in enumerate(zip(classes, confusion.tolist(), shares(confusion).tolist()))
    )
    upright = ' class="short"' if max(map(len, classes)) <= SHORT else ""
    axes = f'<tr><th class="axis" colspan="{len(classes) + 1}">↓ true class, predicted class →</th></tr>'
    return Html(
        f'<div class="scroll"><table class="heat">\n<thead{upright}>{axes}<tr><th></th>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def name(label: str) -> str:
    return f'<span class="name" title="{text(label)}">{text(label)}</span>'


def cells(row: int, counts: list[int], part: list[float]) -> Iterator[str]:
    for column, (count, share) in enumerate(zip(counts, part)):
        if not count:
            yield '<td class="none">·</td>'
            continue
        color = "--right" if row == column else "--wrong"
        opacity = float(strength(np.array(share)))
        strong = ' class="strong"' if opacity > 0.6 else ""
        yield f'<td{strong} style="background:rgb(var({color}) / {opacity:.2f})">{count}</td>'


def strength(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Opacity of a color for a share: a few mistakes among many right answers should still be seen."""
    return np.where(share > 0, 0.15 + 0.85 * np.sqrt(share), 0.0)


def confused_pairs(confusion: Counts, classes: Sequence[str]) -> Iterator[tuple[str, str, int, Html]]:
    """Label, prediction, number and share of the most frequent mistakes, at most MOST_PAIRS."""
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    part = shares(confusion)
    for place in np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS].tolist():
        row, column = divmod(place, len(classes))
        if wrong[row, column]:
            yield classes[row], classes[column], int(wrong[row, column]), Html(f"{100 * part[row, column]:.0f}&nbsp;%")


def confusion_image(confusion: Counts) -> Html:
    """A pixel for each pair of classes, or for several pairs; transparent where there are no examples."""
    part = shares(confusion)
    step = -(-len(part) // MAP_SIDE)
    right = pooled(np.diag(np.diag(part)), step)
    wrong = pooled(part - np.diag(np.diag(part)), step)
    pixels = np.zeros((*right.shape, 4), np.uint8)
    pixels[..., :3] = np.where((right >= wrong)[..., None], RIGHT, WRONG)
    pixels[..., 3] = np.round(255 * strength(np.maximum(right, wrong)))
    alt = f"confusion matrix of {len(part)} classes: true class downwards, predicted class across"
    return embedded(Image.fromarray(pixels), alt, kind="map")


def pooled(part: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """The largest of each `step` by `step` values."""
    side = -(-len(part) // step)
    padded = np.zeros((side * step, side * step))
    padded[: len(part), : len(part)] = part
    return np.asarray(padded.reshape(side, step, side, step).max(axis=(1, 3)))

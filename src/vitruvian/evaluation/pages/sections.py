"""The sections of a page that show measures: the same for a training run and for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitruvian.data.doctor.page import thumbnail_of
from vitruvian.data.sources.base import Source
from vitruvian.evaluation.measuring.metrics import MEASURE_NAMES, Measures, Mistake
from vitruvian.evaluation.pages.confusion import MOST_IN_TABLE, confusion_view
from vitruvian.report.html import Html, paragraph, percent_bar, section, table, text
from vitruvian.report.images import gallery

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

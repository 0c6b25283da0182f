"""The page of a run: every image beside its maps, or the figures of a model, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from PIL import Image

from vitruvian.explain.deletion import Curve
from vitruvian.explain.explainer import Explained
from vitruvian.explain.figures import Figure
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import color_bar
from vitruvian.report.html import (
    Html,
    columns,
    heading,
    joined,
    notice,
    page,
    percent_bar,
    remark,
    section,
    table,
    text,
)
from vitruvian.report.images import embedded
from vitruvian.text import plural

TITLE = "What the model looks at"
FIGURES_TITLE = "What the model has learned"
MOST_ON_PAGE = 60
"""Images that are shown on the page; files are written for all."""
PAGE_SIDE = 420
"""Longest side in pixels of an image on the page."""

READING = (
    "Colors go from the map's least value (violet) to its greatest (yellow), in each image anew. The model sees "
    "what is inside the frame. Gradient-weighted attention: the patches whose attention raises this class's logit. "
    "Rollout: what reaches the answer if attention alone moved information; it does not depend on the class. "
    "Attention: one layer's, as it is."
)


def explanation_page(about: str, parts: list[Html], *, images: int, unread: int) -> str:
    """The whole page; `parts` are of the first images, made by `image_section`."""
    above = [heading(TITLE, f"{about}; {plural(images, 'image')}")]
    if images > MOST_ON_PAGE:
        above.append(notice(f"The first {MOST_ON_PAGE} are on this page; the files beside it are of all {images:,}."))
    if unread:
        above.append(notice(f"{unread:,} of {images:,} images could not be read."))
    above.append(Html(f'<p class="soft small" style="margin-top:1rem">{text(READING)}</p>'))
    bar = embedded(color_bar(240, 12), "colors from violet, low, to yellow, high")
    return page(TITLE, [*above, remark(Html(f"low {bar} high")), *parts])


def image_section(explained: Explained, images: Mapping[str, Image.Image]) -> Html:
    """One image: itself and its overlays by title, its answers, and the deletion curves."""
    if explained.error:
        return section(explained.path, notice(explained.error))
    shown = [figure(image, title) for title, image in images.items()]
    row = Html(f'<div class="overlays">{joined(shown)}</div>')
    below = []
    if explained.answers:
        rows = [(answer.label, percent_bar(100 * answer.probability)) for answer in explained.answers]
        below.append(table(["answer", "probability"], rows))
    if explained.curves:
        below.append(deletion_chart(explained.curves))
    said = [notice("none of these; the nearest are below")] if explained.none_of_these else []
    return section(explained.path, *said, row, *([columns(*below)] if below else []))


def figure(image: Image.Image, caption: str) -> Html:
    small = image.copy()
    small.thumbnail((PAGE_SIDE, PAGE_SIDE))
    return Html(f"<figure>{embedded(small, caption, kind='whole')}<figcaption>{text(caption)}</figcaption></figure>")


def deletion_chart(curves: Mapping[str, Curve]) -> Html:
    """How the probability falls; the legend has the area under each curve."""
    lines = [
        Line(f"{name} ({curve.area:.3f})", [(100 * x, y) for x, y in zip(curve.removed, curve.probability)])
        for name, curve in curves.items()
    ]
    chart = Chart(title="Deletion curve: probability", lines=lines, x_label="patches removed, in %", y_from=0.0)
    note = "Highest ranked patches first. In brackets the area under the curve: the smaller, the better the map."
    return Html(f'<div>{chart.svg()}<p class="soft small" style="margin-top:.5rem">{text(note)}</p></div>')


def figures_page(about: str, drawn: Iterable[Figure]) -> str:
    parts = [heading(FIGURES_TITLE, about)]
    for each in drawn:
        if each.image is None:
            parts.append(section(each.title, notice(each.note)))
            continue
        numbers = remark(f"The numbers are in {each.name}.npz.")
        left_out = [notice(f"Left out: {error}") for error in each.unread]
        shown = embedded(each.image, each.title, kind="whole", exact=True)
        parts.append(section(each.title, shown, numbers, *left_out, note=each.note))
    return page(FIGURES_TITLE, parts)

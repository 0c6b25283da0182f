"""Pages of `vit explain`: images with their maps, or the figures of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL import Image

from vitruvian.explain.deletion import Curve
from vitruvian.explain.explainer import Explained
from vitruvian.explain.figures import Figure
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import color_bar
from vitruvian.report.html import embed_image, percent_bar, render, thumbnail
from vitruvian.text import plural

MAX_IMAGES = 60
"""Images on the page; files are written for all."""
PAGE_SIDE = 420
"""Longest side in pixels of an image on the page."""


def explanation_page(about: str, images: Sequence[dict[str, Any]], *, count: int, unreadable: int) -> str:
    """The page of `count` images, of which the first MAX_IMAGES are shown; `images` come from `image_context`."""
    return render(
        "explain.html",
        title="Model explanations",
        subtitle=f"{about}; {plural(count, 'image')}",
        images=images,
        count=count,
        unreadable=unreadable,
        color_bar=embed_image(color_bar(240, 12), "colors from violet (low) to yellow (high)"),
    )


def image_context(explained: Explained, overlays: Mapping[str, Image.Image]) -> dict[str, Any]:
    """Values for the template of one image, with its overlays by the name of their map."""
    captions = {"image": "the image"} | {map.name: map.title for map in explained.maps}
    return {
        "path": explained.path,
        "error": explained.error,
        "rejected": explained.rejected,
        "overlays": [
            {"image": thumbnail(image, captions[name], side=PAGE_SIDE, kind="whole"), "caption": captions[name]}
            for name, image in overlays.items()
        ],
        "predictions": [(each.label, percent_bar(100 * each.probability)) for each in explained.predictions],
        "deletion": deletion_chart(explained.curves) if explained.curves else None,
    }


def deletion_chart(curves: Mapping[str, Curve]) -> Chart:
    """Probability over the removed patches; the legend has the area under each curve."""
    lines = [
        Line(f"{name} ({curve.area:.3f})", [(100 * x, y) for x, y in zip(curve.removed, curve.probability)])
        for name, curve in curves.items()
    ]
    return Chart(title="Deletion curve: probability", lines=lines, x_label="patches removed, in %", y_from=0.0)


def figures_page(about: str, figures: Iterable[Figure]) -> str:
    """All figures of a model."""
    contexts = [
        {
            "name": figure.name,
            "title": figure.title,
            "note": figure.note,
            "image": embed_image(figure.image, figure.title, kind="whole", exact=True) if figure.image else None,
            "unreadable": figure.unread,
        }
        for figure in figures
    ]
    return render("figures.html", title="Learned parameters and attention", subtitle=about, figures=contexts)

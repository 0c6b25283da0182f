"""The paper's Figure 7 for any model: filters, positions and attention distance, as images and as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.explain.attention import require_vit
from vitruvian.explain.distance import attention_distance
from vitruvian.explain.draw import grid_of_grids, tiled
from vitruvian.explain.embedding import NO_POSITIONS, filter_components, position_similarity
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.report.chart import Chart, Line

TILES_IN_A_ROW = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure with the numbers behind it; without an image, the note says why it has no meaning here."""

    name: str
    """Of its files."""
    title: str
    note: str
    """How to read it, or why there is nothing to see."""
    image: Image.Image | None = None
    arrays: dict[str, NDArray[Any]]
    unread: tuple[str, ...] = ()
    """Errors of the images that it had to be made without."""


def figures(model: Model, batches: Callable[[], Iterable[Tensor]], images: str) -> Iterator[Figure]:
    """The three figures, one after the other; `batches` gives normalized pixels of these `images`."""
    vit = require_vit(model)
    yield filters_figure(vit)
    yield positions_figure(vit)
    yield distance_figure(vit, batches(), images)


def filters_figure(vit: ViT) -> Figure:
    name, title = "filters", "Filters of the patch embedding"
    channels, hybrid = vit.config.channels, vit.embed.stem is not None
    if channels not in (1, 3):
        note = f"The filters read {channels} channels, which are no colors to draw."
        return Figure(name=name, title=title, note=note, arrays={})
    components, shares = filter_components(vit)
    note = (
        f"The first {len(components)} principal components, most variance first; together "
        f"{float(shares.sum()):.0%} of it. Gray is zero."
    )
    if hybrid:
        title = "Filters of the stem"
        note += (
            " The patch embedding of a hybrid reads the stem's features, which have no color; "
            "these are the filters of the stem's first convolution, standardized as it uses them."
        )
    values = components.numpy()
    return Figure(
        name=name,
        title=title,
        note=note,
        image=tiled(tinted(values), TILES_IN_A_ROW),
        arrays={"components": values, "variance_shares": shares.numpy()},
    )


def tinted(components: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Components (count, rows, columns, 1 or 3) as colors: zero is gray, the strongest value of each full."""
    strongest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    levels = 127.5 + 127.5 * components / np.maximum(strongest, 1e-12)
    return np.broadcast_to(np.rint(levels), (*levels.shape[:3], 3)).astype(np.uint8)


def positions_figure(vit: ViT) -> Figure:
    name, title = "positions", "Similarity of positions"
    kind = vit.config.positions
    if kind in NO_POSITIONS:
        note = NO_POSITIONS[kind]
        return Figure(name=name, title=title, note=f"{note[0].upper()}{note[1:]}.", arrays={})
    similarity = position_similarity(vit).numpy()
    rows, columns = vit.config.grid
    note = (
        f"For each of {rows} x {columns} patches, a small grid: the cosine similarity of its position embedding "
        "with every other's."
    )
    if kind == "sincos":
        note += " These positions are fixed sines and cosines, not learned."
    image = grid_of_grids(similarity, min(0.0, float(similarity.min())), 1.0)
    return Figure(name=name, title=title, note=note, image=image, arrays={"similarity": similarity})


def distance_figure(vit: ViT, batches: Iterable[Tensor], images: str) -> Figure:
    count = 0

    def counted() -> Iterator[Tensor]:
        nonlocal count
        for pixels in batches:
            count += len(pixels)
            yield pixels

    distance = attention_distance(vit, counted()).numpy()
    note = (
        f"A dot for each head: the distance from a query patch to the patches it attends to, weighted by attention, "
        f"averaged over {count:,} {images}. The line joins the means of the layers."
    )
    return Figure(
        name="attention-distance",
        title="Mean attention distance",
        note=note,
        image=distance_chart(distance).image(),
        arrays={"distance_pixels": distance, "images": np.array(count), "stride_pixels": np.array(vit.config.stride)},
    )


def distance_chart(distance: NDArray[np.floating]) -> Chart:
    """Distances (L, H): a dot for each head over its layer, and a line through the means."""
    heads = [(float(layer), float(value)) for layer, values in enumerate(distance) for value in values]
    means = [(float(layer), float(values.mean())) for layer, values in enumerate(distance)]
    lines = [Line("head", heads, joined=False), Line("mean of the layer", means)]
    title = "Mean attention distance, in pixels"
    return Chart(title=title, lines=lines, x_label="layer", y_from=0.0, size=(620, 360))

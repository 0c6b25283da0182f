"""The paper's Figure 7 for any model: filters, positions and attention distance, as images and as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitruvian.explain.analysis import (
    NO_POSITIONS,
    attention_distance,
    filter_components,
    position_kind,
    position_similarity,
)
from vitruvian.explain.attention import require_vit
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import INK, PAPER, SOFT, Rgb, apply_color_map, color_bar

TILES_IN_A_ROW = 7
TEXT_PIXELS = 15
MARGIN = 12
TILE_PIXELS = 64
"""Side of a tile, at least; its own pixels stay square."""
GRID_PIXELS = 720
"""Side of the grid of grids, about."""
MOST_GRIDS = 40
"""Rows or columns of grids; beyond that, every second (third ...) patch is drawn."""

Places = NDArray[np.floating]


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
    channels, hybrid = vit.config.in_channels, vit.embed.stem is not None
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
            "these are the filters of the stem's first convolution, as it uses them."
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
    kind = position_kind(vit.config)
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
    lines = [Line("head", heads, scatter=True), Line("mean of the layer", means)]
    title = "Mean attention distance, in pixels"
    return Chart(title=title, lines=lines, x_label="layer", y_from=0.0, size=(620, 360))


def write(pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, *, anchor: str, color: str = INK) -> None:
    pen.text(place, text, fill=color, anchor=anchor, font=ImageFont.load_default(TEXT_PIXELS))


def tiled(tiles: Rgb, columns: int) -> Image.Image:
    """Tiles (count, rows, columns, 3) in reading order, enlarged."""
    count, rows, width, _ = tiles.shape
    scale = max(1, -(-TILE_PIXELS // max(rows, width)))
    down, across = rows * scale + MARGIN // 2, width * scale + MARGIN // 2
    lines = -(-count // columns)
    size = min(columns, count) * across + 2 * MARGIN - MARGIN // 2, lines * down + 2 * MARGIN - MARGIN // 2
    canvas = Image.new("RGB", size, PAPER)
    for number, tile in enumerate(tiles):
        enlarged = Image.fromarray(tile).resize((width * scale, rows * scale), Image.Resampling.NEAREST)
        canvas.paste(enlarged, (MARGIN + number % columns * across, MARGIN + number // columns * down))
    return canvas


def grid_of_grids(values: Places, low: float, high: float) -> Image.Image:
    """Values (R, C, R, C): at the place of each patch a small grid of its values with all others, and a scale."""
    every = -(-max(values.shape[:2]) // MOST_GRIDS)
    shown = values[::every, ::every]
    rows, columns, inner_rows, inner_columns = shown.shape
    scale = max(1, round(GRID_PIXELS / max(rows * inner_rows, columns * inner_columns)))
    gap = max(2, scale)
    down, across = inner_rows * scale + gap, inner_columns * scale + gap
    left, top = 34, 10
    canvas = Image.new("RGB", (left + columns * across + MARGIN, top + rows * down + 84), PAPER)
    for row in range(rows):
        for column in range(columns):
            cell = Image.fromarray(apply_color_map(shown[row, column], low, high))
            cell = cell.resize((inner_columns * scale, inner_rows * scale), Image.Resampling.NEAREST)
            canvas.paste(cell, (left + column * across, top + row * down))
    pen = ImageDraw.Draw(canvas)
    number_patches(pen, (left, top), grid=(rows, columns), step=(down, across), every=every)
    bottom = top + rows * down + 52
    bar = color_bar(min(240, canvas.width - 180), 14)
    canvas.paste(bar, (left + 46, bottom))
    write(pen, (left + 40, bottom + 7), f"{low:.2f}", anchor="rm")
    write(pen, (left + 52 + bar.width, bottom + 7), f"{high:.2f}  cosine", anchor="lm")
    return canvas


def number_patches(
    pen: ImageDraw.ImageDraw, corner: tuple[int, int], *, grid: tuple[int, int], step: tuple[int, int], every: int
) -> None:
    """The numbers of rows and columns of patches, as many as have room."""
    (left, top), (rows, columns), (down, across) = corner, grid, step
    for row in range(0, rows, max(1, -(-20 // down))):
        write(pen, (left - 6, top + (row + 0.5) * down), str(row * every), anchor="rm", color=SOFT)
    for column in range(0, columns, max(1, -(-28 // across))):
        place = left + (column + 0.5) * across, top + rows * down + 2
        write(pen, place, str(column * every), anchor="mt", color=SOFT)
    write(pen, (left, top + rows * down + 22), "column of the patch; rows at the left", anchor="lt", color=SOFT)

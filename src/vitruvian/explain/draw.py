"""Figures as Pillow images: tiles and a grid of grids, with readable labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitruvian.report.color import INK, PAPER, SOFT, Rgb, color_bar, colored

TEXT_PIXELS = 15
MARGIN = 12
TILE_PIXELS = 64
"""Side of a tile, at least; its own pixels stay square."""
GRID_PIXELS = 720
"""Side of the grid of grids, about."""
MOST_GRIDS = 40
"""Rows or columns of grids; beyond that, every second (third ...) patch is drawn."""

Places = NDArray[np.floating]


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
            cell = Image.fromarray(colored(shown[row, column], low, high))
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

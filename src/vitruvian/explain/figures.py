"""The paper's Figure 7 for any model: filters, similarity of positions and attention distance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.data.decode import ImageInput
from vitruvian.data.pixels import DigitsSource
from vitruvian.errors import ConfigError, DataError, ImageError
from vitruvian.explain.attention import require_shares, require_vit
from vitruvian.explain.explainer import describe_model
from vitruvian.explain.overlay import write_arrays
from vitruvian.explain.patches import principal_axes
from vitruvian.files import write_text
from vitruvian.inference import Encoder, batched
from vitruvian.model.batching import eval_mode
from vitruvian.model.build import Model
from vitruvian.model.resnet import StdConv
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import INK, PAPER, SOFT, Rgb, apply_color_map, color_bar
from vitruvian.report.html import embed_image, render, write_image
from vitruvian.settings import Size
from vitruvian.text import plural

# B images, R rows and C columns of patches, P = R * C, T tokens before them, N = T + P, H heads, L layers
# D filters of S x S pixels

FIGURES_PAGE = "figures.html"
DISTANCE_IMAGES = 128  # number of images over which the paper averages the attention distance
DISTANCE_BATCH = 4
COMPONENTS = 28  # number of components in the paper's figure

NO_POSITIONS = {
    "rope": "the model's positions rotate queries and keys: patches have no position embedding",
    "none": "the model has no position embeddings",
    "relative": "the model's positions are relative offsets inside attention: patches have no position embedding",
    "relative_bias": "the model's positions are biases inside attention: patches have no position embedding",
}


def filter_components(model: Model, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """Principal components of the filters that read pixels.

    The filters are those of the patch embedding, or of a hybrid's first convolution. Components have unit length and
    the sign with which their largest value is positive.

    Returns:
        Components (count, S, S, channels), and the fraction of variance that each explains.
    """
    first = next(module for module in require_vit(model).embed.modules() if isinstance(module, nn.Conv2d))
    weight = first.standardized() if isinstance(first, StdConv) else first.weight
    kernels = weight.detach().cpu().double()  # (D, channels, S, S)
    flat = kernels.permute(0, 2, 3, 1).flatten(1)
    mean, axes = principal_axes(flat, min(count, *flat.shape))
    variance = ((flat - mean) @ axes).square().sum(dim=0) / (flat - mean).square().sum()
    side, channels = kernels.shape[-1], kernels.shape[1]
    return axes.T.reshape(-1, side, side, channels).float(), variance.float()


def position_kind(config: ViTConfig) -> str:
    """The kind of position embedding; `rope` if there are only rotations."""
    return "rope" if config.rope is not None and config.pos_embed == "none" else config.pos_embed


def position_similarity(model: Model, grid: Size | None = None) -> Tensor:
    """Cosine similarity of all pairs of position embeddings, (R, C, R, C).

    Args:
        model: A ViT with learned, factorized or fixed (sin-cos) position embeddings.
        grid: Rows and columns to resize them to; by default the model's own.
    """
    vit = require_vit(model)
    if (kind := position_kind(vit.config)) in NO_POSITIONS:
        raise ConfigError(NO_POSITIONS[kind])
    positions = vit.embed.grid_positions(grid or vit.config.grid)
    assert positions is not None
    directions = torch.nn.functional.normalize(positions.detach().cpu().double(), dim=-1)
    return torch.einsum("rcd,xyd->rcxy", directions, directions).float()


def attention_distance(model: Model, batches: Iterable[Tensor]) -> Tensor:
    """Mean distance in pixels between query patches and the patches they attend to.

    Args:
        model: A ViT.
        batches: Normalized pixels (B, channels, height, width).

    Returns:
        (L, H) Averages over queries and images. One layer of one batch is in memory at a time.
    """
    vit = require_shares(model, "attention distance")
    sums = torch.zeros(vit.config.depth, vit.config.num_heads, dtype=torch.float64)
    images = 0
    with eval_mode(vit), torch.no_grad():
        for pixels in batches:
            for layer, weights in vit.attention_maps(pixels):
                sums[layer] += distances(weights, vit.grid_of(pixels), vit.config.stride).sum(dim=0).cpu().double()
            images += len(pixels)
    if not images:
        raise DataError("no images to measure the attention distance on")
    return sums / images


def distances(weights: Tensor, grid: Size, stride: int) -> Tensor:
    """Mean attention distance in pixels (B, H) of attention weights (B, H, N, N).

    Tokens before the patches have no position. They are left out as queries and as keys, and the weights of the patches
    are normalized again.
    """
    apart = patch_distances(grid).to(weights) * stride
    among = weights[:, :, -len(apart) :, -len(apart) :]  # (B, H, P, P)
    on_patches = among.sum(dim=-1).clamp(min=torch.finfo(weights.dtype).tiny)
    return ((among * apart).sum(dim=-1) / on_patches).mean(dim=-1)


def patch_distances(grid: Size) -> Tensor:
    """Euclidean distances between the centers of patches, in patches, (P, P)."""
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    centers = torch.stack([rows.flatten(), columns.flatten()], dim=1)
    return (centers[:, None] - centers[None]).square().sum(dim=-1).sqrt()


TILES_PER_ROW = 7
TEXT_PIXELS = 15
MARGIN = 12
TILE_PIXELS = 64  # minimum side of a tile
GRID_PIXELS = 720  # approximate side of the grid of grids
MOST_GRIDS = 40  # maximum number of rows or columns of grids; of more, every second (third ...) patch is drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure and its data. If it is not defined for the model, `image` is None and the note says why."""

    name: str  # the beginning of its file names
    title: str
    note: str  # how to read it, or why there is no image
    image: Image.Image | None = None
    arrays: dict[str, NDArray[Any]]
    unreadable: tuple[str, ...] = ()  # errors of images that could not be read


def filters_figure(vit: ViT) -> Figure:
    name, title = "filters", "Filters of the patch embedding"
    if vit.config.in_channels not in (1, 3):
        note = f"The filters read {vit.config.in_channels} channels, which cannot be shown as colors."
        return Figure(name=name, title=title, note=note, arrays={})
    components, shares = (values.numpy() for values in filter_components(vit))
    note = (
        f"The first {len(components)} principal components, most variance first; together "
        f"{float(shares.sum()):.0%} of it. Gray is zero."
    )
    if vit.embed.stem is not None:
        title = "Filters of the stem"
        note += (
            " The patch embedding of a hybrid reads features without colors; these are the filters of the stem's first "
            "convolution."
        )
    image = tile_images(tint(components), TILES_PER_ROW)
    arrays = {"components": components, "variance_shares": shares}
    return Figure(name=name, title=title, note=note, image=image, arrays=arrays)


def tint(components: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Components (count, rows, columns, 1 or 3) as colors: zero is gray, and the largest value is saturated."""
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


def distance_figure(vit: ViT, batches: Iterable[Tensor], image: str) -> Figure:
    """One dot per head, and a line through the means of the layers."""
    count = 0

    def count_images() -> Iterator[Tensor]:
        nonlocal count
        for pixels in batches:
            count += len(pixels)
            yield pixels

    distance = attention_distance(vit, count_images()).numpy()
    note = (
        f"A dot for each head: the distance from a query patch to the patches it attends to, weighted by attention, "
        f"averaged over {plural(count, image)}. The line joins the means of the layers."
    )
    heads = [(float(layer), float(value)) for layer, values in enumerate(distance) for value in values]
    means = [(float(layer), float(values.mean())) for layer, values in enumerate(distance)]
    chart = Chart(
        title="Mean attention distance, in pixels",
        lines=[Line("head", heads, scatter=True), Line("mean of the layer", means)],
        x_label="layer",
        y_from=0.0,
        size=(620, 360),
    )
    arrays = {"distance_pixels": distance, "images": np.array(count), "stride_pixels": np.array(vit.config.stride)}
    title = "Mean attention distance"
    return Figure(name="attention-distance", title=title, note=note, image=chart.image(), arrays=arrays)


def tile_images(tiles: Rgb, columns: int) -> Image.Image:
    """Enlarged tiles (count, rows, columns, 3) in reading order."""
    count, rows, width, _ = tiles.shape
    scale = max(1, -(-TILE_PIXELS // max(rows, width)))
    down, across = rows * scale + MARGIN // 2, width * scale + MARGIN // 2
    lines = -(-count // columns)
    size = min(columns, count) * across + 2 * MARGIN - MARGIN // 2, lines * down + 2 * MARGIN - MARGIN // 2
    canvas = Image.new("RGB", size, PAPER)
    for index, tile in enumerate(tiles):
        enlarged = Image.fromarray(tile).resize((width * scale, rows * scale), Image.Resampling.NEAREST)
        canvas.paste(enlarged, (MARGIN + index % columns * across, MARGIN + index // columns * down))
    return canvas


def grid_of_grids(values: NDArray[np.floating], low: float, high: float) -> Image.Image:
    """Draw values (R, C, R, C) as a grid with a small grid at each patch, and a color scale."""
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
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(TEXT_PIXELS)

    def write(x: float, y: float, text: str, anchor: str, color: str) -> None:
        pen.text((x, y), text, fill=color, anchor=anchor, font=font)

    for row in range(0, rows, max(1, -(-20 // down))):  # as many indices as there is room for
        write(left - 6, top + (row + 0.5) * down, str(row * every), "rm", SOFT)
    below = top + rows * down
    for column in range(0, columns, max(1, -(-28 // across))):
        write(left + (column + 0.5) * across, below + 2, str(column * every), "mt", SOFT)
    write(left, below + 22, "column of the patch; rows at the left", "lt", SOFT)
    bar = color_bar(min(240, canvas.width - 180), 14)
    canvas.paste(bar, (left + 46, below + 52))
    write(left + 40, below + 59, f"{low:.2f}", "rm", INK)
    write(left + 52 + bar.width, below + 59, f"{high:.2f}  cosine", "lm", INK)
    return canvas


def draw_figures(
    model: Model,
    images: Sequence[ImageInput],
    out: Path,
    *,
    count: int = DISTANCE_IMAGES,
    device: str = "auto",
    follow: Track = no_tracking,
) -> Iterator[tuple[Figure, list[Path]]]:
    """Draw the paper's Figure 7 for a model, and after the last figure write the page `figures.html`.

    Args:
        model: A ViT.
        images: Images for the attention distance; without any, the built-in digits.
        out: The output directory.
        count: Number of images to average over, evenly spaced.
        device: Device of the model, as for `Classifier`.
        follow: Wraps the iterator over images to show progress.

    Yields:
        Each figure with the files it was written to.
    """
    vit = require_vit(model)
    encoder = Encoder(vit, device=device)
    source, digits = "image" if images else "built-in digit", DigitsSource()
    chosen = spread(images, count) if images else [digits.read(n) for n in range(min(count, len(digits)))]
    contexts: list[dict[str, Any]] = []
    unreadable: list[str] = []

    def batches() -> Iterator[Tensor]:
        """Batches of images of one shape, on the model's device."""
        items = ((None, image) for image in follow(chosen, len(chosen)))
        for batch in encoder.load(batched(items, DISTANCE_BATCH), ahead=2 * DISTANCE_BATCH):
            unreadable.extend(str(image) for _, image in batch if isinstance(image, ImageError))
            pixels = [image for _, image in batch if isinstance(image, Tensor)]
            for _, same in groupby(pixels, key=lambda image: image.shape):
                yield torch.stack(list(same)).to(encoder.device)

    for draw in (filters_figure, positions_figure, lambda vit: distance_figure(vit, batches(), source)):
        figure = replace(draw(vit), unreadable=tuple(unreadable))
        paths, shown = [], None
        if figure.image is not None:
            paths = [write_image(out / f"{figure.name}.png", figure.image)]
            paths.append(write_arrays(out / f"{figure.name}.npz", figure.arrays))
            shown = embed_image(figure.image, figure.title, kind="whole", exact=True)
        names = {"name": figure.name, "title": figure.title, "note": figure.note}
        contexts.append({**names, "image": shown, "unreadable": figure.unreadable})
        yield figure, paths
    title = "Learned parameters and attention"
    write_text(out / FIGURES_PAGE, render("figures.html", title=title, subtitle=describe_model(vit), figures=contexts))


def spread(images: Sequence[ImageInput], count: int) -> list[ImageInput]:
    """At most `count` of the images, evenly spaced."""
    size = min(count, len(images))
    return [images[index * len(images) // size] for index in range(size)]

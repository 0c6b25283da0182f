"""The section of a report that shows masked-patch pre-training at work: image, what was seen, what was said."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitruvian.config import Preprocess
from vitruvian.data.sources.base import Source
from vitruvian.report.html import Html, section, text
from vitruvian.report.images import TINY_SIDE, embedded, gallery
from vitruvian.training.corruption import Corruption, corruption_of, cut, levels_of, shown_color
from vitruvian.training.masked import ColorMeasures, Example

# N patches of P x P pixels, C channels

MASK_LEVEL = 128
"""Gray, for patches that became the mask embedding."""
NOTE = (
    "For each image: the image, what the model saw (gray is the mask; some patches are another's, some stayed), "
    "and the image with the predicted mean colors in place of the corrupted patches."
)

Pixels = NDArray[np.uint8]


def color_tiles(measures: ColorMeasures) -> dict[str, str]:
    """The single numbers by name."""
    return {
        "colors right": f"{measures.top1:.2f} %",
        "cross-entropy": f"{measures.loss:.4f}",
        "corrupted patches": f"{measures.patches:,}",
        "held-out images": f"{measures.count:,}",
    }


def color_sections(measures: ColorMeasures, preprocess: Preprocess, side: int, source: Source) -> Iterator[Html]:
    """Some held-out images as they are, as they were seen, and as they were filled in."""
    if measures.examples:
        shown = (figure for example in measures.examples for figure in figures(example, preprocess, side, source))
        yield section("Predicted colors", gallery(shown), note=NOTE)


def figures(example: Example, preprocess: Preprocess, side: int, source: Source) -> Iterator[tuple[Html, Html]]:
    """The three views of an example, each with its caption."""
    kind = "tiny" if max(example.pixels.shape[1:]) <= TINY_SIDE else ""
    names = (source.key(example.index), "as the model saw it", "predicted colors")
    for levels, name in zip(three_views(example, preprocess, side), names):
        yield embedded(Image.fromarray(levels), name, kind=kind), Html(f'<small class="soft">{text(name)}</small>')


def three_views(example: Example, preprocess: Preprocess, side: int) -> tuple[Pixels, Pixels, Pixels]:
    """The image, its corruption and its prediction as uint8 (rows, columns, 3), or (rows, columns) where gray."""
    levels = levels_of(torch.from_numpy(example.pixels)[None], preprocess)
    patches = cut(levels, side)[0].numpy().astype(np.uint8)  # (N, C, P, P)
    corruption = corruption_of(torch.from_numpy(example.draws)[None])
    rows, columns = levels.shape[-2] // side, levels.shape[-1] // side
    seen, filled = as_seen(patches, corruption), as_predicted(patches, corruption, example.predicted)
    image, saw, said = (joined(some, rows, columns) for some in (patches, seen, filled))
    return image, saw, said


def as_seen(patches: Pixels, corruption: Corruption) -> Pixels:
    seen = patches[corruption.taken_from[0].numpy()]
    seen[corruption.masked[0].numpy()] = MASK_LEVEL
    return seen


def as_predicted(patches: Pixels, corruption: Corruption, predicted: NDArray[np.int64]) -> Pixels:
    filled = patches.copy()
    for place, color in zip(np.flatnonzero(corruption.chosen[0].numpy()), predicted.tolist()):
        filled[place] = np.array(shown_color(color, patches.shape[1]), np.uint8)[:, None, None]
    return filled


def joined(patches: Pixels, rows: int, columns: int) -> Pixels:
    """Patches (N, C, P, P) -> (rows * P, columns * P, C), without the last axis where C is 1."""
    _, channels, side, _ = patches.shape
    grid = patches.reshape(rows, columns, channels, side, side).transpose(0, 3, 1, 4, 2)
    whole = grid.reshape(rows * side, columns * side, channels)
    return np.ascontiguousarray(whole[..., 0] if channels == 1 else whole)

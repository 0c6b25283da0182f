"""A run: maps of many images, or the figures of a model, written into a folder with a page about them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import ImageInput
from vitruvian.data.pixels import DigitsSource
from vitruvian.errors import ImageError
from vitruvian.explain.attention import require_vit
from vitruvian.explain.explain_report import MAX_IMAGES, explanation_page, figures_page, image_context
from vitruvian.explain.explainer import Explained, Explainer
from vitruvian.explain.figures import Figure, figures
from vitruvian.explain.overlay import image_with_crop, overlay, seen_box
from vitruvian.files import atomic_open, write_text
from vitruvian.inference import Encoder, batched
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import write_image

PAGE = "explain.html"
FIGURES_PAGE = "figures.html"
DISTANCE_IMAGES = 128
"""Images over which the paper averages the attention distance."""
DISTANCE_BATCH = 4
LONGEST_NAME = 60


def about(vit: ViT) -> str:
    """The model in a line."""
    size = " x ".join(map(str, vit.config.image_size))
    shape = (
        f"{vit.config.depth} layers of {vit.config.num_heads} heads, patches of {vit.config.stride} pixels at {size}"
    )
    return f"{vit.meta.origin}: {shape}" if vit.meta.origin else shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """An image that was explained, and the files that tell of it; none if it could not be read."""

    explained: Explained
    images: dict[str, Path]
    """The overlay of each map by name, and `image`."""
    arrays: Path | None = None


def explain_images(explainer: Explainer, images: Sequence[ImageInput], out: Path) -> Iterator[Written]:
    """Explain each image and write its files into `out`; after the last one the page, `explain.html`.

    Where not one image can be read, nothing is written.
    """
    parts: list[dict[str, Any]] = []
    unread = 0
    for number, explained in enumerate(explainer.stream(images), 1):
        unread += bool(explained.error)
        shown = overlays(explainer, explained)
        digits = len(str(len(images)))
        start = out / f"{number:0{digits}d}-{file_name(Path(explained.path).stem)}"
        written = write_explained(explained, shown, start=start, preprocess=explainer.vit.meta.preprocess)
        if len(parts) < MAX_IMAGES:
            parts.append(image_context(explained, shown))
        yield written
    if unread < len(images):
        write_text(out / PAGE, explanation_page(about(explainer.vit), parts, count=len(images), unreadable=unread))


def overlays(explainer: Explainer, explained: Explained) -> dict[str, Image.Image]:
    """The image with the model's crop, and each map over it, by name."""
    if explained.image is None:
        return {}
    image, preprocess = explained.image, explainer.vit.meta.preprocess
    maps = {each.name: overlay(image, each.values, preprocess, patch=each.patch) for each in explained.maps}
    return {"image": image_with_crop(image, preprocess)} | maps


def write_explained(
    explained: Explained, shown: dict[str, Image.Image], *, start: Path, preprocess: Preprocess
) -> Written:
    """The overlays and the arrays of an image in files whose paths begin with `start`."""
    if explained.image is None:
        return Written(explained=explained, images={})
    images = {name: write_image(Path(f"{start}-{name}.png"), image) for name, image in shown.items()}
    size = explained.image.height, explained.image.width
    arrays: dict[str, NDArray[Any]] = {each.name: each.values for each in explained.maps}
    arrays |= {"size": np.array(size), "seen_box": np.array(seen_box(size, preprocess))}
    arrays |= {f"{each.name}_index": np.array(each.index) for each in explained.maps if each.index is not None}
    for name, curve in explained.curves.items():
        arrays |= {"deletion_removed": curve.removed, f"deletion_{name}": curve.probability}
    return Written(explained=explained, images=images, arrays=write_arrays(Path(f"{start}.npz"), arrays))


def draw_figures(
    model: Model,
    images: Sequence[ImageInput],
    out: Path,
    *,
    count: int = DISTANCE_IMAGES,
    device: str = "cpu",
    follow: Track = no_tracking,
) -> Iterator[tuple[Figure, list[Path]]]:
    """The paper's Figure 7, each figure with the files it was written to; after the last one `figures.html`.

    Attention distance is averaged over `count` of the images, evenly chosen, or of the built-in digits if there
    are none. `follow` is handed the images with their number, and passes them on.
    """
    vit = require_vit(model)
    encoder = Encoder(vit, device=device)
    source = "images" if images else "built-in digits"
    digits = DigitsSource()
    chosen = evenly(images, count) if images else [digits.read(n) for n in range(min(count, len(digits)))]
    done: list[Figure] = []
    unread: list[str] = []
    for drawn in figures(vit, lambda: pixel_batches(encoder, chosen, unread=unread, follow=follow), source):
        figure = replace(drawn, unread=tuple(unread))
        paths = []
        if figure.image is not None:
            paths = [write_image(out / f"{figure.name}.png", figure.image)]
            paths.append(write_arrays(out / f"{figure.name}.npz", figure.arrays))
        done.append(figure)
        yield figure, paths
    write_text(out / FIGURES_PAGE, figures_page(about(vit), done))


def evenly(images: Sequence[ImageInput], count: int) -> list[ImageInput]:
    """At most `count` of the images, from the first to the last at equal steps."""
    if len(images) <= count:
        return list(images)
    return [images[index * len(images) // count] for index in range(count)]


def pixel_batches(
    encoder: Encoder, images: Sequence[ImageInput], *, unread: list[str], follow: Track
) -> Iterator[Tensor]:
    """Batches of images of one shape, on the model's device. The errors of unreadable images are added to `unread`."""
    items = ((None, image) for image in follow(images, len(images)))
    for batch in encoder.load(batched(items, DISTANCE_BATCH), ahead=2 * DISTANCE_BATCH):
        unread += [str(image) for _, image in batch if isinstance(image, ImageError)]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for _, image in batch:
            if isinstance(image, Tensor):
                by_shape.setdefault(image.shape, []).append(image)
        for same in by_shape.values():
            yield torch.stack(same).to(encoder.device)


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    """An npz file that loads without pickle."""
    with atomic_open(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def file_name(text: str) -> str:
    """The text in characters that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:LONGEST_NAME] or "image"

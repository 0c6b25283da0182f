"""What MAE makes of patches that it does not see: the image without them, filled in, and whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import ImageInput
from vitruvian.data.preprocess import preprocess_image
from vitruvian.errors import ImageError
from vitruvian.explain.run import file_name
from vitruvian.model.mae import MaskedAutoencoder
from vitruvian.report.html import write_image

GRAY = 0.5
"""Light in place of a hidden patch."""
GAP = 8
"""Pixels between the three images."""


def reconstruct(
    model: MaskedAutoencoder, image: ImageInput, *, share: float = 0.75, seed: int = 0
) -> tuple[Image.Image, Image.Image, Image.Image]:
    """The image without its hidden patches, with those that the model fills in, and whole; as the model sees it.

    `share` of the patches are hidden, drawn from `seed`.
    """
    config, view = model.encoder.config, model.encoder.meta.preprocess
    pixels = preprocess_image(image, view)[None]
    noise = torch.rand(1, config.grid[0] * config.grid[1], generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        filled, hidden = model.fill_in(pixels, noise, share)
    P = config.patch_size
    covered = hidden[0].repeat_interleave(P, 0).repeat_interleave(P, 1)
    whole = light(pixels[0], view)
    return tuple(map(as_image, (torch.where(covered, GRAY, whole), light(filled[0], view), whole)))  # type: ignore[return-value]


def light(pixels: Tensor, view: Preprocess) -> Tensor:
    """Normalized pixels (C, rows, columns) as light from 0 to 1."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (view.mean, view.std))
    return pixels * std + mean


def as_image(values: Tensor) -> Image.Image:
    levels = (values.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(levels if levels.shape[2] == 3 else levels[:, :, 0]))


def reconstruct_images(
    model: MaskedAutoencoder, images: Sequence[ImageInput], out: Path, *, share: float = 0.75
) -> Iterator[tuple[str, Path | str]]:
    """For each image its name, and the file of the three side by side or what was wrong with it."""
    for number, image in enumerate(images, 1):
        name = str(image) if isinstance(image, str | Path) else f"image {number}"
        try:
            parts = reconstruct(model, image, share=share)
        except ImageError as error:
            yield name, str(error)
            continue
        width, height = parts[0].size
        canvas = Image.new(parts[0].mode, (3 * width + 2 * GAP, height), "white")
        for place, part in enumerate(parts):
            canvas.paste(part, (place * (width + GAP), 0))
        digits = len(str(len(images)))
        yield name, write_image(out / f"{number:0{digits}d}-{file_name(Path(name).stem)}-reconstructed.png", canvas)

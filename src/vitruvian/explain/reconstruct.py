"""Reconstructions of a masked autoencoder: the masked image, the reconstruction and the original."""

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
from vitruvian.explain.overlay import file_name
from vitruvian.model.mae import MaskedAutoencoder
from vitruvian.report.html import write_image

GRAY = 0.5  # brightness of a masked patch
GAP = 8  # pixels between the three images


def reconstruct(
    model: MaskedAutoencoder, image: ImageInput, *, share: float = 0.75, seed: int = 0
) -> tuple[Image.Image, Image.Image, Image.Image]:
    """Mask an image and reconstruct it.

    Args:
        model: A masked autoencoder.
        image: Any image that `vitruvian.preprocess_image` accepts.
        share: Fraction of patches to mask.
        seed: Random seed of the mask.

    Returns:
        The masked image, the reconstruction and the original, as the model sees it.

    Raises:
        ImageError: The image cannot be read.
    """
    config, preprocess = model.encoder.config, model.encoder.meta.preprocess
    preprocess.require_rgb("a reconstruction")
    pixels = preprocess_image(image, preprocess)[None]
    noise = torch.rand(1, config.grid[0] * config.grid[1], generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        filled, hidden = model.fill_in(pixels, noise, share)
    P = config.patch_size
    mask = hidden[0].repeat_interleave(P, 0).repeat_interleave(P, 1)
    original = unnormalize(pixels[0], preprocess)
    images = torch.where(mask, GRAY, original), unnormalize(filled[0], preprocess), original
    return tuple(map(to_image, images))  # type: ignore[return-value]


def unnormalize(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Pixels (channels, rows, columns) in the range 0 to 1."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return pixels * std + mean


def to_image(values: Tensor) -> Image.Image:
    levels = (values.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(levels if levels.shape[2] == 3 else levels[:, :, 0]))


def reconstruct_images(
    model: MaskedAutoencoder, images: Sequence[ImageInput], out: Path, *, share: float = 0.75
) -> Iterator[tuple[str, Path | str]]:
    """Write masked image, reconstruction and original side by side; yields names with the file or the error."""
    digits = len(str(len(images)))
    for position, image in enumerate(images, 1):
        name = str(image) if isinstance(image, str | Path) else f"image {position}"
        try:
            parts = reconstruct(model, image, share=share)
        except ImageError as error:
            yield name, str(error)
            continue
        width, height = parts[0].size
        canvas = Image.new(parts[0].mode, (3 * width + 2 * GAP, height), "white")
        for column, part in enumerate(parts):
            canvas.paste(part, (column * (width + GAP), 0))
        yield name, write_image(out / f"{position:0{digits}d}-{file_name(Path(name).stem)}-reconstructed.png", canvas)

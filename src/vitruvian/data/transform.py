"""Transforms: callables from an image to the tensor that a model is fed.

A user's transform is any callable that takes a PIL image (upright RGB) and returns a float tensor (channels, rows,
columns), for example a transform of torchvision v2. Its draws from the global generators of Python,
NumPy and PyTorch are seeded from (seed, epoch, sample) alone. A callable with private generators, as in albumentations,
is seeded through its method `set_random_seed(seed)`. Data workers need a picklable callable.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvian.config import ModelMeta, Preprocess
from vitruvian.data.decode import ImageInput, RawImage, decode
from vitruvian.data.preprocess import preprocess_image
from vitruvian.errors import ConfigError

SampleTransform = Callable[[RawImage, np.random.Generator], Tensor]  # all randomness comes from the generator
Transform = Callable[[Image.Image], Tensor]  # a transform of any library, from a PIL image


class Preprocessed(Protocol):
    """A model, or anything else with metadata that states its preprocessing."""

    meta: ModelMeta


def transform(model: Preprocessed | Preprocess) -> "EvalTransform":
    """The evaluation transform of a model, usable as the transform of a PyTorch dataset.

    Args:
        model: A model, or preprocessing settings.

    Returns:
        A picklable callable from an image (Pillow image, path, bytes, open file or 8-bit array) to normalized float32
        pixels (channels, rows, columns).
    """
    return EvalTransform(model if isinstance(model, Preprocess) else model.meta.preprocess)


def as_transform(transform: Preprocess | Transform) -> "EvalTransform | SeededTransform":
    """A SampleTransform from preprocessing settings or from a transform of any library."""
    if isinstance(transform, EvalTransform):
        return transform
    return EvalTransform(transform) if isinstance(transform, Preprocess) else SeededTransform(transform)


@dataclass(frozen=True, slots=True)
class EvalTransform:
    """Resize, crop and normalize an image; deterministic, so that a generator is accepted and not used."""

    preprocess: Preprocess

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> Tensor:
        return preprocess_image(image, self.preprocess)


@dataclass(frozen=True, slots=True)
class SeededTransform:
    """A transform of any library whose draws are seeded from `rng`."""

    transform: Transform

    def __call__(self, image: ImageInput, rng: np.random.Generator) -> Tensor:
        decoded = decode(image)
        with seed_globally(rng, self.transform):
            pixels = self.transform(decoded)
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.ndim != 3:
            kind = f"{pixels.dtype} {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels).__name__
            raise ConfigError(
                f"the transform returned {kind}, expected a float tensor (channels, rows, columns); "
                "with torchvision, end it with ToImage() and ToDtype(torch.float32, scale=True)"
            )
        return pixels.as_subclass(Tensor)  # torchvision's Image is a subclass that slows down later operations


@contextmanager
def seed_globally(rng: np.random.Generator, owner: object = None) -> Iterator[None]:
    """Seed the global generators, and `owner.set_random_seed` if it exists, from `rng`; restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    words = rng.integers(0, 2**32, 4).tolist()
    random.seed(words[0])
    np.random.seed(words[1])  # noqa: NPY002
    torch.default_generator.manual_seed(words[2])  # not torch.manual_seed, which would seed the GPU too
    reseed = getattr(owner, "set_random_seed", None)
    if reseed is not None:
        reseed(words[3])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])

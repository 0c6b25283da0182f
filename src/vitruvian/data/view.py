"""Views: from what a source reads to the tensor that a model sees, with all randomness from one generator.

The contract of `view=` and `train_view=`: any callable that takes a PIL image (upright RGB) and gives a float tensor
(channels, rows, columns), such as transforms of torchvision v2. What it draws from the global generators of Python,
NumPy and PyTorch follows from (seed, epoch, sample) alone. A callable with generators of its own, as albumentations
has them, is seeded through its method `set_random_seed(seed)`. For workers it must be picklable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import ImageInput, RawImage, decode
from vitruvian.data.preprocess import preprocess_image
from vitruvian.errors import ConfigError

View = Callable[[RawImage, np.random.Generator], Tensor]
"""From what a source reads to a tensor of one shape; ImageError where the image is broken."""

Transform = Callable[[Image.Image], Tensor]
"""Anyone's transform of a PIL image."""


def as_view(transform: Preprocess | Transform) -> EvaluationView | TransformView:
    """The view of these settings, or of anyone's transform."""
    return EvaluationView(transform) if isinstance(transform, Preprocess) else TransformView(transform)


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """`view(image, rng)` is what the model sees of an image outside training; it is not random."""

    preprocess: Preprocess

    def __call__(self, image: ImageInput, rng: np.random.Generator) -> Tensor:
        return preprocess_image(image, self.preprocess)


@dataclass(frozen=True, slots=True)
class TransformView:
    """`view(image, rng)` is what a transform makes of the image, its draws seeded from `rng`."""

    transform: Transform

    def __call__(self, image: ImageInput, rng: np.random.Generator) -> Tensor:
        decoded = decode(image)
        with seeded(rng, self.transform):
            made = self.transform(decoded)
        if not isinstance(made, Tensor) or not made.is_floating_point() or made.ndim != 3:
            kind = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"the view gives {kind}; wanted a float tensor (channels, rows, columns): with torchvision, "
                "end it with ToImage() and ToDtype(torch.float32, scale=True)"
            )
        return made.as_subclass(Tensor)  # torchvision's Image is a subclass that slows down what follows


@contextmanager
def seeded(rng: np.random.Generator, owner: object = None) -> Iterator[None]:
    """The global generators seeded from `rng`, and as they were afterwards; `owner` may have generators of its own."""
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

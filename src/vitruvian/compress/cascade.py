"""Fewer tokens, fitted on images without labels: similarity thresholds of token merging, and cascades.

What a cheaper pass costs in accuracy is estimated from the whole model's probabilities: where their answers differ, the
probability of its own answer less that of the other. Where the probabilities are calibrated, that is the expected loss
of top-1, and it varies less than a count of right answers over as many labeled images.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.config import DEFAULT_BATCH_SIZE, CascadeConfig, ViTConfig
from vitruvian.cost import multiply_adds
from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_images
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.measuring.evaluate import usual_split
from vitruvian.inference import Classifier, Encoder, first_pass_pixels, probabilities_of
from vitruvian.model.build import Model
from vitruvian.model.token_merging import fit_thresholds
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Size, as_size, check_range
from vitruvian.weights.load import load, with_merging, without_cascade

MOST_IMAGES = 256
"""Images that thresholds of token merging are fitted on; they are in memory together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCascade:
    """A cascade and what it does to the images that it was fitted on; percent of them where it says so."""

    cascade: CascadeConfig
    images: int
    again: float
    """Percent of the images that the whole model answers."""
    cost: float
    """Multiply-adds of an image relative to the whole model."""
    expected_loss: float
    """Points of top-1, by the whole model's probabilities."""
    disagreement: float
    """Percent of the images with another answer than the whole model's."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.images:,} images: the first pass answers {100 - self.again:.1f}% of them, those above "
            f"{self.cascade.threshold:.3f}; {self.cost:.2f} of the multiply-adds, "
            f"expected loss {self.expected_loss:.2f} points, {self.disagreement:.1f}% other answers"
        )


def fit_cascade(
    model: Model | str | Path,
    data: object,
    *,
    image_size: int | Size | None = None,
    tome_r: int | tuple[int, ...] = 0,
    max_loss: float = 0.5,
    split: str | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> FittedCascade:
    """The cascade whose first pass sees smaller images, or merges tokens, and answers as often as `max_loss` allows.

    `max_loss` is in points of top-1, as the whole model's probabilities expect it; labels are not needed. A cascade
    that saves nothing is refused. To use the result: `model.meta = model.meta.replace(cascade=fitted.cascade)`.
    """
    check_range("max_loss", max_loss, 0.0, 100.0)
    whole = load(model) if isinstance(model, str | Path) else model
    if not isinstance(whole.config, ViTConfig):
        raise ConfigError("a cascade is for Vision Transformers; this model has no tokens")
    own = whole.meta.preprocess.require_one_size("a cascade")
    cascade = CascadeConfig(image_size=None if image_size is None else as_size(image_size), tome_r=tome_r)
    size = cascade.image_size or own
    first = with_merging(whole, cascade.tome_r)
    assert isinstance(first.config, ViTConfig)
    relative = multiply_adds(first.config, size) / multiply_adds(whole.config, own)
    if relative >= 1:
        raise ConfigError(
            f"the first pass costs as much as the whole model: set {argument('image_size')} or {argument('tome_r')}"
        )
    certainty, losses = compared(whole, cascade, data, split=split, batch_size=batch_size, track=track)
    threshold = fitted_threshold(certainty, losses, max_loss)
    sure = certainty > threshold
    again = 1 - sure.mean()
    if relative + again >= 1:
        raise ConfigError(
            f"within {argument('max_loss', max_loss, 'g')} the whole model answers {again:.0%} of the images, "
            f"and the first pass costs {relative:.2f} of it: this cascade saves nothing"
        )
    return FittedCascade(
        cascade=cascade.replace(threshold=threshold),
        images=len(certainty),
        again=100 * float(again),
        cost=float(relative + again),
        expected_loss=100 * float(losses[sure].sum() / len(certainty)),
        disagreement=100 * float((losses[sure] > 0).sum() / len(certainty)),
    )


def fitted_threshold(certainty: NDArray[np.float64], losses: NDArray[np.float64], max_loss: float) -> float:
    """The smallest certainty above which answers of the first pass lose at most `max_loss` points of all images."""
    order = np.argsort(-certainty, kind="stable")
    spent = np.cumsum(losses[order])
    answered = int(np.searchsorted(spent, max_loss / 100 * len(order), side="right"))
    return float(certainty[order[answered]]) if answered < len(order) else 0.0


def certainty_and_losses(
    whole: Model, before: torch.Tensor, after: torch.Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of logits (n, K) of the whole model and of a first pass: the latter's probability, and what it may lose."""
    wanted = probabilities_of(whole, before).double()
    certainty, answer = probabilities_of(whole, after).double().max(dim=1)
    return certainty.numpy(), (wanted.amax(dim=1) - wanted.gather(1, answer[:, None])[:, 0]).numpy()


def compared(
    whole: Model, cascade: CascadeConfig, data: object, *, split: str | None, batch_size: int, track: Track
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each image the first pass's probability of its answer, and what that answer is expected to lose."""
    full, first = Classifier(without_cascade(whole)), Classifier(with_merging(whole, cascade.tome_r))

    def both(pixels: torch.Tensor) -> torch.Tensor:
        found = certainty_and_losses(whole, full.logits(pixels), first.logits(first_pass_pixels(pixels, cascade)))
        return torch.from_numpy(np.stack(found, axis=1))

    source = images_to_fit(data, split)
    unreadable: list[Unreadable] = []
    indices = np.arange(len(source))
    batches = full.run_source(both, source, indices, unreadable=unreadable, batch_size=batch_size, track=track)
    found = [values for _, values in batches]
    if not found:
        raise DataError(f"{source.name}: no image to fit a cascade on")
    certainty, losses = torch.cat(found).T.numpy()
    return certainty, losses


def images_to_fit(data: object, split: str | None) -> Source:
    """A split of a dataset, or a folder of images that are in no classes: labels are not used."""
    splits = open_images(data, split=split)
    return splits[usual_split(splits)]


def fit_merging(
    model: Model | str | Path, data: object, r: int | tuple[int, ...], *, split: str | None = None
) -> Model:
    """The model with similarity thresholds: `r` tokens merge in each layer on average over these images.

    Images whose patches are more alike merge more. At most 256 images are used, spread over the data.
    """
    whole = load(model) if isinstance(model, str | Path) else model
    merging = with_merging(whole, r)
    assert isinstance(merging, ViT)
    if not any(merging.config.tome_counts):
        raise ConfigError(f"{argument('tome_r', 0)} merges nothing: say how many tokens merge in each layer, such as 8")
    merging.meta.preprocess.require_one_size("a threshold for merging")
    source = images_to_fit(data, split)
    unreadable: list[Unreadable] = []
    chosen = np.unique(np.linspace(0, len(source) - 1, min(MOST_IMAGES, len(source))).astype(np.int64))
    encoder = Encoder(merging)
    pixels = [
        values for _, values in encoder.run_source(torch.Tensor.contiguous, source, chosen, unreadable=unreadable)
    ]
    with torch.inference_mode():
        thresholds = fit_thresholds(
            merging.blocks, merging.config, merging.embed(torch.cat(pixels)), merging.config.tome_counts
        )
    return with_merging(whole, thresholds=thresholds)

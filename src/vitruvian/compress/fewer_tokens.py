"""Fewer tokens: where to merge them (ToMe), thresholds of merging, and cascades; fitted on images without labels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.compress.loss import expected_losses
from vitruvian.config import DEFAULT_BATCH_SIZE, CascadeConfig, ViTConfig
from vitruvian.cost import multiply_adds
from vitruvian.data.formats import open_images
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.evaluate import default_split
from vitruvian.inference import Classifier, Encoder, first_pass_pixels, probabilities_of
from vitruvian.model.batching import map_over_cores
from vitruvian.model.build import Model
from vitruvian.model.token_merging import fit_thresholds
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking, print_status, track
from vitruvian.settings import Record, Size, as_size, check_range
from vitruvian.weights.load import check_finite, load, with_merging, without_cascade

# n images, B images of a batch, K outputs

Counts = tuple[int, ...]  # number of tokens to merge in each block; empty for none
MERGING_BLOCKS = 3  # blocks that merge tokens; each adds a fixed cost, whatever the number of tokens
MERGED_SHARES = (0.03, 0.05, 0.07, 0.09, 0.12, 0.15, 0.2)
"""Fractions of an image's patches that merge in each of these blocks, in increasing order."""
COMPARED_SHARE = 0.12  # the fraction with which sets of blocks are compared
MAX_IMAGES = 256  # number of images to fit thresholds of token merging on; all are in memory


def merge_tokens(model: Model, counts: Counts) -> Model:
    """The model with `counts` tokens merged, sharing its weights; the model itself if `counts` is empty."""
    return with_merging(model, counts) if counts else model


def merging_steps(model: Model, pixels: Tensor) -> list[Counts]:
    """Increasing numbers of merged tokens, in the blocks where merging changes the outputs least for its saving.

    Sets of blocks in the middle of the model are compared on `pixels`. Early blocks change too much, late ones save too
    little. Returns an empty list if the model cannot merge tokens.
    """
    config = model.config
    if not isinstance(config, ViTConfig) or config.merges_tokens:
        return []
    depth, patches = config.depth, config.grid[0] * config.grid[1]
    candidates = candidate_blocks(depth)
    if not candidates or config.needs_all_patches:
        return []
    expected = log_probabilities(model, pixels)
    costs = {}
    for blocks in track(candidates, len(candidates), "blocks that merge tokens"):
        costs[blocks] = merging_cost(model, merge_counts(blocks, depth, patches, COMPARED_SHARE), pixels, expected)
    best = min(costs, key=costs.__getitem__)
    print_status(f"merging tokens in blocks {', '.join(map(str, best))}, where it changes the outputs the least")
    return list(dict.fromkeys(merge_counts(best, depth, patches, share) for share in MERGED_SHARES))


def candidate_blocks(depth: int) -> list[tuple[int, ...]]:
    """Sets of evenly spaced blocks that start between one sixth and one third of the depth."""
    spacing = max(1, depth // 6)
    sets = [tuple(range(start, depth - 1, spacing))[:MERGING_BLOCKS] for start in range(depth // 6, depth // 3 + 1)]
    return list(dict.fromkeys(blocks for blocks in sets if blocks))


def merge_counts(blocks: tuple[int, ...], depth: int, patches: int, share: float) -> Counts:
    """Merge this fraction of the patches in each of these blocks."""
    r = max(1, round(share * patches))
    return tuple(r if block in blocks else 0 for block in range(depth))


def merging_cost(model: Model, counts: Counts, pixels: Tensor, expected: Tensor) -> float:
    """Change of the outputs per fraction of multiply-adds saved.

    The change is the mean root of the divergence: like the saving it grows linearly with the number of tokens, and a
    few images do not dominate it.
    """
    merged = merge_tokens(model, counts)
    saved = 1 - multiply_adds(merged.config) / multiply_adds(model.config)
    divergence = F.kl_div(log_probabilities(merged, pixels), expected, log_target=True, reduction="none").sum(dim=1)
    return float(divergence.clamp(min=0).sqrt().mean()) / saved


def log_probabilities(model: Model, pixels: Tensor) -> Tensor:  # (B, K)
    with torch.inference_mode():
        return map_over_cores(model, pixels).log_softmax(dim=-1)


def describe_counts(counts: Counts) -> str:
    """Text such as `16 tokens merged in blocks 4, 6, 8`."""
    blocks = [str(block) for block, r in enumerate(counts) if r]
    amounts = dict.fromkeys(str(r) for r in counts if r)
    return f"{' and '.join(amounts)} tokens merged in {'blocks' if len(blocks) > 1 else 'block'} {', '.join(blocks)}"


def fit_merging(
    model: Model | str | Path, data: object, r: int | tuple[int, ...], *, split: str | None = None
) -> Model:
    """A model with the same weights that merges tokens by similarity thresholds, `r` tokens per block on average.

    With thresholds, images with similar patches merge more tokens than others. They are fitted on at most 256 images of
    `data`, a dataset or a folder of images, evenly spread; labels are not used.
    """
    original = load(model) if isinstance(model, str | Path) else model
    check_finite(original, original.meta.source or "the model")
    merged = with_merging(original, r)
    assert isinstance(merged, ViT)
    if not any(merged.config.tome_counts):
        raise ConfigError(f"{argument('tome_r', 0)} merges no tokens", hint="set the tokens per block, such as 8")
    merged.meta.preprocess.require_one_size("a threshold for merging")
    splits = open_images(data, split=split)
    source = splits[default_split(splits)]
    chosen = np.unique(np.linspace(0, len(source) - 1, min(MAX_IMAGES, len(source))).astype(np.int64))
    batches = Encoder(merged).run_source(Tensor.contiguous, source, chosen, unreadable=[])
    pixels = torch.cat([batch for _, batch in batches])
    with torch.inference_mode():
        thresholds = fit_thresholds(merged.blocks, merged.config, merged.embed(pixels), merged.config.tome_counts)
    return with_merging(original, thresholds=thresholds)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCascade(Record):
    """A cascade, and its effect on the images that it was fitted on."""

    cascade: CascadeConfig
    images: int
    again: float  # percent of the images that the full model computes after the first pass
    cost: float  # multiply-adds per image, relative to the full model
    expected_loss: float  # expected loss of top-1 in points, by the full model's probabilities
    disagreement: float  # percent of the images whose prediction differs from the full model's

    def __str__(self) -> str:
        return (
            f"{self.images:,} images: the first pass decides {100 - self.again:.1f}% of them, those with a probability "
            f"above {self.cascade.threshold:.3f}; {self.cost:.2f} of the multiply-adds, "
            f"expected loss {self.expected_loss:.2f} points, {self.disagreement:.1f}% changed predictions"
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
    """Fit a cascade: a cheaper first pass, and the full model for images whose first prediction is uncertain.

    To use the result: `model.meta = model.meta.replace(cascade=fitted.cascade)`.

    Args:
        data: A dataset or a folder of images; labels are not used.
        image_size: Smaller image size of the first pass.
        tome_r: Tokens that the first pass merges in each block.
        max_loss: Largest expected loss of top-1 in points, by the full model's probabilities.

    Raises:
        ConfigError: The first pass is not cheaper, or the cascade would save nothing within `max_loss`.
    """
    check_range("max_loss", max_loss, 0.0, 100.0)
    full = load(model) if isinstance(model, str | Path) else model
    if not isinstance(full.config, ViTConfig):
        raise ConfigError("cascades are for Vision Transformers")
    if full.meta.target.kind != "single":
        raise ConfigError("cascades are for models of one class per image")
    check_finite(full, full.meta.source or "the model")
    full_size = full.meta.preprocess.require_one_size("a cascade")
    cascade = CascadeConfig(image_size=None if image_size is None else as_size(image_size), tome_r=tome_r)
    first = with_merging(full, cascade.tome_r)
    assert isinstance(first.config, ViTConfig)
    first_cost = multiply_adds(first.config, cascade.image_size or full_size) / multiply_adds(full.config, full_size)
    if first_cost >= 1:
        reason = "the first pass costs as much as the full model"
        raise ConfigError(reason, hint=f"set {argument('image_size')} or {argument('tome_r')}")
    both = Classifier(without_cascade(full)), Classifier(first)

    def compute(pixels: Tensor) -> Tensor:
        before, after = both[0].logits(pixels), both[1].logits(first_pass_pixels(pixels, cascade))
        return torch.from_numpy(np.stack(certainty_and_losses(full, before, after), axis=1))

    splits = open_images(data, split=split)
    source = splits[default_split(splits)]
    every = np.arange(len(source))
    batches = both[0].run_source(compute, source, every, unreadable=[], batch_size=batch_size, track=track)
    pairs = [rows for _, rows in batches]
    if not pairs:
        raise DataError("no image to fit a cascade on", where=source.name)
    certainty, losses = torch.cat(pairs).T.numpy()
    threshold = fit_threshold(certainty, losses, max_loss)
    certain = certainty > threshold
    again = 1 - certain.mean()
    if first_cost + again >= 1:
        reason = f"this cascade saves nothing: within {argument('max_loss', max_loss, 'g')} the full model computes"
        raise ConfigError(f"{reason} {again:.0%} of the images again, and the first pass costs {first_cost:.2f} of it")
    return FittedCascade(
        cascade=cascade.replace(threshold=threshold),
        images=len(certainty),
        again=100 * float(again),
        cost=float(first_cost + again),
        expected_loss=100 * float(losses[certain].sum() / len(certainty)),
        disagreement=100 * float((losses[certain] > 0).sum() / len(certainty)),
    )


def fit_threshold(certainty: NDArray[np.float64], losses: NDArray[np.float64], max_loss: float) -> float:
    """The smallest certainty above which the first pass loses at most `max_loss` points over all images."""
    order = np.argsort(-certainty, kind="stable")
    total = np.cumsum(losses[order])
    count = int(np.searchsorted(total, max_loss / 100 * len(order), side="right"))
    return float(certainty[order[count]]) if count < len(order) else 0.0


def certainty_and_losses(
    model: Model, before: Tensor, after: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probability and expected loss (n,) of the first pass, for logits (n, K) of the full model and the first pass."""
    certainty = probabilities_of(model, after).double().amax(dim=1)
    return certainty.numpy(), expected_losses(model, before, after).numpy()

"""Masked-patch pre-training (Section 4.6): a ViT that predicts the mean colors of masked patches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.loader import Batch
from vitruvian.data.order import generator_for
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.metrics import autocast, count_all, from_all_ranks
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.distributed import Processes
from vitruvian.training.objective import Autocast, Objective
from vitruvian.training.recipe import Recipe

# B images, N patches, M of them corrupted, D width, K colors

EXAMPLES = 12
"""Validation images whose predicted colors the report shows."""
EVALUATION_SEED = 0
"""Seed for corrupting validation images, which depends on the image alone."""


class MaskedViT(ViT):
    """A ViT with a mask embedding and a color classifier in place of the head; neither is saved."""

    own_names = ("mask_embedding", "colors.weight", "colors.bias")
    """Parameters that are not part of the saved model."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.mask_embedding = nn.Parameter(torch.empty(1, 1, config.width))
        self.colors = nn.Linear(config.width, LEVELS**config.in_channels)

    def forward(self, pixels: Tensor, draws: Tensor | None = None) -> Tensor:
        """Logits (B, M, K) of the patches that `draws` (B, 3, N) corrupt, in patch order."""
        assert draws is not None
        self.check(pixels)
        corruption = corruption_of(draws)
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        patches = corrupt(self.embed.patches(pixels), self.mask_embedding, corruption)
        tokens = self.forward_blocks(self.embed.with_positions(patches, grid))[:, self.config.prefix_tokens :]
        if self.config.norm_after_pool:
            tokens = self.norm(tokens)
        logits: Tensor = self.colors(tokens[corruption.chosen])  # (B * M, K)
        return logits.view(len(pixels), -1, logits.shape[-1]).clone()  # FSDP loses its hook on a view

    @classmethod
    def around(cls, model: Model, seed: int) -> MaskedViT:
        """A copy of a ViT for masked-patch pre-training; ConfigError if its architecture cannot be trained that way."""
        check_fit(model)
        assert isinstance(model, ViT)
        with torch.random.fork_rng([]):  # PyTorch initializes the layers first, with the global generator
            masked = cls(model.config)
        missing, unexpected = masked.load_state_dict(model.state_dict(), strict=False)
        assert set(missing) == set(cls.own_names)
        assert not unexpected
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            nn.init.normal_(masked.mask_embedding, std=0.02, generator=generator)
            nn.init.zeros_(masked.colors.weight)
            nn.init.zeros_(masked.colors.bias)
        masked.meta = model.meta
        return masked


def check_fit(model: Model) -> None:
    """Raise ConfigError if a model cannot be pre-trained on masked patches."""
    problem = ""
    if not isinstance(model, ViT):
        problem = "a ResNet has no patches"
    elif model.config.stem is not None:
        problem = "the stem of a hybrid mixes neighboring patches"
    elif model.config.pool == "map":
        problem = "attention pooling would not be trained; set architecture.pool='token' or 'mean'"
    elif model.config.representation_size:
        problem = "the pre-logits layer would not be trained; set architecture.representation_size=0"
    elif model.config.grid[0] * model.config.grid[1] < 2:
        problem = "there is only one patch"
    if problem:
        raise ConfigError(f"objective='masked' is for plain Vision Transformers: {problem}")


@dataclass(frozen=True, slots=True)
class MaskedExample:
    """A validation image and its predicted colors, for the report."""

    index: int
    pixels: NDArray[np.float32]
    """Normalized, (C, H, W)."""
    draws: NDArray[np.float32]
    """(3, N)"""
    predicted: NDArray[np.int64]
    """(M,) colors of the corrupted patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorMeasures:
    """Metrics over the corrupted patches of validation images."""

    count: int
    """Number of images."""
    patches: int
    """Number of corrupted patches, including those left unchanged."""
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percent."""
    examples: tuple[MaskedExample, ...] = ()

    def scalars(self) -> dict[str, float]:
        return {"count": self.count, "patches": self.patches, "loss": self.loss, "top1": self.top1}


@dataclass(kw_only=True, slots=True)
class ColorTally:
    """Counts over batches, and the examples for the report."""

    shown: set[int]
    """Indices of the images to keep as examples."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    """Images, patches, total loss and correct predictions."""
    examples: list[MaskedExample] = field(default_factory=list)

    def measures(self, processes: Processes) -> ColorMeasures:
        """The metrics over the counts of all processes."""
        sums, examples = self.sums, self.examples
        if processes.is_distributed:
            sums, examples = from_all_ranks(sums, examples, processes.device)
        images, patches, loss, correct = sums.tolist()
        if not patches:
            raise DataError("no validation image to evaluate the model on")
        return ColorMeasures(
            count=int(images),
            patches=int(patches),
            loss=loss / patches,
            top1=100 * correct / patches,
            examples=tuple(sorted(examples, key=lambda example: example.index)),
        )


@dataclass(frozen=True, slots=True)
class Colors(Objective):
    """The mean color of each corrupted patch."""

    recipe: Recipe
    model: MaskedViT
    """The unwrapped model, for its patch size and preprocessing."""

    def targets(self, batch: Batch, step: int) -> Tensor:
        """The random draws of each image; they depend on the seed, the step and the image, not on the process."""
        return draws_for(batch.indices.tolist(), self.patches(batch.pixels), self.recipe.seed, step, 1)

    def patches(self, pixels: Tensor) -> int:
        rows, columns = self.model.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return rows * columns

    def losses(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        """Per image: the mean loss over its corrupted patches; an image counts by its fraction of correct patches."""
        with autocast():
            logits = module(pixels, targets)
        colors = self.corrupted_colors(pixels, targets)  # (B, M)
        losses = F.cross_entropy(logits.float().transpose(1, 2), colors, reduction="none")
        return losses.mean(dim=1), (logits.detach().argmax(dim=-1) == colors).float().mean(dim=1).sum()

    def corrupted_colors(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """The colors of the corrupted patches, (B, M)."""
        colors = colors_of(pixels, self.model.config.patch_size, self.model.meta.preprocess)
        return colors[corruption_of(draws).chosen].view(len(pixels), -1)

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], images: int, processes: Processes, dtype: torch.dtype | None
    ) -> ColorMeasures:
        """The metrics over all validation images, which are corrupted in the same way each time."""
        tally = ColorTally(shown=set(np.linspace(0, images - 1, EXAMPLES).astype(int).tolist()))
        count = partial(self.count, model, device=processes.device, dtype=dtype, tally=tally)
        count_all(model, batches, count, all_ranks=processes.is_distributed)
        return tally.measures(processes)

    def count(
        self, model: nn.Module, batch: Batch, *, device: torch.device, dtype: torch.dtype | None, tally: ColorTally
    ) -> tuple[Tensor, ...]:
        """Add a batch to the tally; returns the model inputs of one image, for a process that has run out of them."""
        draws = draws_for(batch.indices.tolist(), self.patches(batch.pixels), EVALUATION_SEED)
        pixels, moved = batch.pixels.to(device), draws.to(device)
        with autocast(device, dtype):
            logits = model(pixels, moved).float()
        colors, predicted = self.corrupted_colors(pixels, moved), logits.argmax(dim=-1)
        loss = F.cross_entropy(logits.transpose(1, 2), colors, reduction="none").double().sum().item()
        tally.sums += torch.tensor([len(batch), colors.numel(), loss, (predicted == colors).sum().item()])
        for row, index in enumerate(batch.indices.tolist()):
            if index in tally.shown:
                arrays = (tensor[row].cpu().numpy() for tensor in (batch.pixels, draws, predicted))
                tally.examples.append(MaskedExample(index, *arrays))
        return pixels[:1], moved[:1]


# B images, N patches of P x P pixels, M of them corrupted, D width

MASKED, EXCHANGED = 0.8, 0.1
"""Fractions of the corrupted patches replaced by the mask embedding and by another patch; the others stay."""
LEVELS = 8
"""Levels per channel of a mean color: three bits."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """The corruption of some images, which all have the same number of corrupted patches."""

    chosen: Tensor
    """bool (B, N): the corrupted patches, whose colors are predicted."""
    masked: Tensor
    """bool (B, N): those replaced by the mask embedding."""
    taken_from: Tensor
    """int64 (B, N): index of the patch in each position, mostly its own."""


def draws_for(indices: Iterable[int], patches: int, seed: int, *keys: int) -> Tensor:
    """Random numbers (B, 3, N) from 0 to 1 that depend only on each image's index, the seed and `keys`."""
    rows = [generator_for(seed, *keys, int(i)).random((3, patches), np.float32) for i in indices]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 3, patches)


def corruption_of(draws: Tensor) -> Corruption:
    """Half of the patches corrupted, rounded down: 80% masked, 10% another patch of the image, 10% unchanged."""
    order, kind, offset = draws.unbind(dim=1)
    N = order.shape[1]
    chosen = order.argsort(dim=1, stable=True).argsort(dim=1) < N // 2
    exchanged = chosen & (kind >= MASKED) & (kind < MASKED + EXCHANGED)
    index = torch.arange(N, device=draws.device).expand_as(order)
    step = 1 + (offset * (N - 1)).long().clamp(max=N - 2)
    return Corruption(chosen, chosen & (kind < MASKED), torch.where(exchanged, (index + step) % N, index))


def corrupt(patches: Tensor, mask: Tensor, corruption: Corruption) -> Tensor:
    """Patches (B, N, D) after the corruption; `mask` broadcasts to them."""
    taken = patches.gather(1, corruption.taken_from[..., None].expand_as(patches))
    return torch.where(corruption.masked[..., None], mask.to(patches.dtype), taken)


def patchify(pixels: Tensor, side: int) -> Tensor:
    """Pixels (B, C, H, W) -> the pixels of each patch (B, N, C, P, P)."""
    B, C, height, width = pixels.shape
    parts = pixels.reshape(B, C, height // side, side, width // side, side)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C, side, side)


def levels_of(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Normalized pixels as whole levels from 0 to 255, still float."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return ((pixels.float() * std + mean) * 255).round().clamp(0, 255)


def colors_of(pixels: Tensor, side: int, preprocess: Preprocess) -> Tensor:
    """The mean color of each patch as a class, int64 (B, N): three bits per channel, the first channel highest."""
    means = patchify(levels_of(pixels, preprocess), side).mean(dim=(-2, -1))  # (B, N, C)
    bits = (means * LEVELS / 256).floor().long()
    powers = torch.tensor([LEVELS**power for power in reversed(range(bits.shape[-1]))], device=pixels.device)
    return (bits * powers).sum(dim=-1)


def shown_color(color: int, channels: int) -> tuple[int, ...]:
    """The levels at the center of a color class."""
    bits = [color // LEVELS**power % LEVELS for power in reversed(range(channels))]
    return tuple(round((bit + 0.5) * 256 / LEVELS) for bit in bits)

"""Masked-patch pre-training (Section 4.6): a ViT that predicts the colors or pixels of masked patches."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.loader import Batch
from vitruvian.data.order import generator_for
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.metrics import autocast, run_batches
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.objective import Objective
from vitruvian.training.recipe import MaskedTarget, Recipe

# B images, N patches of P x P pixels, M of them corrupted, D width, K colors, S x S cells of a patch

EXAMPLES = 12  # validation images whose predicted colors the report shows
MASK_LEVEL = 128  # gray, for their masked patches
EVALUATION_SEED = 0  # seed for corrupting validation images, which depends on the image alone

Pixels = NDArray[np.uint8]


class MaskedViT(ViT):
    """A ViT with a mask embedding and a predictor of colors or pixels in place of the head; neither is saved."""

    own_names = ("mask_embedding", "colors.weight", "colors.bias")  # parameters that are not part of the saved model

    def __init__(self, config: ViTConfig, target: MaskedTarget = "mean_color", mask_ratio: float = 0.5) -> None:
        super().__init__(config)
        self.cells, self.mask_ratio = CELLS[target], mask_ratio
        self.mask_embedding = nn.Parameter(torch.empty(1, 1, config.width))
        C = config.in_channels
        outputs = self.cells**2 * LEVELS**C if self.cells else config.patch_size**2 * C
        self.colors = nn.Linear(config.width, outputs)

    def forward(self, pixels: Tensor, draws: Tensor | None = None) -> Tensor:
        """Outputs (B, M, S * S * K or C * P * P) for the patches that `draws` (B, 3, N) corrupt, in patch order."""
        assert draws is not None
        self.check(pixels)
        corruption = corruption_of(draws, self.mask_ratio)
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        patches = corrupt(self.embed.patches(pixels), self.mask_embedding, corruption)
        tokens = self.forward_blocks(self.embed.with_positions(patches, grid))[:, self.config.prefix_tokens :]
        if self.config.norm_after_pool:
            tokens = self.norm(tokens)
        outputs: Tensor = self.colors(tokens[corruption.chosen])
        return outputs.view(len(pixels), -1, outputs.shape[-1]).clone()  # FSDP loses its hook on a view

    @classmethod
    def around(cls, model: Model, recipe: Recipe) -> "MaskedViT":
        """A copy of a ViT for masked-patch pre-training; ConfigError if its architecture cannot be trained that way."""
        problem = ""
        if not isinstance(model, ViT):
            problem = "a ResNet has no patches"
        elif model.config.stem is not None:
            problem = "the stem of a hybrid mixes neighboring patches"
        elif model.config.pool == "map":
            problem = "attention pooling would not be trained; set architecture.pool='token' or 'mean'"
        elif model.config.representation_size:
            problem = "the pre-logits layer would not be trained; set architecture.representation_size=0"
        elif corrupted_patches(math.prod(model.config.grid), recipe.mask_ratio) < 1:
            patches = math.prod(model.config.grid)
            problem = f"mask_ratio={recipe.mask_ratio:g} of {patches} patches is less than one patch"
        elif model.config.patch_size < CELLS[recipe.masked_target]:
            problem = f"masked_target={recipe.masked_target!r} needs patches of at least 4 x 4 pixels"
        if problem or not isinstance(model, ViT):
            raise ConfigError(f"objective='masked' is for plain Vision Transformers: {problem}")
        with torch.random.fork_rng([]):  # PyTorch initializes the layers first, with the global generator
            masked = cls(model.config, recipe.masked_target, recipe.mask_ratio)
        missing, unexpected = masked.load_state_dict(model.state_dict(), strict=False)
        assert set(missing) == set(cls.own_names)
        assert not unexpected
        generator = torch.Generator().manual_seed(recipe.seed)
        with torch.no_grad():
            nn.init.normal_(masked.mask_embedding, std=0.02, generator=generator)
            nn.init.zeros_(masked.colors.weight)
            nn.init.zeros_(masked.colors.bias)
        masked.meta = model.meta
        return masked


@dataclass(frozen=True, slots=True)
class MaskedExample:
    """A validation image for the report, as uint8 (rows, columns, 3), or (rows, columns) if gray."""

    index: int
    image: Pixels
    seen: Pixels  # what the model gets
    predicted: Pixels  # with the predicted colors of the corrupted patches


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorMeasures:
    """Metrics over the corrupted patches of validation images."""

    count: int  # number of images
    patches: int  # number of corrupted patches, including those left unchanged
    loss: float  # mean cross-entropy of the colors, or mean squared error of the pixels
    top1: float  # percent of colors; if pixels are predicted, their mean color counts
    examples: tuple[MaskedExample, ...] = ()

    def scalars(self) -> dict[str, float]:
        return {"count": self.count, "patches": self.patches, "loss": self.loss, "top1": self.top1}


class Colors(Objective):
    """Predict each corrupted patch: its mean color, 4 x 4 colors, or its pixels (recipe setting `masked_target`)."""

    model: MaskedViT

    def targets(self, batch: Batch, step: int) -> Tensor:
        """The random draws of each image; they depend on the seed, the step and the image, not on the process."""
        return draws_for(batch.indices.tolist(), self.patches(batch.pixels), self.recipe.seed, step, 1)

    def patches(self, pixels: Tensor) -> int:
        rows, columns = self.model.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return rows * columns

    def losses(self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Per image: the mean loss over its corrupted patches; an image counts by its fraction of correct patches."""
        losses, correct, _ = self.patch_losses(module, pixels, targets)
        return losses.mean(dim=1), correct.mean(dim=1).sum()

    def patch_losses(self, module: nn.Module, pixels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each corrupted patch: the loss and the fraction of correct colors, (B, M), and the predicted levels."""
        with autocast(self.device, self.dtype):
            outputs = module(pixels, draws).float()
        B, M, _ = outputs.shape
        P, C, preprocess = self.model.config.patch_size, pixels.shape[1], self.model.meta.preprocess
        chosen = corruption_of(draws, self.model.mask_ratio).chosen
        S = self.model.cells
        colors = colors_of(pixels, P, preprocess, S or 1)[chosen].view(B, M, -1)  # (B, M, S * S)
        if S:
            logits = outputs.view(B, M, S * S, -1)
            predicted = logits.detach().argmax(dim=-1)
            losses = F.cross_entropy(logits.flatten(0, 2), colors.flatten(), reduction="none").view(colors.shape)
            levels = color_levels(predicted, C).transpose(2, 3).reshape(B, M, C, S, S)
        else:
            losses = (outputs - patchify(pixels.float(), P)[chosen].view(B, M, -1)).square()
            levels = levels_of(outputs.detach().view(B, M, C, P, P), preprocess)
            predicted = color_classes(levels.mean(dim=(-2, -1)))[..., None]
        return losses.mean(dim=2), (predicted == colors).float().mean(dim=2), levels.byte()

    def evaluate(self, batches: Iterable[Batch], images: int, *, all_ranks: bool) -> ColorMeasures:
        """The metrics over all validation images, which are corrupted in the same way each time."""
        shown = set(np.linspace(0, images - 1, EXAMPLES).astype(int).tolist())

        def run(batch: Batch) -> tuple[tuple[list[float], list[MaskedExample]], tuple[Tensor, ...]]:
            draws = draws_for(batch.indices.tolist(), self.patches(batch.pixels), EVALUATION_SEED)
            pixels, moved = batch.pixels.to(self.device), draws.to(self.device)
            losses, correct, predicted = self.patch_losses(self.model, pixels, moved)
            sums = [len(batch), losses.numel(), losses.double().sum().item(), correct.double().sum().item()]
            corruption, examples = corruption_of(draws, self.model.mask_ratio), []
            for row, index in enumerate(batch.indices.tolist()):
                if index in shown:
                    drawn = batch.pixels[row : row + 1], corruption.row(row), predicted[row].cpu()
                    examples.append(
                        draw_example(index, *drawn, self.model.meta.preprocess, self.model.config.patch_size)
                    )
            return (sums, examples), (pixels[:1], moved[:1])

        results = run_batches(self.model, batches, run, all_ranks=all_ranks)
        if not results:
            raise DataError("no validation image to evaluate the model on")
        count_images, patches, loss, correct = map(sum, zip(*(sums for sums, _ in results)))
        examples = [example for _, examples in results for example in examples]
        return ColorMeasures(
            count=int(count_images),
            patches=int(patches),
            loss=loss / patches,
            top1=100 * correct / patches,
            examples=tuple(sorted(examples, key=lambda example: example.index)),
        )


MASKED, EXCHANGED = 0.8, 0.1
"""Fractions of the corrupted patches replaced by the mask embedding and by another patch; the others stay."""
LEVELS = 8  # levels per channel of a color: three bits
CELLS: dict[MaskedTarget, int] = {"mean_color": 1, "colors_4x4": 4, "pixels": 0}
"""Cells per side of a patch whose mean colors are predicted; 0 for pixels, by regression."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """The corruption of some images, which all have the same number of corrupted patches."""

    chosen: Tensor  # bool (B, N): the corrupted patches, whose colors are predicted
    masked: Tensor  # bool (B, N): those replaced by the mask embedding
    taken_from: Tensor  # int64 (B, N): index of the patch in each position, mostly its own

    def row(self, row: int) -> "Corruption":
        """The corruption of one image, without the first dimension."""
        return Corruption(self.chosen[row], self.masked[row], self.taken_from[row])


def draws_for(indices: Iterable[int], patches: int, seed: int, *keys: int) -> Tensor:
    """Random numbers (B, 3, N) from 0 to 1 that depend only on each image's index, the seed and `keys`."""
    rows = [generator_for(seed, *keys, int(i)).random((3, patches), np.float32) for i in indices]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 3, patches)


def corrupted_patches(patches: int, mask_ratio: float) -> int:
    """The number of corrupted patches, rounded down; 0.29 of 100 is 29, although the product of floats is less."""
    return int(patches * mask_ratio + 1e-9)


def corruption_of(draws: Tensor, mask_ratio: float = 0.5) -> Corruption:
    """A fraction of the patches corrupted, rounded down: 80% masked, 10% another patch of the image, 10% unchanged."""
    order, kind, offset = draws.unbind(dim=1)
    N = order.shape[1]
    chosen = order.argsort(dim=1, stable=True).argsort(dim=1) < corrupted_patches(N, mask_ratio)
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


def draw_example(
    index: int, pixels: Tensor, corruption: Corruption, predicted: Tensor, preprocess: Preprocess, side: int
) -> MaskedExample:
    """An example from normalized pixels (1, C, H, W) and the predicted levels (M, C, S, S) of its corrupted patches."""
    patches = patchify(levels_of(pixels, preprocess), side)[0]  # (N, C, P, P)
    seen, colors = patches[corruption.taken_from], patches.clone()
    seen[corruption.masked] = MASK_LEVEL
    colors[corruption.chosen] = F.interpolate(predicted.float(), side)  # the predicted cell of each pixel

    def join(parts: Tensor) -> Pixels:
        columns = parts.permute(1, 2, 3, 0).reshape(-1, pixels.shape[-2] // side, pixels.shape[-1] // side)
        return F.pixel_shuffle(columns, side).permute(1, 2, 0).squeeze(2).byte().numpy()

    return MaskedExample(index, join(patches), join(seen), join(colors))


def colors_of(pixels: Tensor, side: int, preprocess: Preprocess, cells: int = 1) -> Tensor:
    """The mean colors of the cells of each patch as classes, int64 (B, N, cells * cells)."""
    patches = patchify(levels_of(pixels, preprocess), side)  # (B, N, C, P, P)
    B, N, C = patches.shape[:3]
    means = F.adaptive_avg_pool2d(patches.flatten(0, 1), cells).view(B, N, C, -1)
    return color_classes(means.transpose(2, 3))


def color_classes(levels: Tensor) -> Tensor:
    """Levels (..., C) from 0 to 255 as classes: three bits per channel, the first channel highest."""
    bits = (levels * LEVELS / 256).floor().long()
    powers = torch.tensor([LEVELS**power for power in reversed(range(levels.shape[-1]))], device=levels.device)
    return (bits * powers).sum(dim=-1)


def color_levels(classes: Tensor, channels: int) -> Tensor:
    """The levels (..., C) at the centers of color classes (...)."""
    powers = torch.tensor([LEVELS**power for power in reversed(range(channels))], device=classes.device)
    return ((classes[..., None] // powers % LEVELS + 0.5) * (256 / LEVELS)).round()

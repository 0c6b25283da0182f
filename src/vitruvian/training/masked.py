"""Masked-patch pre-training (Section 4.6): a ViT that predicts the mean colors of patches that it does not see."""

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
from vitruvian.evaluation.measuring.metrics import autocast as computing_in
from vitruvian.evaluation.measuring.metrics import count_all, from_all_ranks
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.objective import Autocast, Objective, Place
from vitruvian.training.recipe import Recipe

# B images, N patches, M of them corrupted, D width, K colors

EXAMPLES = 12
"""Held-out images whose predicted colors the report shows."""
EVALUATION_SEED = 0
"""Of the corruption of held-out images, which depends on the image alone."""


class MaskedViT(ViT):
    """A ViT without a head, with a mask embedding and a layer that names colors, neither of which is kept."""

    own_names = ("mask_embedding", "colors.weight", "colors.bias")
    """Parameters that the pre-trained model is saved without."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.mask_embedding = nn.Parameter(torch.empty(1, 1, config.width))
        self.colors = nn.Linear(config.width, LEVELS**config.in_channels)

    def forward(self, pixels: Tensor, draws: Tensor | None = None) -> Tensor:
        """Logits (B, M, K) of the patches that `draws` (B, 3, N) corrupt, in the order of their places."""
        assert draws is not None
        self.check(pixels)
        corruption = corruption_of(draws)
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        seen = corrupted(self.embed.patches(pixels), self.mask_embedding, corruption)
        tokens = self.forward_blocks(self.embed.with_positions(seen, grid))[:, self.config.prefix_tokens :]
        if self.config.norm_after_pool:
            tokens = self.norm(tokens)
        logits: Tensor = self.colors(tokens[corruption.chosen])  # (B * M, K)
        return logits.view(len(pixels), -1, logits.shape[-1]).clone()  # FSDP loses its hook on a view

    @classmethod
    def around(cls, model: Model, seed: int) -> MaskedViT:
        """The same weights, ready for masked-patch pre-training; settings that cannot learn so are refused."""
        check_fit(model)
        assert isinstance(model, ViT)
        made = cls(model.config)
        missing, unexpected = made.load_state_dict(model.state_dict(), strict=False)
        assert set(missing) == set(cls.own_names)
        assert not unexpected
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            nn.init.normal_(made.mask_embedding, std=0.02, generator=generator)
            nn.init.zeros_(made.colors.weight)
            nn.init.zeros_(made.colors.bias)
        made.meta = model.meta
        return made


def check_fit(model: Model) -> None:
    """ConfigError where a model cannot learn from masked patches."""
    wrong = ""
    if not isinstance(model, ViT):
        wrong = "a ResNet has no patches"
    elif model.config.stem is not None:
        wrong = "the stem of a hybrid sees across patches"
    elif model.config.pool == "map":
        wrong = "attention pooling would not learn; set architecture.pool='token' or 'mean'"
    elif model.config.representation_size:
        wrong = "the pre-logits layer would not learn; set architecture.representation_size=0"
    elif model.config.grid[0] * model.config.grid[1] < 2:
        wrong = "one patch cannot be told from others"
    if wrong:
        raise ConfigError(f"objective='masked' is for plain Vision Transformers: {wrong}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A held-out image as the model saw it, for the report."""

    index: int
    pixels: NDArray[np.float32]
    """Normalized, (C, H, W)."""
    draws: NDArray[np.float32]
    """(3, N)"""
    predicted: NDArray[np.int64]
    """(M,) colors of the corrupted patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorMeasures:
    """What was measured over the corrupted patches of held-out images."""

    count: int
    """Images."""
    patches: int
    """Corrupted ones, those kept as they are among them."""
    loss: float
    """Mean cross-entropy."""
    top1: float
    """In percent."""
    examples: tuple[Example, ...] = ()

    def scalars(self) -> dict[str, float]:
        return {"count": self.count, "patches": self.patches, "loss": self.loss, "top1": self.top1}


@dataclass(kw_only=True, slots=True)
class ColorTally:
    """Counts that grow batch by batch, and the examples that are kept."""

    shown: set[int]
    """Images that become examples."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    """Images, patches, their loss and right answers."""
    examples: list[Example] = field(default_factory=list)

    def measures(self, place: Place) -> ColorMeasures:
        """The measures from what was counted here, and with `all_ranks` in all processes."""
        sums, examples = self.sums, self.examples
        if place.all_ranks:
            sums, examples = from_all_ranks(sums, examples, place.device)
        images, patches, lost, right = sums.tolist()
        if not patches:
            raise DataError("there is not one example to measure the model on")
        return ColorMeasures(
            count=int(images),
            patches=int(patches),
            loss=lost / patches,
            top1=100 * right / patches,
            examples=tuple(sorted(examples, key=lambda example: example.index)),
        )


@dataclass(frozen=True, slots=True)
class Colors(Objective):
    """The mean color of each corrupted patch."""

    recipe: Recipe
    model: MaskedViT
    """Tells the patches and the range of the pixels; any wrapper around it answers."""

    def targets(self, batch: Batch, step: int) -> Tensor:
        """The draws of each image: they depend on the seed, the step and the image, not on the process."""
        return draws_for(batch.indices.tolist(), self.patches(batch.pixels), self.recipe.seed, step, 1)

    def patches(self, pixels: Tensor) -> int:
        rows, columns = self.model.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return rows * columns

    def judged(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, answers: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        """An image's loss is the mean over its corrupted patches, and its answers count as their share."""
        with autocast():
            logits = module(pixels, targets)
        wanted = self.wanted(pixels, targets)  # (B, M)
        each = F.cross_entropy(logits.float().transpose(1, 2), wanted, reduction="none")
        return each.mean(dim=1), (logits.detach().argmax(dim=-1) == wanted).float().mean(dim=1).sum()

    def wanted(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """The colors of the corrupted patches, (B, M)."""
        colors = colors_of(pixels, self.model.config.patch_size, self.model.meta.preprocess)
        return colors[corruption_of(draws).chosen].view(len(pixels), -1)

    def measured(self, model: nn.Module, batches: Iterable[Batch], images: int, place: Place) -> ColorMeasures:
        """Every held-out image, with the same corruption each time."""
        tally = ColorTally(shown=set(np.linspace(0, images - 1, EXAMPLES).astype(int).tolist()))
        count_all(model, batches, partial(self.count, model, place=place, tally=tally), all_ranks=place.all_ranks)
        return tally.measures(place)

    def count(self, model: nn.Module, batch: Batch, *, place: Place, tally: ColorTally) -> tuple[Tensor, ...]:
        """Add a batch to the tally; one image and its draws, to call again with."""
        draws = draws_for(batch.indices.tolist(), self.patches(batch.pixels), EVALUATION_SEED)
        pixels, moved = batch.pixels.to(place.device), draws.to(place.device)
        with computing_in(place.device, place.dtype):
            logits = model(pixels, moved).float()
        wanted, predicted = self.wanted(pixels, moved), logits.argmax(dim=-1)
        lost = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").double().sum().item()
        tally.sums += torch.tensor([len(batch), wanted.numel(), lost, (predicted == wanted).sum().item()])
        for row, index in enumerate(batch.indices.tolist()):
            if index in tally.shown:
                parts = (batch.pixels[row], draws[row], predicted[row])
                seen, drawn, said = (part.cpu().numpy() for part in parts)
                tally.examples.append(Example(index=index, pixels=seen, draws=drawn, predicted=said))
        return pixels[:1], moved[:1]


# B images, N patches of P x P pixels, M of them corrupted, D width

MASKED, EXCHANGED = 0.8, 0.1
"""Of the corrupted patches, the shares that become the mask embedding and another patch; the others stay."""
LEVELS = 8
"""Of each channel of a mean color: three bits."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """What becomes of each patch of some images; all have equally many corrupted ones."""

    chosen: Tensor
    """bool (B, N): the corrupted patches, whose colors are asked for."""
    masked: Tensor
    """bool (B, N): those that become the mask embedding."""
    taken_from: Tensor
    """int64 (B, N): the number of the patch that stands in each place, mostly its own."""


def draws_for(indices: Iterable[int], patches: int, seed: int, *numbers: int) -> Tensor:
    """Random numbers (B, 3, N) from 0 to 1 that depend on each image's number, the seed and `numbers` alone."""
    rows = [generator_for(seed, *numbers, int(i)).random((3, patches), np.float32) for i in indices]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 3, patches)


def corruption_of(draws: Tensor) -> Corruption:
    """Half of the patches corrupted, rounded down: 80% masked, 10% another patch of the image, 10% as they are."""
    order, kind, other = draws.unbind(dim=1)
    N = order.shape[1]
    chosen = order.argsort(dim=1, stable=True).argsort(dim=1) < N // 2
    exchanged = chosen & (kind >= MASKED) & (kind < MASKED + EXCHANGED)
    own = torch.arange(N, device=draws.device).expand_as(order)
    step = 1 + (other * (N - 1)).long().clamp(max=N - 2)
    return Corruption(chosen, chosen & (kind < MASKED), torch.where(exchanged, (own + step) % N, own))


def corrupted(patches: Tensor, mask: Tensor, corruption: Corruption) -> Tensor:
    """Patches (B, N, D) after the corruption; `mask` broadcasts to them."""
    taken = patches.gather(1, corruption.taken_from[..., None].expand_as(patches))
    return torch.where(corruption.masked[..., None], mask.to(patches.dtype), taken)


def cut(pixels: Tensor, side: int) -> Tensor:
    """Pixels (B, C, H, W) -> the pixels of each patch (B, N, C, P, P)."""
    B, C, height, width = pixels.shape
    parts = pixels.reshape(B, C, height // side, side, width // side, side)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C, side, side)


def levels_of(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Normalized pixels as whole levels from 0 to 255, still float."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return ((pixels.float() * std + mean) * 255).round().clamp(0, 255)


def colors_of(pixels: Tensor, side: int, preprocess: Preprocess) -> Tensor:
    """The mean color of each patch as a class, int64 (B, N): three bits a channel, the first channel highest."""
    means = cut(levels_of(pixels, preprocess), side).mean(dim=(-2, -1))  # (B, N, C)
    bits = (means * LEVELS / 256).floor().long()
    places = torch.tensor([LEVELS**power for power in reversed(range(bits.shape[-1]))], device=pixels.device)
    return (bits * places).sum(dim=-1)


def shown_color(color: int, channels: int) -> tuple[int, ...]:
    """The levels in the middle of a class of colors."""
    bits = [color // LEVELS**power % LEVELS for power in reversed(range(channels))]
    return tuple(round((bit + 0.5) * 256 / LEVELS) for bit in bits)

"""A mean of the weights over the steps, which is evaluated and used in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitruvian.training.optimizer import learning
from vitruvian.training.recipe import AverageName, Recipe


class Average:
    """The mean of the weights that learn; `polyak` counts all steps from `start` on alike."""

    def __init__(self, model: nn.Module, kind: AverageName, *, decay: float, start: int) -> None:
        self.kind, self.decay, self.start = kind, decay, start
        self.parameters = dict(learning(model))
        self.means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def update(self, step: int) -> None:
        """Take in the weights after step 0, 1, ..."""
        share = self.share(step)
        with torch.no_grad():
            means, weights = [list(map(local, side.values())) for side in (self.means, self.parameters)]
            torch._foreach_lerp_(means, weights, share)

    def share(self, step: int) -> float:
        """How much the new weights count; they replace the mean as long as it has not begun."""
        if self.kind == "polyak":
            return 1.0 if step <= self.start else 1 / (step - self.start + 1)
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the mean as its weights; afterwards it has its own again, bit for bit."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                mean, weight = local(self.means[name]), local(parameter)
                kept = weight.clone()
                weight.copy_(mean)
                mean.copy_(kept)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    from torch.distributed.tensor import DTensor

    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def average_for(model: nn.Module, recipe: Recipe, steps: int) -> Average | None:
    if recipe.average == "none":
        return None
    return Average(model, recipe.average, decay=recipe.ema_decay, start=round(recipe.polyak_start * steps))

"""The optimizer of a run: which parameters learn, how fast, which decay; and the mean of the weights (EMA, Polyak)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.muon import Muon

if TYPE_CHECKING:
    from vitruvian.training.recipe import AverageName, Recipe

Groups = list[dict[str, Any]]
"""Parameters with their `weight_decay` and `lr_scale`."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """How an optimizer is made, and what it remembers."""

    make: Callable[[Groups, Recipe], torch.optim.Optimizer]
    moments: tuple[str, ...]
    """Tensors of its state that have the shape of their parameter."""
    matrix_moments: tuple[str, ...] = ()
    """The same of matrices, where it has a way of its own for them."""
    counts_steps: bool = True
    """Whether its state also has the number of steps, `step`."""


def adamw(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)


def adam(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=recipe.lr, betas=recipe.betas, fused=True)


def sgd(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)


def muon(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    return Muon(groups, recipe)


OPTIMIZERS = {
    "adam": OptimizerKind(adam, ("exp_avg", "exp_avg_sq")),
    "adamw": OptimizerKind(adamw, ("exp_avg", "exp_avg_sq")),
    "muon": OptimizerKind(muon, ("exp_avg", "exp_avg_sq"), matrix_moments=("momentum_buffer",)),
    "sgd": OptimizerKind(sgd, ("momentum_buffer",), counts_steps=False),
}
"""By the name that a recipe has for them."""


FUSED = {"qkv": 3, "key_value": 2}
"""Layers whose weight is several projections, and how many."""


def freeze(model: Model, recipe: Recipe) -> None:
    """Stop the parameters from learning that the recipe names, and those of the lower layers that it freezes."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError("parameters to freeze", pattern, names, see="(* stands for anything)")
    count = layers_of(model)
    lower = round(recipe.freeze_layers * count)
    for name, parameter in model.named_parameters():
        low = lower and layers_above(model, name) > count - lower
        if low or any(fnmatchcase(name, pattern) for pattern in recipe.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        shown = f"freeze={list(recipe.freeze)} with freeze_layers={recipe.freeze_layers:g}"
        raise ConfigError(f"{shown} leaves nothing that learns")


def learning(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that learn, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def optimizer_for(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer, its parameters in groups of one decay and one `lr_scale`, with their number of `matrices`."""
    kind = OPTIMIZERS[recipe.optimizer]
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in learning(model):
        decays = recipe.weight_decay_on == "all" or is_kernel(name, parameter)
        matrices = hidden_matrices(name, parameter) if kind.matrix_moments else 0
        key = (decay_of(recipe) if decays else 0.0, recipe.layer_decay ** layers_above(model, name), matrices)
        groups.setdefault(key, []).append(parameter)
    rows: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale, "matrices": matrices}
        for (decay, scale, matrices), parameters in groups.items()
    ]
    return kind.make(rows, recipe)


def is_kernel(name: str, parameter: Tensor) -> bool:
    """The matrix of a dense layer or a convolution: no bias, norm, position or token."""
    return name.endswith(".weight") and parameter.dim() >= 2


def hidden_matrices(name: str, parameter: Tensor) -> int:
    """How many matrices between hidden layers a parameter holds: fused projections are several, a head is none."""
    if not is_kernel(name, parameter) or name.startswith(("head.", "head_dist.")):
        return 0
    return FUSED.get(name.split(".")[-2], 1)


def decay_of(recipe: Recipe) -> float:
    """PyTorch's weight decay, which it multiplies by the learning rate."""
    return recipe.weight_decay / recipe.lr if recipe.decouple_lr else recipe.weight_decay


def layers_above(model: Model, name: str) -> int:
    """Layers between a parameter and the head: 0 for the head, one more than all blocks for the embedding."""
    first, layer = ("embed.", r"blocks\.(\d+)\.") if isinstance(model, ViT) else ("root.", r"stages\.(\d+)\.")
    if name.startswith(first):
        return layers_of(model) + 1
    match = re.match(layer, name)
    return layers_of(model) - int(match.group(1)) if match else 0


def layers_of(model: Model) -> int:
    """Blocks of a ViT, stages of a ResNet."""
    return len(model.blocks) if isinstance(model, ViT) else len(model.stages)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, kind: str) -> dict[str, Tensor]:
    """What the optimizer remembers, by kind and name of the parameter, made of zeros where there is nothing yet."""
    found = {}
    matrices = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    for name, parameter in learning(model):
        state = optimizer.state[parameter]
        own = OPTIMIZERS[kind].matrix_moments if id(parameter) in matrices else OPTIMIZERS[kind].moments
        lost = set(state).difference(own, {"step"})
        assert not lost, f"{kind} also remembers {lost}, which no checkpoint would have"
        for moment in own:
            if state.get(moment) is None:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            found[f"{moment}.{name}"] = state[moment]
        if OPTIMIZERS[kind].counts_steps and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return found


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Updates so far; with float16 fewer than steps of the run, because overflowing ones are left out."""
    return max((int(state["step"].item()) for state in optimizer.state.values() if "step" in state), default=0)


def set_steps_taken(optimizer: torch.optim.Optimizer, count: int) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)


class Average:
    """The mean of the weights that learn and of the buffers; `polyak` counts all steps from `start` on alike."""

    def __init__(self, model: nn.Module, kind: AverageName, *, decay: float, start: int) -> None:
        self.kind, self.decay, self.start = kind, decay, start
        self.parameters: dict[str, Tensor] = dict(learning(model)) | dict(model.named_buffers())
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

"""The optimizer of a run: parameter groups, optimizers, learning-rate schedules, averaged weights (EMA, Polyak)."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.distributed import full_tensor
from vitruvian.training.recipe import CHOICES, Recipe

Groups = list[dict[str, Any]]  # parameters with their `weight_decay`, `lr_scale` and number of `matrices`

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5: they bring singular values between 0 and 1 to about 0.7 to 1.2 in few iterations."""
ITERATIONS = 4
MUON_SCALE = 0.2  # root mean square of Muon's update at lr 1, about that of AdamW
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
FUSED = {"qkv": 3, "key_value": 2}  # layers whose weight holds several projections, and how many


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """How an optimizer is built, and which state it has."""

    make: Callable[[Groups, Recipe], torch.optim.Optimizer]
    moments: tuple[str, ...]  # state tensors that have the shape of their parameter
    matrix_moments: tuple[str, ...] = ()
    """State tensors of matrix parameters, if the optimizer treats those differently (Muon)."""
    counts_steps: bool = True  # whether its state also has the number of steps, `step`


class Muon(torch.optim.AdamW):
    """Muon for groups with `matrices`, whose momentum is made orthogonal before it changes the weights; else AdamW.

    Jordan et al. 2024, with the scale of Liu et al. 2025 (arXiv:2502.16982), which makes updates as large as AdamW's,
    so that both share one learning rate. PyTorch's own Muon accepts only matrices and computes in bfloat16.
    """

    def __init__(self, groups: Groups, recipe: Recipe) -> None:
        super().__init__(groups, lr=recipe.lr, betas=recipe.betas)
        self.momentum = recipe.momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        from torch.distributed.tensor import DTensor, distribute_tensor

        for group in self.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is None:
                    continue
                grad, state = parameter.grad, self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
                nesterov = full_tensor(grad.lerp(momentum, self.momentum))
                matrices = nesterov.reshape(len(nesterov), -1).chunk(group["matrices"])
                scales = [MUON_SCALE * math.sqrt(max(part.shape)) for part in matrices]
                update = torch.cat([orthogonalize(part) * scale for part, scale in zip(matrices, scales)])
                update = update.view_as(nesterov)
                if isinstance(parameter, DTensor):  # the update is full, and equal in all processes
                    update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"])
                parameter.grad = None  # AdamW skips it
        return super().step(closure)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near 1, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


OPTIMIZERS = {
    "adam": OptimizerKind(lambda groups, r: torch.optim.Adam(groups, r.lr, r.betas, fused=True), ADAM_MOMENTS),
    "adamw": OptimizerKind(lambda groups, r: torch.optim.AdamW(groups, r.lr, r.betas, fused=True), ADAM_MOMENTS),
    "muon": OptimizerKind(Muon, ADAM_MOMENTS, matrix_moments=("momentum_buffer",)),
    "sgd": OptimizerKind(  # the fused SGD has no sharding strategy for DTensors
        lambda groups, r: torch.optim.SGD(groups, r.lr, r.momentum, fused=r.parallel == "ddp"),
        ("momentum_buffer",),
        counts_steps=False,
    ),
}
CHOICES["optimizer"] = OPTIMIZERS


def freeze(model: Model, recipe: Recipe) -> None:
    """Stop training the parameters that match `recipe.freeze`, and the lowest `recipe.freeze_layers` of the layers."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError(
                "parameters to freeze", pattern, names, see="(such as 'embed.*,blocks.*'; * matches anything)"
            )
    count = layers_of(model)
    lower = round(recipe.freeze_layers * count)
    for name, parameter in model.named_parameters():
        is_low = lower and layers_above(model, name) > count - lower
        if is_low or any(fnmatchcase(name, pattern) for pattern in recipe.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        settings = f"freeze={list(recipe.freeze)} with freeze_layers={recipe.freeze_layers:g}"
        raise ConfigError(f"{settings} leaves no parameter to train")


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that train, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def build_optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer, with one group for each weight decay, `lr_scale` and number of `matrices` per parameter."""
    kind = OPTIMIZERS[recipe.optimizer]
    # PyTorch multiplies the decay by the learning rate.
    weight_decay = recipe.weight_decay / recipe.lr if recipe.decouple_lr else recipe.weight_decay
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in trainable(model):
        # The weight of a dense layer or a convolution: not a bias, norm, position or token.
        is_kernel = name.endswith(".weight") and parameter.dim() >= 2
        decays = recipe.weight_decay_on == "all" or is_kernel
        is_hidden = is_kernel and not name.startswith(("head.", "head_dist."))
        matrices = FUSED.get(name.split(".")[-2], 1) if is_hidden and kind.matrix_moments else 0
        lr_scale = recipe.lora.lr_scale if ".lora_" in name else recipe.layer_decay ** layers_above(model, name)
        key = (weight_decay if decays else 0.0, lr_scale, matrices)
        groups.setdefault(key, []).append(parameter)
    names = ("weight_decay", "lr_scale", "matrices")
    rows: Groups = [{"params": parameters, **dict(zip(names, key))} for key, parameters in groups.items()]
    return kind.make(rows, recipe)


def layers_above(model: Model, name: str) -> int:
    """Layers between a parameter and the head: 0 for the head, one more than all blocks for the embedding."""
    first, layer = ("embed.", r"blocks\.(\d+)\.") if isinstance(model, ViT) else ("root.", r"stages\.(\d+)\.")
    if name.startswith(first):
        return layers_of(model) + 1
    match = re.match(layer, name)
    return layers_of(model) - int(match.group(1)) if match else 0


def layers_of(model: Model) -> int:
    """Number of blocks of a ViT, or of stages of a ResNet."""
    return len(model.blocks) if isinstance(model, ViT) else len(model.stages)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@torch.no_grad()
def sharpness_aware(model: nn.Module, backward: Callable[[], object], *, rho: float, alpha: float = 0.0) -> None:
    """Replace the gradients by those of sharpness-aware minimization (SAM), or of GSAM if `alpha` is positive.

    SAM takes the gradient at the worst point within the distance `rho`, which is one step up the gradient. GSAM also
    climbs, `alpha` times, along the part of the first gradient that is orthogonal to the second: that reduces the
    difference of the two losses and leaves the second one alone (Zhuang et al., arXiv:2203.08065).

    Args:
        model: The model, with gradients at its weights. Its weights and buffers are the same afterwards.
        backward: Computes the gradients of the same batch again.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    first = [p.grad for p in parameters if p.grad is not None]
    weights, buffers = [p.detach().clone() for p in parameters], [b.clone() for b in model.buffers()]
    scale = rho / (dot(first, first).sqrt() + 1e-12)
    for parameter, gradient in zip(parameters, first):
        parameter.add_(gradient * scale)
        parameter.grad = None
    with torch.enable_grad():
        backward()
    for tensor, before in zip([*parameters, *model.buffers()], [*weights, *buffers]):
        tensor.copy_(before)
    if alpha:
        second = [p.grad for p in parameters if p.grad is not None]
        share = dot(first, second) / (dot(second, second) + 1e-12)
        for gradient, other in zip(second, first):
            gradient.sub_(alpha * (other - share * gradient))


def dot(one: list[Tensor], two: list[Tensor]) -> Tensor:
    """The inner product of two lists of tensors, over the shards of all processes."""
    return torch.stack([full_tensor((a * b).sum()) for a, b in zip(one, two)]).sum()


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, kind: str) -> dict[str, Tensor]:
    """The optimizer's state by kind and name of the parameter; creates zeros where there is none yet."""
    tensors = {}
    matrices = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    for name, parameter in trainable(model):
        state = optimizer.state[parameter]
        keys = OPTIMIZERS[kind].matrix_moments if id(parameter) in matrices else OPTIMIZERS[kind].moments
        missing = set(state).difference(keys, {"step"})
        assert not missing, f"{kind} also has the state {missing}, which a checkpoint would not contain"
        for key in keys:
            if state.get(key) is None:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            tensors[f"{key}.{name}"] = state[key]
        if OPTIMIZERS[kind].counts_steps and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return tensors


class Schedule:
    """A learning rate that rises linearly from 0 during the warmup, then decays (or stays) until the last step."""

    def __init__(self, recipe: Recipe, steps: int) -> None:
        """The schedule of a run of `steps` steps."""
        self.recipe, self.steps, self.peak, self.end = recipe, steps, recipe.lr, recipe.min_lr
        self.warmup, self.cooldown = to_steps(recipe.warmup, steps), to_steps(recipe.cooldown, steps)
        if self.warmup + self.cooldown > steps:
            reason = f"warmup and cooldown of {self.warmup} and {self.cooldown} steps do not fit into"
            raise ConfigError(f"{reason} the {steps} steps of the run", hint="set warmup and cooldown")

    def lr_at(self, step: int) -> float:
        """The lr of step 0, 1, ... `steps` - 1."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        return SCHEDULES[self.recipe.schedule](self, step)

    def done(self, step: int) -> float:
        """The fraction of the steps after the warmup that are done."""
        return (step - self.warmup) / max(1, self.steps - self.warmup)

    def between(self, fraction: float) -> float:
        """The lr at a fraction of the way from `end` to `peak`."""
        return self.end + (self.peak - self.end) * fraction

    def cool_down(self, lr: float, step: int) -> float:
        """`lr`, or its linear decay to `end` once the cooldown has begun."""
        left = min(1.0, (self.steps - step) / self.cooldown) if self.cooldown else 1.0
        return self.end + (lr - self.end) * left if left < 1 else lr


SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda schedule, step: schedule.cool_down(schedule.peak, step),
    # Linear and cosine reach `end` at step `steps`, as in the paper's release.
    "linear": lambda schedule, step: schedule.between(1 - schedule.done(step)),
    "cosine": lambda schedule, step: schedule.between((1 + math.cos(math.pi * schedule.done(step))) / 2),
    # The reciprocal square root of the steps after the warmup.
    "rsqrt": lambda schedule, step: schedule.cool_down(
        schedule.peak / math.sqrt(1 + (step - schedule.warmup) / schedule.recipe.timescale), step
    ),
    # A tenth after each of `decay_at`, as in BiT's release.
    "step": lambda schedule, step: (
        schedule.peak / 10 ** sum(step > round(share * schedule.steps) for share in schedule.recipe.decay_at)
    ),
}
"""The lr of a step after the warmup."""
CHOICES["schedule"] = SCHEDULES


def to_steps(length: float, steps: int) -> int:
    """A number of steps; below 1, `length` is a fraction of `steps`."""
    return round(length) if length >= 1 else round(length * steps)


class Average:
    """The average of the trainable weights and the buffers: exponential, or equal from step `start` on (`polyak`)."""

    def __init__(self, model: nn.Module, kind: str, *, decay: float, start: int) -> None:
        self.kind, self.decay, self.start = kind, decay, start
        self.parameters: dict[str, Tensor] = dict(trainable(model)) | dict(model.named_buffers())
        self.means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def update(self, step: int) -> None:
        """Add the weights after step 0, 1, ..."""
        if self.kind == "polyak":  # the weights replace the average until it starts
            weight = 1.0 if step <= self.start else 1 / (step - self.start + 1)
        else:
            weight = 1 - min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            means, parameters = [list(map(local, side.values())) for side in (self.means, self.parameters)]
            torch._foreach_lerp_(means, parameters, weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the average; afterwards it has its own weights again, bit for bit."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                mean, weight = local(self.means[name]), local(parameter)
                copy = weight.clone()
                weight.copy_(mean)
                mean.copy_(copy)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor."""
    from torch.distributed.tensor import DTensor

    shard = tensor.detach()
    return shard.to_local() if isinstance(shard, DTensor) else shard

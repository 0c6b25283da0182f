"""Muon: momentum whose matrices are made orthogonal before they change the weights; AdamW for all that is no matrix.

Jordan et al. 2024, with the scale of Liu et al. 2025 (arXiv:2502.16982), which gives a step the size that AdamW's has,
so that both share one learning rate. PyTorch's own Muon takes matrices alone and computes in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitruvian.training.distributed import full_tensor

if TYPE_CHECKING:
    from vitruvian.training.recipe import Recipe

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: brings singular values between 0 and 1 to about 0.7 to 1.2, in few iterations."""
ITERATIONS = 4
SCALE = 0.2
"""Root mean square of a step at lr 1, as AdamW usually has it."""


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `matrices` are changed in Muon's way: each parameter is so many matrices."""

    def __init__(self, groups: list[dict[str, Any]], recipe: Recipe) -> None:
        super().__init__(groups, lr=recipe.lr, betas=recipe.betas)
        self.momentum = recipe.momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is not None:
                    self.change(parameter, group)
                    parameter.grad = None  # which AdamW passes over
        return super().step(closure)

    def change(self, parameter: Tensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
        wanted = full_tensor(grad.lerp(momentum, self.momentum))
        parts = wanted.reshape(len(wanted), -1).chunk(group["matrices"])
        change = torch.cat([orthogonal(part) * (SCALE * math.sqrt(max(part.shape))) for part in parts])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(spread(change.view_as(wanted), like=parameter), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near 1, by iterations of Newton and Schulz."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same in all processes, in parts as `like` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

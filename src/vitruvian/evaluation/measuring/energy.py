"""A head whose energy tells images of its classes from others: one linear term, added to all logits alike.

A term common to all logits changes no probability, and so no answer. It changes the energy, log(sum(exp(logits))),
which a threshold for "none of these" is compared with. It is linear, so it becomes part of the head, for every engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitruvian.errors import ConfigError

# N images, D features, K classes

L2 = 0.001
"""Regularization of the term, in units of the features' mean standard deviation."""


def shift_energy(head: nn.Linear, known: Tensor, unknown: Sequence[Tensor], *, l2: float = L2) -> None:
    """Add to all logits of a head what logistic regression finds between features (N, D) of its classes and of none.

    Each kind of `unknown` images counts alike, and all of them together as much as those of the classes.
    """
    if not len(known) or not unknown or not all(map(len, unknown)):
        raise ConfigError("the energy is fitted to images of the classes and of none, and one of these has no image")
    x = torch.cat([known, *unknown]).double()
    target = torch.cat([torch.ones(len(known)), torch.zeros(len(x) - len(known))]).double()
    weights = [torch.full((len(known),), 1 / len(known))]
    weights += [torch.full((len(some),), 1 / len(some) / len(unknown)) for some in unknown]
    weight = torch.cat(weights).double()
    mean, std = x[: len(known)].mean(dim=0), x[: len(known)].std(dim=0).mean()
    with torch.no_grad():
        energy = F.linear(x, head.weight.double(), head.bias.double()).logsumexp(dim=1)
    scale = energy[: len(known)].std().clamp(min=1e-6)
    term = fitted((x - mean) / std, energy / scale, target=target, weight=weight, l2=l2)
    added = scale * term[:-1] / std  # (D,)
    with torch.no_grad():
        head.weight.add_(added)
        head.bias.add_(scale * term[-1] - added @ mean)


def fitted(x: Tensor, energy: Tensor, *, target: Tensor, weight: Tensor, l2: float) -> Tensor:
    """What to add to the energy for the lowest weighted loss (D + 1,), its constant last."""
    term = torch.zeros(x.shape[1] + 1, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([term], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        answer = energy + x @ term[:-1] + term[-1]
        loss = F.binary_cross_entropy_with_logits(answer, target, weight, reduction="sum")
        loss = loss + l2 * term[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return term.detach()

"""Nearest neighbors among frozen features: cosine similarity, votes weighted by exp(similarity / 0.07) as in DINO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# n images to learn from, m others, D features, K classes

TEMPERATURE = 0.07
COUNTS = (10, 20, 50, 100, 200)
"""Numbers of neighbors that are tried."""
MOST_QUERIES = 4096
"""Images on which the number of neighbors is chosen, each asked about without itself."""
PIECE = 512

Labels = NDArray[np.int64]


def neighbor_predictions(
    train: tuple[NDArray[Any], Labels], test: NDArray[Any], *, classes: int, neighbors: int
) -> Labels:
    """Classes (m,) by the votes of the nearest `neighbors`, or of all where there are fewer."""
    known, labels = directions(train[0]), torch.from_numpy(train[1])
    count = min(neighbors, len(known))
    pieces = []
    for first in range(0, len(test), PIECE):
        near = (directions(test[first : first + PIECE]) @ known.T).topk(count)
        pieces.append(votes(near.values, labels[near.indices], classes))
    return np.concatenate([piece.numpy().argmax(axis=1) for piece in pieces])


def chosen_neighbors(
    train: tuple[NDArray[Any], Labels], *, classes: int, seed: int = 0, candidates: Sequence[int] = COUNTS
) -> tuple[int, dict[int, float]]:
    """The number of neighbors that names most images of `train` rightly by the others, of equal ones the smallest.

    Also the accuracy of each number, in percent. Of many images a random part is asked about.
    """
    known, labels = directions(train[0]), torch.from_numpy(train[1])
    counts = sorted({min(count, len(known) - 1) for count in candidates})
    asked = np.sort(np.random.default_rng(seed).permutation(len(known))[:MOST_QUERIES])
    right = dict.fromkeys(counts, 0)
    for first in range(0, len(asked), PIECE):
        numbers = torch.from_numpy(asked[first : first + PIECE])
        similar = known[numbers] @ known.T
        similar[torch.arange(len(numbers)), numbers] = -torch.inf  # an image is no neighbor of itself
        near = similar.topk(counts[-1])
        for count in counts:
            found = votes(near.values[:, :count], labels[near.indices[:, :count]], classes).numpy().argmax(axis=1)
            right[count] += int((found == train[1][numbers.numpy()]).sum())
    shares = {count: 100.0 * number / len(asked) for count, number in right.items()}
    return max(shares, key=lambda count: shares[count]), shares


def directions(features: NDArray[Any]) -> Tensor:
    """Features of length one, float32."""
    return F.normalize(torch.from_numpy(np.asarray(features, np.float32)), dim=1)


def votes(similarities: Tensor, labels: Tensor, classes: int) -> Tensor:  # (B, k), (B, k) -> (B, K)
    weights = (similarities.double() / TEMPERATURE).exp()
    return torch.zeros(len(labels), classes, dtype=torch.float64).scatter_add_(1, labels, weights)

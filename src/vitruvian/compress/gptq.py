"""Weights as small integers, rounded so that what a layer gives changes the least (GPTQ; Frantar et al., 2023).

One column of a weight after the other is rounded, and the columns that are still free make up for its error, as far as
the layer's inputs on calibration images let one channel stand in for another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvian.errors import ConversionError, argument

# D channels of a layer's input, O of its output

DAMPING = 0.01
"""Added to the diagonal of the moments, as a share of its mean: a few images do not decide about every direction."""
TOGETHER = 128
"""Columns whose errors reach the later ones in one product."""


def nearest(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers (O, D) of so many bits and their scales (O, 1), each weight rounded by itself."""
    most, scale = steps(weight, bits)
    return (weight / scale).round().clamp(-most, most).to(torch.int8), scale


def steps(weight: Tensor, bits: int) -> tuple[int, Tensor]:
    """The largest integer, and what one step is worth in each row (O, 1)."""
    most = 2 ** (bits - 1) - 1
    return most, weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most


def gptq(weight: Tensor, moments: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same for inputs with these second moments (D, D); channels with the largest are rounded first."""
    most, scale = steps(weight, bits)
    order = moments.diagonal().argsort(descending=True)
    free, unit = weight.double()[:, order], scale.double()
    # row j says how the columns after j make up for an error of one in column j
    spread = _spread(moments.double()[order][:, order])
    codes = torch.empty_like(free)
    for start in range(0, free.shape[1], TOGETHER):
        columns = range(start, min(start + TOGETHER, free.shape[1]))
        errors = torch.empty_like(free[:, start : columns.stop])
        for j in columns:
            codes[:, j] = (free[:, j] / unit[:, 0]).round().clamp(-most, most)
            errors[:, j - start] = (free[:, j] - codes[:, j] * unit[:, 0]) / spread[j, j]
            free[:, j : columns.stop] -= errors[:, j - start, None] * spread[j, j : columns.stop]
        free[:, columns.stop :] -= errors @ spread[start : columns.stop, columns.stop :]
    return codes[:, order.argsort()].to(torch.int8), scale


def _spread(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse (D, D); of moments that rounding has spoiled, with more damping."""
    mean = float(moments.diagonal().mean())
    unit = torch.eye(len(moments), dtype=moments.dtype) * (DAMPING * mean if mean > 0 else 1.0)
    for more in range(8):
        lower, failed = torch.linalg.cholesky_ex(moments + 10**more * unit)
        if not failed:
            spread: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return spread
    raise ConversionError(f"int8: what enters a layer is not finite on the images of {argument('calibrate')}")

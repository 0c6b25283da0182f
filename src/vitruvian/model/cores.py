"""Batched inference: images grouped by size, and on a CPU each core computes whole images."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def map_over_cores(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """`function(images)` without gradients, computed in pieces of whole images on all cores.

    Cores that share one operation wait for each other at its end, hundreds of times per forward pass,
    and evict each other's activations from the cache. Giving each core its own images avoids both;
    the results are those of a smaller batch. Uses `torch.get_num_threads()` cores; one core, one image
    and other devices call `function` directly.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(images) == 1 or images.device.type != "cpu":
        with torch.inference_mode():
            return function(images)
    pieces = even_pieces(images, threads)
    return torch.cat(list(_pool(threads).map(lambda piece: _run_single_threaded(function, piece), pieces)))


def map_over_shapes(function: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> Tensor:
    """Apply `function` to images (channels, rows, columns) of different sizes; results keep their order.

    Images of one size form a batch, so no image is padded and attention sees only its own patches.
    """
    indices_by_shape: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        indices_by_shape.setdefault(image.shape, []).append(index)
    groups = list(indices_by_shape.values())
    if len(groups) == 1:
        return function(torch.stack(list(images)))
    outputs = torch.cat([function(torch.stack([images[index] for index in group])) for group in groups])
    return outputs[torch.tensor([index for group in groups for index in group]).argsort()]


def even_pieces(images: Tensor, threads: int) -> list[Tensor]:
    """Images in pieces that keep `threads` cores busy to the end, each small enough for a core's cache."""
    rounds = -(-len(images) // (threads * IMAGES_PER_PIECE))
    return [piece for piece in images.tensor_split(threads * rounds) if len(piece)]


IMAGES_PER_PIECE = 4


def _run_single_threaded(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return function(images)


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # threads do not survive a fork
    if key not in _pools:
        pool = ThreadPoolExecutor(threads, "vitruvian-core", initializer=torch.set_num_threads, initargs=(1,))
        # Start every worker now: the initializer also lowers the count that later threads inherit. Each waits for
        # the others, as a pool starts no further thread while one is idle.
        every = threading.Barrier(threads)
        list(pool.map(lambda _: every.wait(), range(threads)))
        torch.set_num_threads(threads)
        _pools[key] = pool
    return _pools[key]

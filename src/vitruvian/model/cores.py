"""Inference in batches: of images of one size each, and on a CPU with each core taking whole images."""

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

    Cores that share one operation wait for each other at its end, some hundred times a forward pass,
    and push one another's activations out of the cache. Handing each core its own images avoids both;
    the numbers are those of a smaller batch. Uses `torch.get_num_threads()` cores; one core, one image
    and other devices go straight to `function`.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(images) == 1 or images.device.type != "cpu":
        with torch.inference_mode():
            return function(images)
    pieces = even_pieces(images, threads)
    return torch.cat(list(_pool(threads).map(lambda piece: _alone(function, piece), pieces)))


def map_over_shapes(function: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> Tensor:
    """`function` of images (channels, rows, columns) that may differ in size, in their order.

    Those of one size are a batch: no image is padded, and attention sees none but its own patches.
    """
    places: dict[torch.Size, list[int]] = {}
    for place, image in enumerate(images):
        places.setdefault(image.shape, []).append(place)
    if len(places) == 1:
        return function(torch.stack(list(images)))
    found = torch.cat([function(torch.stack([images[place] for place in same])) for same in places.values()])
    return found[torch.tensor([place for same in places.values() for place in same]).argsort()]


def even_pieces(images: Tensor, threads: int) -> list[Tensor]:
    """Images in pieces that keep `threads` cores busy to the end, each small enough for a core's cache."""
    rounds = -(-len(images) // (threads * IMAGES_A_PIECE))
    return [piece for piece in images.tensor_split(threads * rounds) if len(piece)]


IMAGES_A_PIECE = 4


def _alone(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
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

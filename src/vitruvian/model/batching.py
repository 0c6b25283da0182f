"""Batched inference: images grouped by size, and on a CPU each core computes whole images."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def map_over_cores(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """`function(images)` without gradients, computed in pieces of whole images on all cores.

    Cores that share one operation wait for each other at its end, hundreds of times per forward pass,
    and evict each other's activations from the cache. Giving each core its own images avoids both;
    the results are those of a smaller batch. Uses `torch.get_num_threads()` cores; one core, one image
    and other devices call `function` directly.
    """

    def run(piece: Tensor) -> Tensor:
        with torch.inference_mode():
            return function(piece)

    threads = torch.get_num_threads()
    if threads == 1 or len(images) == 1 or images.device.type != "cpu":
        return run(images)
    pool = single_threaded_pool(os.getpid(), threads)
    return torch.cat(list(pool.map(run, even_pieces(images, threads))))


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
    images_per_piece = 4
    rounds = -(-len(images) // (threads * images_per_piece))
    return [piece for piece in images.tensor_split(threads * rounds) if len(piece)]


@cache
def single_threaded_pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool whose threads use one core each; one pool per process, because threads do not survive a fork."""

    def use_one_core() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # otherwise the thread's first operation takes the count that is set below

    pool = ThreadPoolExecutor(threads, "vitruvian-core", initializer=use_one_core)
    # Start every worker now: the initializer also lowers the count that later threads inherit. Each waits for
    # the others, as a pool starts no further thread while one is idle.
    all_started = threading.Barrier(threads, timeout=60)  # a thread may fail to start
    list(pool.map(lambda _: all_started.wait(), range(threads)))
    torch.set_num_threads(threads)
    return pool

"""Which sample comes when: keyed permutations, orders and random streams that need no memory of their own."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

IndexArray = NDArray[np.int64]
KeyArray = NDArray[np.uint64]

ROUNDS = 4
"""Double rounds of the Feistel network."""

LEAST_BITS = 6
"""Of the network; over fewer bits some permutations of a few items come up more often than others."""


def digest(seed: int, *numbers: int, size: int, purpose: bytes) -> KeyArray:
    """`size` words of 64 bits that depend on all the numbers, on their count and on the purpose."""
    text = b"".join(int(number).to_bytes(16, "little", signed=True) for number in (seed, *numbers))
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * size, person=purpose).digest(), np.uint64)


def generator_for(seed: int, *numbers: int) -> np.random.Generator:
    """The random stream that belongs to these numbers alone, such as (seed, epoch, sample).

    Another count of numbers gives another stream, also where the additional ones are 0.
    """
    key = Key(digest(seed, *numbers, size=2, purpose=b"draw"))
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # NumPy's stub knows no such keys


class Key(np.random.bit_generator.ISeedSequence):
    """A key for Philox; in this form it costs no call for the system's entropy, which would go unused."""

    def __init__(self, words: KeyArray) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> KeyArray:
        return self.words


def permuted(position: ArrayLike, length: ArrayLike, seed: int, *numbers: int, stream: ArrayLike = 0) -> IndexArray:
    """Where each position goes in the pseudo-random permutation of range(length) keyed by the numbers.

    Any part of the order can be had without the rest: a Feistel network over a power of two, applied again to
    what falls outside (cycle walking). Positions, lengths and streams broadcast; each stream is a permutation
    of its own.
    """
    places, lengths, streams = np.broadcast_arrays(position, length, stream)
    if places.size and (places.min() < 0 or (places >= lengths).any()):
        raise IndexError(f"a position lies outside range({np.asarray(length).max()})")
    values, ends = places.astype(np.uint64).ravel(), lengths.astype(np.uint64).ravel()
    salts = scrambled(streams.astype(np.uint64).ravel())
    keys = digest(seed, *numbers, size=2 * ROUNDS, purpose=b"order")
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = exchanged(values[outside], ends[outside], salts[outside], keys)
        outside = outside[values[outside] >= ends[outside]]
    return values.astype(np.int64).reshape(places.shape)


def exchanged(values: KeyArray, ends: KeyArray, salts: KeyArray, keys: KeyArray) -> KeyArray:
    """One pass of the Feistel network: a bijection of a power of two that holds `ends`."""
    bits = np.maximum(np.frexp(ends.astype(np.float64) - 1)[1], LEAST_BITS).astype(np.uint64)
    low_bits = bits // np.uint64(2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for first, second in keys.reshape(ROUNDS, 2):
        high ^= scrambled(low ^ salts ^ first) & high_mask
        low ^= scrambled(high ^ salts ^ second) & low_mask
    joined: KeyArray = (high << low_bits) | low
    return joined


def scrambled(values: KeyArray) -> KeyArray:
    """Each word with all its bits mixed: the finalizer of SplitMix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    final: KeyArray = mixed ^ (mixed >> np.uint64(31))
    return final


@dataclass(frozen=True, eq=False)
class Blocks:
    """Runs of consecutive samples that are cheap only when read together, such as remote shards."""

    sizes: IndexArray
    """Samples of each block."""
    lanes: int
    """Blocks that are mixed at any time: the shuffle buffer."""


def ordered(positions: IndexArray, length: int, seed: int, epoch: int, blocks: Blocks | None = None) -> IndexArray:
    """The samples at these positions of an epoch's order: each sample once.

    With blocks, the order deals the shuffled blocks to lanes, draws from the lanes in turn, and inside a block
    at random; so only `lanes` blocks are in use at a time. The positions should be those of one whole batch: what
    comes from the same lane then stands together, and processes that share a batch read different blocks.
    """
    if blocks is None:
        return permuted(positions, length, seed, epoch)
    return lane_order(blocks, seed, epoch).samples(positions)


class LaneOrder:
    """The order of one epoch over blocks dealt to lanes; memory grows with the blocks, not with the samples."""

    def __init__(self, blocks: Blocks, seed: int, epoch: int) -> None:
        self.key = (seed, epoch)
        self.sizes = blocks.sizes
        self.starts = np.cumsum(blocks.sizes) - blocks.sizes
        count = len(blocks.sizes)
        dealt = permuted(np.arange(count), count, seed, epoch, count)
        lanes = [dealt[lane :: blocks.lanes] for lane in range(min(blocks.lanes, count))]
        lanes.sort(key=lambda lane: int(blocks.sizes[lane].sum()))  # the lane that ends first comes first
        self.lanes = lanes
        self.ends = [np.cumsum(blocks.sizes[lane]) for lane in lanes]
        # Stage k is the part of the epoch in which lanes k and later still have samples.
        lengths = np.array([0, *(ends[-1] for ends in self.ends)], np.int64)
        self.rounds = lengths[:-1]
        width = len(lanes) - np.arange(len(lanes))
        self.stages = np.concatenate([[0], np.cumsum(np.diff(lengths) * width)])[:-1]

    def samples(self, positions: IndexArray) -> IndexArray:
        """The samples at these positions, those of a lane together."""
        stage = np.searchsorted(self.stages, positions, side="right") - 1
        turn, lane = np.divmod(positions - self.stages[stage], len(self.lanes) - stage)
        turn, lane = turn + self.rounds[stage], lane + stage
        together = np.argsort(lane, kind="stable")
        turn, lane = turn[together], lane[together]
        block, within = np.empty_like(turn), np.empty_like(turn)
        for number in np.unique(lane):
            mine = lane == number
            place = np.searchsorted(self.ends[number], turn[mine], side="right")
            block[mine] = self.lanes[number][place]
            within[mine] = turn[mine] - (self.ends[number][place] - self.sizes[block[mine]])
        return self.starts[block] + permuted(within, self.sizes[block], *self.key, stream=block)


lane_order = functools.lru_cache(maxsize=8)(LaneOrder)

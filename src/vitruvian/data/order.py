"""The order of samples: seeded permutations and random streams that are computed for any position, without state.

Sample `i` of epoch `e` must be the same for any number of workers and processes, and a resumed run must continue in the
middle of an epoch. So no order is ever stored: the sample at a position is a function of (seed, epoch, position).
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Sampling = Literal["uniform", "balanced"]  # each sample once per epoch, or all classes equally often
IndexArray = NDArray[np.int64]
KeyArray = NDArray[np.uint64]
ROUNDS = 4  # double rounds of the Feistel network
MIN_BITS = 6  # minimum width of the network: with fewer bits, permutations of a few items are not equally frequent


def hash_words(seed: int, *numbers: int, size: int, purpose: bytes) -> KeyArray:
    """`size` words of 64 bits that depend on all the numbers, on their count and on the purpose."""
    text = b"".join(int(value).to_bytes(16, "little", signed=True) for value in (seed, *numbers))
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * size, person=purpose).digest(), np.uint64)


def generator_for(seed: int, *numbers: int) -> np.random.Generator:
    """The random generator of these numbers, such as (seed, epoch, sample); a further 0 gives another stream."""
    key = PhiloxKey(hash_words(seed, *numbers, size=2, purpose=b"draw"))
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # NumPy's stub knows no such keys


class PhiloxKey(np.random.bit_generator.ISeedSequence):
    """A key for Philox. Passed as a seed sequence, it saves the system call for entropy that would not be used."""

    def __init__(self, words: KeyArray) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> KeyArray:
        return self.words


# A permutation of range(n) that can be evaluated at single positions: a Feistel network splits a number of b bits
# into two halves and alternately XORs one half with a hash of the other and the key. Each round can be undone, so the
# network is a bijection of range(2**b), whatever the hash is. To permute range(n) with n <= 2**b, a result >= n goes
# through the network again until it falls below n (cycle walking): the walk follows a cycle of the bijection, so it
# returns to range(n), and two positions never meet. Since 2**b < 2n (from MIN_BITS on), it takes two steps at most on
# average.


def permute(position: ArrayLike, length: ArrayLike, seed: int, *numbers: int, stream: ArrayLike = 0) -> IndexArray:
    """The image of each position under the pseudo-random permutation of range(length) with this key.

    Positions, lengths and streams broadcast; each stream has its own permutation.
    """
    positions, lengths, streams = np.broadcast_arrays(position, length, stream)
    if positions.size and (positions.min() < 0 or (positions >= lengths).any()):
        raise IndexError(f"a position is outside range({np.asarray(length).max()})")
    values, ends = positions.astype(np.uint64).ravel(), lengths.astype(np.uint64).ravel()
    salts = mix_bits(streams.astype(np.uint64).ravel())
    keys = hash_words(seed, *numbers, size=2 * ROUNDS, purpose=b"order")
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = feistel_pass(values[outside], ends[outside], salts[outside], keys)
        outside = outside[values[outside] >= ends[outside]]
    return values.astype(np.int64).reshape(positions.shape)


def feistel_pass(values: KeyArray, ends: KeyArray, salts: KeyArray, keys: KeyArray) -> KeyArray:
    """One pass through the network: a bijection of the smallest range(2**b) that contains range(ends)."""
    bits = np.maximum(np.frexp(ends.astype(np.float64) - 1)[1], MIN_BITS).astype(np.uint64)
    low_bits = bits // np.uint64(2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for first, second in keys.reshape(ROUNDS, 2):
        high ^= mix_bits(low ^ salts ^ first) & high_mask
        low ^= mix_bits(high ^ salts ^ second) & low_mask
    combined: KeyArray = (high << low_bits) | low
    return combined


def mix_bits(values: KeyArray) -> KeyArray:
    """A hash of each word: the finalizer of SplitMix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    final: KeyArray = mixed ^ (mixed >> np.uint64(31))
    return final


@dataclass(frozen=True, eq=False)
class Blocks:
    """Runs of consecutive samples that are cheap only when read together, such as remote shards."""

    sizes: IndexArray  # samples of each block
    lanes: int  # blocks that are mixed at any time: the size of the shuffle buffer


def epoch_order(positions: IndexArray, length: int, seed: int, epoch: int, blocks: Blocks | None = None) -> IndexArray:
    """The samples at these positions of an epoch's order, in which each sample occurs once.

    With blocks, pass the positions of a full batch: samples from the same lane are then adjacent, so that processes
    which share the batch read different blocks.
    """
    if blocks is None:
        return permute(positions, length, seed, epoch)
    return lane_order(blocks, seed, epoch).samples(positions)


class LaneOrder:
    """The order of one epoch over blocks; memory grows with the number of blocks, not of samples.

    The shuffled blocks are dealt to lanes like cards. The order takes one sample from each lane in turn, and a lane
    goes through its blocks one after the other, each in a random order. So only `lanes` blocks are in use at a time.
    """

    def __init__(self, blocks: Blocks, seed: int, epoch: int) -> None:
        self.key = (seed, epoch)
        self.sizes = blocks.sizes
        self.starts = np.cumsum(blocks.sizes) - blocks.sizes
        count = len(blocks.sizes)
        shuffled = permute(np.arange(count), count, seed, epoch, count)
        lanes = [shuffled[lane :: blocks.lanes] for lane in range(min(blocks.lanes, count))]
        lanes.sort(key=lambda lane: int(blocks.sizes[lane].sum()))  # the lane that ends first comes first
        self.lanes = lanes
        self.ends = [np.cumsum(blocks.sizes[lane]) for lane in lanes]
        # Stage k is the part of the epoch in which lanes k and later still have samples: it has a fixed number of
        # lanes, so a position in it is divided into a turn and a lane.
        lengths = np.array([0, *(ends[-1] for ends in self.ends)], np.int64)
        self.rounds = lengths[:-1]
        width = len(lanes) - np.arange(len(lanes))
        self.stages = np.concatenate([[0], np.cumsum(np.diff(lengths) * width)])[:-1]

    def samples(self, positions: IndexArray) -> IndexArray:
        """The samples at these positions, grouped by lane."""
        stage = np.searchsorted(self.stages, positions, side="right") - 1
        turn, lane = np.divmod(positions - self.stages[stage], len(self.lanes) - stage)
        turn, lane = turn + self.rounds[stage], lane + stage
        grouped = np.argsort(lane, kind="stable")
        turn, lane = turn[grouped], lane[grouped]
        block, within = np.empty_like(turn), np.empty_like(turn)
        for index in np.unique(lane):
            mask = lane == index
            nth = np.searchsorted(self.ends[index], turn[mask], side="right")  # which block of the lane
            block[mask] = self.lanes[index][nth]
            within[mask] = turn[mask] - (self.ends[index][nth] - self.sizes[block[mask]])
        return self.starts[block] + permute(within, self.sizes[block], *self.key, stream=block)


lane_order = functools.lru_cache(maxsize=8)(LaneOrder)

"""Orders and random streams."""

import math
from collections import Counter

import numpy as np
import pytest

from vitruvian.data.order import Blocks, epoch_order, generator_for, permute

BLOCKS = Blocks(np.array([10, 1, 7, 30, 5, 5, 12, 3]), 4)
LENGTH = 73


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_meets_each_position_once(length):
    assert sorted(permute(np.arange(length), length, 3, 1)) == list(range(length))


def test_the_order_does_not_change_between_versions():
    """A fact about this code: with another order, a run could not be resumed after an update."""
    assert permute(np.arange(8), 8, 0, 0).tolist() == [5, 1, 0, 6, 4, 2, 7, 3]
    assert permute([0, 10**6 - 1], 10**6, 7, 3).tolist() == [177790, 911305]
    assert generator_for(1, 2, 3).bit_generator.random_raw(2).tolist() == [0x220DBD69B1C2CD29, 0xE99F95AD64167BE1]


def test_any_part_of_an_order_can_be_had_alone():
    whole = permute(np.arange(1000), 1000, 5, 2)
    assert permute(np.arange(400, 410), 1000, 5, 2).tolist() == whole[400:410].tolist()
    assert permute(7, 1000, 5, 2) == whole[7]


def test_lengths_and_streams_of_one_call_are_independent():
    together = permute([3, 3, 3], [10, 20, 20], 1, stream=[0, 0, 9])
    assert together.tolist() == [int(permute(3, n, 1, stream=s)) for n, s in ((10, 0), (20, 0), (20, 9))]


def test_seeds_epochs_and_streams_give_other_orders():
    orders = [permute(np.arange(50), 50, *key, stream=s).tolist() for key in ((0, 0), (0, 1), (1, 0)) for s in (0, 1)]
    assert len(set(map(tuple, orders))) == 6


def test_all_orders_of_a_few_items_are_equally_likely():
    draws = 24_000
    orders = permute(np.tile(np.arange(4), (draws, 1)), 4, 0, stream=np.arange(draws)[:, None])
    counts = Counter(map(tuple, orders.tolist()))
    expected = draws / math.factorial(4)
    chi_squared = sum((counts[order] - expected) ** 2 / expected for order in counts)
    assert len(counts) == 24
    assert chi_squared < 49.7  # passed by chance in 1 of 1000 fair draws (23 degrees of freedom)


def test_neighbors_in_the_order_are_unrelated():
    order = permute(np.arange(10_000), 10_000, 1, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04  # four standard errors of 1/100


def test_a_position_outside_is_an_error():
    with pytest.raises(IndexError, match=r"range\(5\)"):
        permute([5], 5, 0)


def test_streams_of_other_numbers_are_others():
    keys = [(1,), (1, 0), (1, 0, 0), (0, 1), (2**40,), (-1,), (1, 2**32)]
    assert len({generator_for(*key).integers(0, 2**62) for key in keys}) == len(keys)
    assert generator_for(1, 2).random() == generator_for(1, 2).random()


@pytest.mark.parametrize("batch", [1, 7, 73])
def test_an_order_over_blocks_meets_each_sample_once(batch):
    starts = range(0, LENGTH, batch)
    parts = [epoch_order(np.arange(s, min(s + batch, LENGTH)), LENGTH, 1, 2, BLOCKS) for s in starts]
    assert sorted(np.concatenate(parts)) == list(range(LENGTH))


def test_an_order_over_blocks_keeps_to_a_few_blocks_at_a_time():
    block = np.repeat(np.arange(8), BLOCKS.sizes)
    order = np.concatenate([epoch_order(np.array([p]), LENGTH, 1, 2, BLOCKS) for p in range(LENGTH)])
    span = [np.flatnonzero(block[order] == number) for number in range(8)]
    in_use = [sum(places[0] <= p <= places[-1] for places in span) for p in range(LENGTH)]
    assert max(in_use) == BLOCKS.lanes
    assert len(set(block[order[:4]])) == 4  # and mixes them from the start


def test_parts_of_a_batch_come_from_different_blocks():
    blocks = Blocks(np.full(16, 100), 8)
    samples = epoch_order(np.arange(64), 1600, 0, 0, blocks) // 100
    assert not set(samples[:32]) & set(samples[32:])


def test_samples_of_a_block_are_shuffled():
    order = epoch_order(np.arange(100), 100, 0, 0, Blocks(np.array([100]), 4))
    assert order.tolist() != sorted(order)
    assert order.tolist() != epoch_order(np.arange(100), 100, 0, 1, Blocks(np.array([100]), 4)).tolist()

"""Several sources as one."""

import numpy as np
import pytest
from making import Numbers

from vitruvian.data.order import Blocks, epoch_order
from vitruvian.data.sources import Concat
from vitruvian.errors import DataError


def test_a_union_has_the_samples_of_its_parts_in_order():
    whole = Concat([Numbers(5), Numbers(3)], name="both")
    assert len(whole) == 8
    assert [whole.label(i) for i in range(8)] == whole.labels().tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert [int(whole.read(i)[0, 0]) for i in range(8)] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert [whole.key(i) for i in (4, 5)] == ["number 4", "number 0"]
    assert whole.weight(6) == 1.01
    assert whole.blocks is None


def test_parts_with_other_classes_are_refused():
    with pytest.raises(DataError, match="have different classes and cannot be combined"):
        Concat([Numbers(5), Numbers(3, classes=3)], name="both")


def test_blocks_of_the_parts_stay_together():
    parts = [Numbers(5), Numbers(3)]
    parts[0].blocks = Blocks(np.array([2, 3]), 2)
    whole = Concat(parts, name="both")
    assert whole.blocks.sizes.tolist() == [2, 3, 1, 1, 1]  # what has no blocks is read one by one
    order = epoch_order(np.arange(8), 8, 0, 0, whole.blocks)
    assert sorted(order.tolist()) == list(range(8))


def test_each_part_hears_of_its_own_samples():
    parts = [Numbers(5), Numbers(3)]
    heard = []
    for part in parts:
        part.blocks = Blocks(np.array([len(part)]), 1)
        part.announce = heard.append
    Concat(parts, name="both").announce(np.array([6, 1, 4, 5]))
    assert [indices.tolist() for indices in heard] == [[1, 4], [1, 0]]

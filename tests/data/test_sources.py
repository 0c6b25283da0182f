"""Subsets of sources, balanced and nested, and several sources as one."""

import numpy as np
import pytest
from making import Numbers

from vitruvian.data.formats import open_dataset
from vitruvian.data.order import Blocks, IndexArray, epoch_order
from vitruvian.data.sources import Concat, Source, class_sizes, equal_shares, first_samples
from vitruvian.errors import ConfigError, DataError


class Labeled(Source):
    """Samples with these labels."""

    name = "labeled"

    def __init__(self, labels, classes):
        self.classes = tuple(map(str, range(classes)))
        self._labels = np.array(labels, np.int32)

    def __len__(self):
        return len(self._labels)

    def label(self, index):
        return int(self._labels[index])

    def labels(self):
        return self._labels

    def read(self, index):
        return np.zeros((2, 2), np.uint8)

    def key(self, index):
        return str(index)


def chosen(source, count, seed=0):
    found = first_samples(source, count, seed)
    return [found.original(index) for index in range(len(found))]


def test_a_part_has_as_many_of_each_class_and_is_part_of_every_larger_one():
    source = open_dataset("digits").train
    before: set[int] = set()
    for count in (10, 37, 100, 1000, len(source)):
        now = chosen(source, count)
        assert len(now) == len(set(now)) == count
        assert now == sorted(now)
        assert before <= set(now)
        before = set(now)
    sizes = class_sizes(first_samples(source, 37, 0).labels(), 10)
    assert sizes.tolist() == [4] * 7 + [3] * 3


def test_small_classes_give_what_they_have_and_the_others_the_rest():
    source = Labeled([0] * 2 + [1] * 50 + [2] * 9, 4)
    assert class_sizes(first_samples(source, 20, 0).labels(), 4).tolist() == [2, 9, 9, 0]
    assert class_sizes(first_samples(source, 40, 0).labels(), 4).tolist() == [2, 29, 9, 0]


def test_shares_are_those_of_dealing_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes: IndexArray = rng.integers(0, 12, 5)
        for count in range(1, int(sizes.sum()) + 1):
            left, dealt = sizes.copy(), np.zeros_like(sizes)
            while dealt.sum() < count:
                for number in range(5):
                    if left[number] and dealt.sum() < count:
                        left[number] -= 1
                        dealt[number] += 1
            assert equal_shares(sizes, count).tolist() == dealt.tolist()


def test_another_seed_chooses_others():
    source = open_dataset("digits").train
    assert chosen(source, 100) != chosen(source, 100, seed=1)


def test_more_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="max_train_samples=62: labeled has 61 training images"):
        first_samples(Labeled([0] * 2 + [1] * 50 + [2] * 9, 3), 62, 0)


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

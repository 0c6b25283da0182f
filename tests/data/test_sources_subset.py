"""The first images of a source: balanced, nested, and as many as asked for."""

import numpy as np
import pytest

from vitruvian.data.formats import open_dataset
from vitruvian.data.order import IndexArray
from vitruvian.data.sources import Source, class_sizes, equal_shares, first_samples
from vitruvian.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))


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
    with pytest.raises(ConfigError, match="max_train_samples=62: labeled has 61 images to train on"):
        first_samples(Labeled([0] * 2 + [1] * 50 + [2] * 9, 3), 62, 0)

"""Labels that the look of an image speaks against."""

from functools import partial

import numpy as np
import pytest

from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.checks import REFERENCES, most_common, neighbors
from vitruvian.data.doctor.scan import SKETCH_BYTES, map_sketches, sketch_features
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, Source


class Relabeled(Source):
    """A source with some labels changed."""

    def __init__(self, source, changes):
        self.source, self.name, self.classes = source, source.name, source.classes
        self._labels = np.array(source.labels())
        for index, label in changes.items():
            self._labels[index] = label

    def __len__(self):
        return len(self.source)

    def label(self, index):
        return int(self._labels[index])

    def labels(self):
        return self._labels

    def read(self, index):
        return self.source.read(index)

    def key(self, index):
        return self.source.key(index)


def digits(changes=None):
    return Dataset(name="digits", splits={"train": Relabeled(open_dataset("digits").train, changes or {})})


def doubts(data):
    finding = next(finding for finding in diagnose(data).findings if finding.check in ("label", "labels"))
    return finding, {example.images[0].index: example for example in finding.examples}


@pytest.mark.slow
def test_wrong_labels_of_digits_are_found_and_few_others():
    right = open_dataset("digits").train.labels()
    changes = {index: (int(right[index]) + 3) % 10 for index in range(100, 110)}
    before, after = doubts(digits())[1], doubts(digits(changes))[1]
    assert len(before) <= 3  # of 1,438 labels; which may well be wrong
    assert len(changes.keys() & after.keys()) >= 8


@pytest.mark.slow
def test_a_doubt_comes_with_its_evidence():
    right = int(open_dataset("digits").train.labels()[100])
    finding, found = doubts(digits({100: (right + 3) % 10}))
    assert (finding.check, finding.level) == ("label", "warning")
    example = found[100]
    assert example.note.endswith(f"nearest neighbors are labeled {right}")
    assert [image.label for image in example.images] == [str((right + 3) % 10), *[str(right)] * 3]


@pytest.mark.slow
def test_classes_that_look_alike_are_not_judged():
    rng = np.random.default_rng(0)
    source = open_dataset("digits").train
    finding, _ = doubts(digits(dict(enumerate(rng.integers(0, 10, len(source))))))
    assert (finding.check, finding.level) == ("labels", "unchecked")
    assert finding.text.startswith("labels: edges and colors do not separate")


def test_no_image_is_its_own_neighbor(monkeypatch):
    rng = np.random.default_rng(0)
    sketches = rng.integers(0, 256, (60, SKETCH_BYTES), dtype=np.uint8)
    among = np.arange(5, 55)
    for references in (REFERENCES, 30):  # all of them, and some
        monkeypatch.setattr("vitruvian.data.doctor.checks.REFERENCES", references)
        near = neighbors(partial(map_sketches, sketch_features, sketches), among, np.arange(60))
        assert not (near == among[:, None]).any()
        assert np.isin(near, among).all()


@pytest.mark.parametrize(("row", "label", "count"), [([3, 1, 3, 2], 3, 2), ([5, 5, 5, 5], 5, 4), ([1, 2, 2, 2], 2, 3)])
def test_the_commonest_label_is_counted(row, label, count):
    labels, counts = most_common(np.array([row], np.int32))
    assert (labels[0], counts[0]) == (label, count)

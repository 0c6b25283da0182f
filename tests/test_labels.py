"""ImageNet's classes."""

from __future__ import annotations

import pytest

from vitruvian.labels import imagenet_ids, imagenet_labels


@pytest.mark.parametrize(
    ("index", "word_net_id", "label"),
    [
        (0, "n01440764", "tench"),
        (2, "n01484850", "great white shark"),
        (134, "n02012849", "crane (bird)"),
        (281, "n02123045", "tabby"),
        (517, "n03126707", "crane (machine)"),
        (638, "n03710637", "maillot"),
        (639, "n03710721", "maillot (tank suit)"),
        (999, "n15075141", "toilet tissue"),
    ],
)
def test_classes_stand_in_the_published_order(index, word_net_id, label):
    assert imagenet_ids()[index] == word_net_id
    assert imagenet_labels()[index] == label


def test_there_are_1000_classes_with_different_names_in_the_order_of_their_ids():
    assert len(set(imagenet_labels())) == len(imagenet_ids()) == 1000
    assert list(imagenet_ids()) == sorted(imagenet_ids())

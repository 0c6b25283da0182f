"""Losses and the weight of each image, against PyTorch's own and by hand."""

import pytest
import torch
import torch.nn.functional as F

from vitruvian.data.formats import open_dataset
from vitruvian.training.objective import LOSSES, balanced_weights, count_correct, image_weights

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
LABELS = torch.tensor([0, 2])


def test_softmax_loss_is_cross_entropy():
    assert LOSSES["cross_entropy"](LOGITS, LABELS).mean() == F.cross_entropy(LOGITS, LABELS)


@pytest.mark.parametrize("kind", ["cross_entropy", "bce"])
def test_smoothed_labels_equal_smoothed_shares(kind):
    shares = F.one_hot(LABELS, 3) * 0.7 + 0.1
    torch.testing.assert_close(LOSSES[kind](LOGITS, LABELS, 0.3), LOSSES[kind](LOGITS, shares))


def test_sigmoid_loss_sums_over_the_classes():
    signs = 1 - 2 * F.one_hot(LABELS, 3)
    by_hand = F.softplus(LOGITS * signs).sum(dim=1)
    torch.testing.assert_close(LOSSES["bce"](LOGITS, LABELS), by_hand)


def test_half_precision_logits_give_a_float32_loss():
    assert LOSSES["cross_entropy"](LOGITS.bfloat16(), LABELS).dtype == torch.float32


def test_right_answers_are_counted_for_labels_and_for_mixed_targets():
    assert count_correct(LOGITS, LABELS) == 1
    assert count_correct(LOGITS, torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.7, 0.2]])) == 2


def test_balanced_weights_make_classes_count_alike_and_are_one_in_the_mean():
    source = open_dataset("digits").train
    labels = torch.from_numpy(source.labels().astype("int64"))
    weights = balanced_weights(source)[labels]
    assert weights.mean() == pytest.approx(1.0)
    sums = torch.zeros(10).index_add(0, labels, weights)
    torch.testing.assert_close(sums, sums.mean().expand(10))


def test_a_mixed_image_counts_as_its_classes_do():
    classes, own = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, 2.0])
    assert image_weights(torch.tensor([1, 0]), own, classes).tolist() == [3.0, 2.0]
    assert image_weights(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), own, classes).tolist() == [2.0, 0.0]
    assert image_weights(LABELS, own, None) is own

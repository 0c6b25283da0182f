"""The energy of a head, fitted to tell images of its classes from images of none."""

import pytest
import torch
from torch import nn

from vitruvian.errors import ConfigError
from vitruvian.evaluation.calibration import shift_energy


@pytest.fixture
def features():
    """Of two classes, which differ along the first axis, and of none, which lie apart along the second."""
    torch.manual_seed(0)
    known, unknown = torch.randn(200, 4), torch.randn(100, 4)
    for some in (known, unknown):
        some[:, 0] += torch.tensor([3.0, -3.0]).repeat(len(some) // 2)
    unknown[:, 1] += 4
    return known, unknown


@pytest.fixture
def head():
    head = nn.Linear(4, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
        head.bias.zero_()
    return head


def test_the_energy_tells_classes_from_none_and_no_probability_changes(head, features):
    known, unknown = features
    with torch.no_grad():
        before = head(torch.cat(features))
        assert (before[200:].logsumexp(dim=1) < before[:200].logsumexp(dim=1).quantile(0.05)).float().mean() < 0.1
        shift_energy(head, known, [unknown[:30], unknown[30:]])
        after = head(torch.cat(features))
    assert (after[200:].logsumexp(dim=1) < after[:200].logsumexp(dim=1).quantile(0.05)).float().mean() > 0.9
    # float32 rounding of logits up to 20
    torch.testing.assert_close(after.softmax(dim=1), before.softmax(dim=1), atol=1e-5, rtol=0)


def test_each_kind_of_unknown_images_counts_alike(head, features):
    known, unknown = features
    once, often = nn.Linear(4, 2), nn.Linear(4, 2)
    for copy, kinds in ((once, [unknown, -unknown]), (often, [unknown, (-unknown).repeat(3, 1)])):
        copy.load_state_dict(head.state_dict())
        shift_energy(copy, known, kinds)
    # the optimizer stops at slightly different places
    torch.testing.assert_close(once.weight, often.weight, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("known", "unknown"), [(0, [3]), (3, []), (3, [2, 0])])
def test_nothing_to_fit_to_is_said(head, known, unknown):
    with pytest.raises(ConfigError, match="needs features of known images and of each kind of unknown images"):
        shift_energy(head, torch.zeros(known, 4), [torch.zeros(count, 4) for count in unknown])

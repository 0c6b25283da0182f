"""Means of weights: their formulas, and that using one leaves the weights as they were."""

import pytest
import torch
from torch import nn

from vitruvian.training.optimizer import Average


def one_number(kind, **changes):
    model = nn.Linear(1, 1, bias=False)
    return model, Average(model, kind, **{"decay": 0.9, "start": 0} | changes)


def feed(model, average, values):
    for step, value in enumerate(values):
        nn.init.constant_(model.weight, value)
        average.update(step)


def test_polyak_is_the_plain_mean_from_its_start():
    model, average = one_number("polyak", start=2)
    feed(model, average, [100.0, 100.0, 1.0, 2.0, 6.0])
    assert average.means["weight"].item() == pytest.approx(3.0)


def test_ema_follows_its_formula_with_less_memory_in_the_first_steps():
    model, average = one_number("ema", decay=0.5)
    start = model.weight.item()
    feed(model, average, [1.0, 2.0, 3.0])
    expected = start
    for step, value in enumerate([1.0, 2.0, 3.0]):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert average.means["weight"].item() == pytest.approx(expected)


def test_the_model_has_the_mean_only_inside_the_context():
    model, average = one_number("polyak")
    feed(model, average, [1.0, 4.0])
    with average.in_place():
        assert model.weight.item() == 2.5
    assert model.weight.item() == 4.0
    assert average.means["weight"].item() == 2.5


def test_frozen_weights_have_no_mean():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(Average(model, "ema", decay=0.9, start=0).means) == ["weight"]
    assert torch.equal(Average(model, "ema", decay=0.9, start=0).means["weight"], model.weight)

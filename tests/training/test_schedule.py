"""Learning rates against their closed forms."""

import math

import pytest

from vitruvian.errors import ConfigError
from vitruvian.training.optimizer import Schedule, build_schedule, to_steps
from vitruvian.training.recipe import Recipe


def schedule(kind, **changes):
    return Schedule(**{"kind": kind, "peak": 0.8, "steps": 100, "warmup": 20} | changes)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "rsqrt"])
def test_warm_up_rises_in_a_straight_line_from_zero(kind):
    lrs = [schedule(kind).lr_at(step) for step in range(21)]
    assert lrs == pytest.approx([0.8 * step / 20 for step in range(21)])


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("constant", lambda done: 0.8),
        ("linear", lambda done: 0.1 + 0.7 * (1 - done)),
        ("cosine", lambda done: 0.1 + 0.7 * (1 + math.cos(math.pi * done)) / 2),
        ("rsqrt", lambda done: 0.8 / math.sqrt(1 + 80 * done / 25)),
    ],
)
def test_the_rate_after_warm_up_is_the_closed_form(kind, form):
    made = schedule(kind, end=0.1, timescale=25.0)
    for step in range(20, 100):
        assert made.lr_at(step) == pytest.approx(form((step - 20) / 80))


def test_cool_down_ends_at_the_end_rate():
    made = schedule("rsqrt", cooldown=10, end=0.01)
    assert made.lr_at(90) == schedule("rsqrt").lr_at(90)
    assert made.lr_at(95) == pytest.approx(0.01 + (schedule("rsqrt").lr_at(95) - 0.01) / 2)
    assert made.lr_at(100) == pytest.approx(0.01)


def test_a_length_below_one_is_a_share_of_the_run():
    assert [to_steps(0.1, 50), to_steps(1, 50), to_steps(7, 50)] == [5, 1, 7]
    assert build_schedule(Recipe(epochs=1, warmup=0.2), 40).warmup == 8


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup and cooldown of 200 and 0 steps do not fit into the 100 steps"):
        schedule("cosine", warmup=200)

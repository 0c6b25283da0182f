"""Plans: what is counted is right, what is measured is near what is known."""

import pytest
import torch

import vitruvian.training.planning as planning
from vitruvian.cost import multiply_adds
from vitruvian.training import objective
from vitruvian.training.initial_model import config_of, model_for
from vitruvian.training.planning import peak_bytes, plan, plan_lines
from vitruvian.training.recipe import Recipe
from vitruvian.weights.save import save

TINY = {"depth": 2, "width": 16, "num_heads": 2, "mlp_dim": 32, "patch_size": 4, "in_channels": 1}
CPU = torch.device("cpu")


def tiny(**changes):
    settings = {"model": "ViT-Ti/16", "architecture": TINY, "image_size": 8, "steps": 50, "batch_size": 32}
    return Recipe(**settings | changes, workers=0, eval_every=1.0, preprocess={"mean": (0.5,), "std": (0.5,)})


def planned(**changes):
    return plan("digits", recipe=tiny(**changes), seconds=0.0)


def test_a_plan_counts_steps_work_and_evaluations():
    found = planned()
    assert [len(part) for part in (found.splits.train, found.splits.validation, found.splits.classes)] == [
        1438,
        359,
        10,
    ]
    assert found.epochs == pytest.approx(50 / 44)  # 44 whole batches of 32 images
    assert found.evaluations == 2  # after the epoch, and at the end
    assert found.run_multiply_adds == 3 * multiply_adds(found.config) * 50 * 32
    assert found.seconds == found.training_seconds + found.evaluation_seconds
    assert found.training_seconds == pytest.approx(50 * found.timing.step_seconds)


def test_memory_is_that_of_weights_moments_mean_and_a_step():
    plain, averaged, sgd = planned(), planned(average="ema"), planned(optimizer="sgd")
    assert plain.weight_bytes == 4 * 3 * plain.parameters
    assert averaged.weight_bytes == 4 * 4 * plain.parameters
    assert sgd.weight_bytes == 4 * 2 * plain.parameters


@pytest.mark.slow
def test_parts_of_a_batch_one_after_the_other_need_less_memory():
    whole, parts, small = (planned(**changes) for changes in ({}, {"grad_accum_steps": 4}, {"batch_size": 8}))
    assert parts.step_bytes < whole.step_bytes / 2
    gradients, pixels = 4 * parts.parameters, 4 * 32 * 8 * 8  # there all the time, unlike in a small batch
    assert parts.step_bytes == pytest.approx(small.step_bytes + gradients + pixels, rel=0.1)


@pytest.mark.slow
def test_activation_checkpointing_needs_less_memory():
    deep = TINY | {"depth": 8, "patch_size": 2}
    plain, checkpointed = (planned(architecture=deep, grad_checkpointing=on).step_bytes for on in (False, True))
    assert checkpointed < 0.5 * plain


def test_a_later_higher_resolution_makes_the_run_longer():
    found = planned(resolutions=((0.5, 16),))
    work = [multiply_adds(found_config(), size) for size in (8, 16)]
    assert found.run_multiply_adds == 3 * 32 * 25 * sum(work)
    assert found.training_seconds == pytest.approx(found.timing.step_seconds * 25 * (1 + work[1] / work[0]))


def found_config():
    return config_of(tiny(), 10)


@pytest.mark.parametrize(
    ("teacher_input", "described"),
    [
        ("same", "runs in each step, included in the time"),
        ("fixed", "runs once on each image before the first step, which the time does not include"),
    ],
)
def test_a_plan_says_what_a_teacher_costs_and_does_not_ask_it_about_all_images(
    tmp_path, monkeypatch, teacher_input, described
):
    save(model_for(tiny(), "0123456789"), tmp_path / "teacher")
    monkeypatch.setattr(objective, "shared_features", None)
    found = planned(teacher=str(tmp_path / "teacher"), teacher_input=teacher_input)
    assert next(line for line in plan_lines(found) if line.startswith("teacher")).endswith(f"teacher, {described}")


def test_the_lines_of_a_plan_name_everything_that_is_asked_for():
    shown = "\n".join(plan_lines(planned(freeze=("embed.*",))))
    for words in ("parameters", "frozen", "multiply-adds", "50 of 32 images", "memory", "about", "time", "on cpu"):
        assert words in shown


def test_the_peak_of_work_is_what_lives_at_one_time():
    x = torch.zeros(1000)  # there before, so not counted

    def work():
        x.add_(1)
        y = x + 1  # 4000 bytes
        for _ in range(5):
            y = y * 2  # two at a time
        return y.view(10, 100)

    assert peak_bytes(work, CPU) == 8000


def test_the_peak_of_a_backward_pass_is_what_it_keeps():
    w = torch.ones(1000, requires_grad=True)

    def work():
        y = w
        for _ in range(4):
            y = y.exp()  # keeps its result
        y.backward(torch.ones(1000))
        w.grad = None

    assert 5 * 4000 <= peak_bytes(work, CPU) <= 8 * 4000


def test_a_slow_step_is_measured_on_part_of_its_batch_without_multiplying_what_the_optimizer_takes(monkeypatch):
    monkeypatch.setattr(planning, "time_step", lambda trainer, batch: 2.0 + 0.05 * len(batch))
    assert planned().timing.step_seconds == pytest.approx(2.0 + 0.05 * 32, abs=0.5)  # beside the wait for a batch
    monkeypatch.setattr(planning, "time_step", lambda trainer, batch: 3.0 * len(batch))
    assert planned().timing.step_seconds == pytest.approx(3.0 * 32, abs=0.5)

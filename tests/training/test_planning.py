"""Plans: what is counted is right, what is measured is near what is known, on this machine and on clusters."""

from types import SimpleNamespace

import pytest
import torch

import vitruvian.training.planning as planning
from vitruvian.cost import multiply_adds
from vitruvian.data.loader import Batch
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.training.initial_model import config_of, model_for
from vitruvian.training.planning import choose_recipe, cluster_lines, cluster_plan, peak_bytes, plan, plan_lines
from vitruvian.training.recipe import Recipe
from vitruvian.weights.save import save

TINY = {"depth": 2, "width": 16, "num_heads": 2, "mlp_dim": 32, "patch_size": 4, "in_channels": 1}
CPU = torch.device("cpu")


def tiny(**changes):
    settings = {"model": "ViT-Ti/16", "architecture": TINY, "image_size": 8, "steps": 50, "batch_size": 32}
    return Recipe(**settings | changes, workers=0, eval_every=1.0, preprocess={"mean": (0.5,), "std": (0.5,)})


def planned(**changes):
    return plan("digits", tiny(**changes), seconds=0.0)


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
    assert found.seconds == pytest.approx(50 * found.step_seconds + found.evaluation_seconds)


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


def found_config():
    return config_of(tiny(), 10)


def test_a_plan_says_what_a_teacher_costs(tmp_path):
    save(model_for(tiny(), "0123456789"), tmp_path / "teacher")
    found = planned(teacher=str(tmp_path / "teacher"))
    line = next(line for line in plan_lines(found) if line.startswith("teacher"))
    assert line.endswith("teacher, runs in each step, included in the time")


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
    assert planned().step_seconds == pytest.approx(2.0 + 0.05 * 32, abs=0.5)  # beside the wait for a batch
    slow_at_last = iter((0.1, 0.1, 4.0, 4.0, *[4.0] * 20))  # a busy machine: an image costs at most its part of a step
    monkeypatch.setattr(planning, "time_step", lambda trainer, batch: next(slow_at_last))
    assert planned().step_seconds <= 4.0 * 32 / 4 + 0.5
    monkeypatch.setattr(planning, "time_step", lambda trainer, batch: 3.0 * len(batch))
    assert planned().step_seconds == pytest.approx(3.0 * 32, abs=0.5)


def test_a_step_takes_its_mean_time_because_the_time_of_a_run_is_a_sum(monkeypatch):
    now, two = [0.0], torch.zeros(2)
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(planning, "measure_bytes", lambda trainer, batch, count: 0)

    def batches():
        for number in range(9):
            now[0] += 4.0 if number and number % 4 == 0 else 0.0  # two of eight batches are late
            yield Batch(pixels=two, labels=two, indices=two, weights=two, unreadable=[])

    def step(trainer, batch):
        now[0] += 1.0
        return 1.0

    monkeypatch.setattr(planning, "time_step", step)
    trainer = SimpleNamespace(recipe=SimpleNamespace(aug_repeats=1))
    assert planning.measure_steps(trainer, batches(), seconds=100)[:2] == (9, 1.0 + 8.0 / 8)


@pytest.mark.parametrize(
    ("recipe", "settings", "exaflops", "tolerance"),
    [
        ("paper-jft-h14", [], 4262, 5e-3),
        ("paper-jft-l16", [], 783, 5e-3),
        ("paper-jft-l16", ["epochs=14"], 1567, 5e-3),
        ("paper-jft-l32", [], 196, 5e-3),
        ("paper-jft-b", [], 224, 5e-3),
        ("paper-jft-b", ["model=ViT-B/32"], 55, 0.03),
        ("paper-jft-r50-b", [], 274, 5e-3),
        ("paper-jft-r50-b", ["model=R50+ViT-L/16", "epochs=14"], 1668, 5e-3),
        ("paper-jft-resnet", [], 50, 0.05),
        ("paper-jft-resnet", ["model=BiT-R152x2"], 563, 0.05),
        ("paper-jft-resnet", ["model=R50x2"], 199, 0.06),
        ("paper-jft-resnet", ["model=R152x1"], 141, 0.05),
        ("paper-jft-resnet", ["model=R200x3", "epochs=14"], 3306, 0.05),
    ],
)
def test_the_work_of_the_papers_runs_is_what_its_appendix_states(recipe, settings, exaflops, tolerance):
    """Table 6: pre-training compute in exaFLOPs; its ResNets are 4 to 5% below a count of all their convolutions."""
    found = cluster_plan(recipe, "64 x A100", settings=settings)
    assert 2 * found.run_multiply_adds / 1e18 == pytest.approx(exaflops, rel=tolerance)


def test_the_papers_cores_reached_a_third_of_their_peak():
    found = cluster_plan("paper-jft-h14", "2500 x TPUv3-core")
    assert found.paper_days == 2500
    assert found.paper_utilization == pytest.approx(0.32, abs=0.005)
    assert found.seconds == pytest.approx(86_400 * found.paper_utilization / 0.4)
    said = cluster_lines(found)[-1]
    assert "2,500 TPUv3-core-days (Table 2), 32% of their peak of 61.5 TFLOPS each" in said
    assert "88.04% on ImageNet after fine-tuning at 384 (Table 5)" in said


def test_twice_the_devices_take_half_the_time_and_hold_half_the_weights():
    one, two = (cluster_plan("paper-jft-h14", f"{count} x H100") for count in (32, 64))
    assert one.seconds == pytest.approx(2 * two.seconds)
    assert one.weight_bytes["fsdp, full"] == pytest.approx(2 * two.weight_bytes["fsdp, full"], rel=1e-6)
    assert one.weight_bytes["ddp"] == two.weight_bytes["ddp"] == 8 * one.weight_bytes["fsdp, hybrid"]


def test_what_does_not_fit_is_said():
    lines = "\n".join(cluster_lines(cluster_plan("paper-jft-h14", "8 x L4")))
    assert "too much without grad_checkpointing" in lines


def test_data_of_ones_own_are_counted():
    assert cluster_plan("digits", "1 x L4", data="digits").images == 1438


def test_a_part_of_the_data_costs_its_share():
    """Figure 4: B/32 on 9 million images of JFT-300M."""
    whole, part = (
        cluster_plan("paper-jft-b", "8 x A100", model="ViT-B/32", settings=settings)
        for settings in ([], ["max_train_samples=9000000"])
    )
    assert part.images == 9_000_000
    assert part.run_multiply_adds == pytest.approx(whole.run_multiply_adds * 9 / 303, rel=1e-4)


@pytest.mark.parametrize("model", ["BiT-R50x1", "ViT-L/32", "R50+ViT-L/32", "ViT-b/32"])
@pytest.mark.parametrize("recipe", ["paper-imagenet", "paper-imagenet21k", "paper-jft-b", "paper-jft-resnet"])
def test_a_plan_for_a_cluster_has_the_model_that_training_would_have(recipe, model):
    planned = cluster_plan(recipe, "8 x A100", model=model)
    trained = choose_recipe("x", recipe, model=model)
    assert (planned.recipe, planned.config) == (trained, config_of(trained, planned.config.num_classes))


def test_weights_of_a_plan_for_a_cluster_are_not_ignored(tmp_path):
    for name, shape in (("R50+ViT-L/32", "R50+ViT-L/32"), ("imagenet21k/ViT-L_16", "ViT-L/16")):
        planned = cluster_plan("paper-jft-r50-b", "8 x A100", weights=name)
        assert planned.recipe == cluster_plan("paper-jft-r50-b", "8 x A100", model=shape).recipe
    for arguments in ({"weights": str(tmp_path)}, {"weights": "ViT-L/16", "model": "ViT-B/16"}):
        with pytest.raises(ConfigError, match="cluster= plans one model by name; give model= alone"):
            cluster_plan("paper-jft-b", "8 x A100", **arguments)


def test_a_cluster_or_a_recipe_that_says_too_little_is_refused():
    with pytest.raises(ConfigError, match="the length of this recipe follows the number of images; give DATA"):
        cluster_plan("finetune-bit", "8 x A100", model="R50x1")
    with pytest.raises(ConfigError, match="cluster='A100' is not a number of devices and their name"):
        cluster_plan("paper-jft-h14", "A100")
    with pytest.raises(UnknownNameError, match="unknown accelerator 'B1000'"):
        cluster_plan("paper-jft-h14", "8 x B1000")
    with pytest.raises(ConfigError, match="the size of the dataset for the recipe 'photos' is unknown; give DATA"):
        cluster_plan("photos", "8 x A100")

"""Losses and class weights, and what a teacher adds to them."""

import pytest
import torch
import torch.nn.functional as F
from runs import TINY, StopAt, lines, same_model

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError, TrainingError
from vitruvian.model.build import build
from vitruvian.training import Interrupted, Recipe, resume, train
from vitruvian.training.distributed import Processes
from vitruvian.training.objective import (
    LOSSES,
    Distilled,
    balanced_weights,
    convert_pixels,
    count_correct,
    image_weights,
    shared_classes,
    soft_loss,
)
from vitruvian.weights.load import load
from vitruvian.weights.save import save

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


TOKEN = ("architecture.distillation=true", "architecture.cls_token=true", "architecture.pool=token")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return train("digits", out=tmp_path_factory.mktemp("teacher") / "run", settings=[*TINY, "eval_every=0"]).folder


def test_softened_probabilities_are_compared_by_their_divergence():
    torch.manual_seed(0)
    student, answers = torch.randn(3, 4), torch.randn(3, 4)
    wanted = (answers / 3).softmax(dim=1)
    cross, own = (-(wanted * (x / 3).log_softmax(dim=1)).sum(dim=1) for x in (student, answers))
    torch.testing.assert_close(soft_loss(student, answers, 3.0), 9 * (cross - own))
    hard = F.cross_entropy(student, answers.argmax(dim=1), reduction="none")
    torch.testing.assert_close(soft_loss(student, answers, 0.0), hard)
    answers[1] = torch.nan
    for temperature in (0.0, 3.0):
        assert soft_loss(student, answers, temperature).isnan().nonzero().tolist() == [[1]]


def test_pixels_are_renormalized_and_resized_for_the_teacher():
    own, other = Preprocess(image_size=4, mean=(0.2,), std=(0.5,)), Preprocess(image_size=8, mean=(0.6,), std=(0.1,))
    seen = convert_pixels(torch.zeros(1, 1, 4, 4), own, other)
    torch.testing.assert_close(seen, torch.full((1, 1, 8, 8), -4.0))


def tiny(labels=tuple("abc")):
    model = build(
        ViTConfig(
            image_size=8, patch_size=4, num_classes=3, depth=1, width=8, mlp_dim=8, num_heads=2, distillation=True
        )
    )
    model.meta = model.meta.replace(labels=labels)
    return model


@pytest.mark.parametrize(("weight", "learns"), [(0.0, "head"), (1.0, "head_dist")])
def test_labels_are_for_the_class_token_and_the_teacher_for_the_distillation_token(tmp_path, weight, learns):
    save(tiny(tuple("cba")), tmp_path / "teacher")
    student = tiny()
    recipe = Recipe(steps=1, teacher=str(tmp_path / "teacher"), distillation="token", distillation_weight=weight)
    objective = Distilled(recipe, student, Processes())
    pixels = torch.randn(2, 3, 8, 8)
    answers = torch.eye(3)[:2] if weight else objective.teacher_logits(pixels)
    losses, _ = objective.losses(student, pixels, torch.tensor([0, 1]), answers)
    losses.sum().backward()
    heads = {"head": student.head, "head_dist": student.head_dist}
    assert {name for name, head in heads.items() if head.weight.grad.any()} == {learns}


def test_the_outputs_of_the_teacher_are_matched_by_name(tmp_path):
    model = tiny(tuple("cba"))
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.0, 2.0, 4.0]))
    save(model, tmp_path / "teacher")
    objective = Distilled(Recipe(steps=1, teacher=str(tmp_path / "teacher")), tiny(), Processes())
    assert objective.teacher_logits(torch.zeros(1, 3, 8, 8)).tolist() == [[2.0, 1.0, 0.5]]  # two heads are averaged


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (*TOKEN, "distillation=token", "distillation_temperature=0", "augment.mixup_alpha=0.2"),
        ("grad_accum_steps=2",),
    ],
)
def test_a_distilled_run_continues_exactly(tmp_path, teacher, settings):
    settings = [*TINY, *settings, f"teacher={teacher}", "steps=6", "eval_every=0"]
    expected = train("digits", out=tmp_path / "whole", settings=settings)
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=settings, listeners=[StopAt(3)])
    continued = resume(tmp_path / "run")
    assert same_model(continued.folder, expected.folder)
    assert lines(continued.folder) == lines(expected.folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "cifar10-hybrid", "finetune-bit", "imagenet-s16-90", "paper-jft-b"])
def test_recipes_of_every_loss_optimizer_and_precision_learn_from_a_teacher(tmp_path, teacher, name):
    plain = ("freeze=[]", "stem_init=random", "augment.mixup_alpha=0", "augment.cutmix_alpha=0")
    small = ("image_size=8", "steps=1", "batch_size=4", "max_train_samples=8", "workers=0", "eval_every=0")
    gray = ("architecture.in_channels=1", "preprocess.mean=[0.5]", "preprocess.std=[0.5]")  # as the teacher
    learned = (*gray, "distillation_weight=1", f"teacher={teacher}")
    run = train(
        "digits", recipe=name, model="ViT-Ti/16", out=tmp_path / "run", settings=[*TINY, *plain, *small, *learned]
    )
    assert 0 < next(iter(run.metrics("train")))["loss"] < float("inf")


def test_a_teacher_that_has_changed_is_refused(tmp_path, teacher):
    save(load(teacher), tmp_path / "teacher")
    settings = [*TINY, f"teacher={tmp_path / 'teacher'}"]
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=settings, listeners=[StopAt(1)])
    changed = load(teacher)
    with torch.no_grad():
        changed.head.bias += 1
    save(changed, tmp_path / "teacher")
    with pytest.raises(TrainingError, match="the teacher has changed since the run began; restore it"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("distillation=token",), "distillation='token' needs a distillation token: architecture.distillation=true"),
        (("objective=masked",), "teacher cannot be set with objective='masked'"),
    ],
)
def test_what_cannot_be_distilled_is_said(tmp_path, teacher, settings, text):
    with pytest.raises(ConfigError, match=text):
        train("digits", out=tmp_path / "run", settings=[*TINY, f"teacher={teacher}", *settings])


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    save(tiny(tuple("xyc")), tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"does not know the classes a, b; choose another teacher"):
        Distilled(Recipe(steps=1, teacher=str(tmp_path / "teacher")), tiny(), Processes())


def test_a_teacher_of_other_channels_is_refused_before_a_run_begins(tmp_path):
    save(tiny(), tmp_path / "teacher")
    settings = [*TINY, f"teacher={tmp_path / 'teacher'}"]
    with pytest.raises(ConfigError, match="takes 3 channels, the student 1; choose another teacher"):
        train("digits", out=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_a_teacher_without_labels_is_taken_in_the_order_of_the_data_and_that_is_said(capsys):
    assert shared_classes(tiny(labels=None), tiny(), "w") is None
    assert (
        "teacher='w' has no labels: assuming that its 3 classes are in the order of the data" in capsys.readouterr().err
    )

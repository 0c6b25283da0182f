"""A head that starts as a linear probe: closed forms against refitting, and a start better than chance."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError
from vitruvian.evaluation.features import FeatureSet
from vitruvian.evaluation.probe_classifiers import STRENGTHS, fit_linear
from vitruvian.model.build import build
from vitruvian.training import Listener, read_recipe, train
from vitruvian.training.distributed import Processes
from vitruvian.training.initial_model import SCALES, fit_head, fit_least_squares, fit_logistic, is_fresh, subsample
from vitruvian.training.recipe import change_recipe


def clouds(count=60, classes=3, width=8, seed=0, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centers = spread * torch.randn(classes, width, generator=generator)
    return centers[labels] + torch.randn(count, width, generator=generator) + 5, labels


def ridge(x, y, strength, unit):
    """Written out: centered features, one solve; answers to new features."""
    center, mean = x.mean(0), y.mean(0)
    x = x - center
    weight = np.linalg.solve(x.T @ x + strength * unit * np.eye(x.shape[1]), x.T @ (y - mean))
    return lambda new: (new - center) @ weight + mean


def test_the_head_is_ridge_regression_times_a_scale():
    features, labels = clouds()
    head = fit_least_squares(features, labels, 3)
    x, y = features.double().numpy(), np.eye(3)[labels.numpy()]
    unit = ((x - x.mean(0)) ** 2).sum() / x.shape[1]
    expected = head.scale * ridge(x, y, head.strength, unit)(x)
    found = (features @ head.weight + head.bias).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)  # float32 against float64


def test_strength_and_scale_are_those_of_answers_without_the_image_itself():
    features, labels = clouds(count=24, spread=0.5)
    head = fit_least_squares(features, labels, 3, label_smoothing=0.1)
    x, y = features.double().numpy(), np.eye(3)[labels.numpy()]
    unit = ((x - x.mean(0)) ** 2).sum() / x.shape[1]

    def left_out(strength):  # 24 fits, each without one image
        return np.stack([ridge(np.delete(x, i, 0), np.delete(y, i, 0), strength, unit)(x[i]) for i in range(len(x))])

    errors = [((left_out(strength) - y) ** 2).mean() for strength in STRENGTHS]
    assert head.strength == STRENGTHS[int(np.argmin(errors))]
    answers = torch.tensor(left_out(head.strength))
    losses = [F.cross_entropy(scale * answers, labels, label_smoothing=0.1).item() for scale in SCALES]
    assert head.scale == SCALES[int(np.argmin(losses))]


def test_the_logistic_head_reads_features_as_they_are():
    features, labels = clouds()
    found = FeatureSet(
        values=features.numpy(), labels=labels.numpy(), classes=("a", "b", "c"), unreadable=[], computed=0
    )
    head = fit_logistic(found)
    expected = fit_linear(features.numpy(), labels.numpy(), classes=3, l2=head.strength).logits(features.numpy())
    np.testing.assert_allclose((features @ head.weight + head.bias).numpy(), expected.numpy(), atol=1e-4)  # float32


def test_a_feature_that_never_changes_does_no_harm():
    features, labels = clouds()
    features[:, 2] = 7.0
    head = fit_least_squares(features, labels, 3)
    assert torch.isfinite(head.weight).all()
    assert ((features @ head.weight + head.bias).argmax(1) == labels).float().mean() > 0.8


def test_many_images_are_thinned_evenly():
    source = open_dataset("digits").train
    some = subsample(source, 10)
    assert len(some) == 10
    assert (some.original(0), some.original(9)) == (0, len(source) - 1)
    assert subsample(source, len(source)) is source


def tiny(**changes):
    config = ViTConfig(
        image_size=(8, 8), patch_size=4, in_channels=1, depth=1, width=32, mlp_dim=32, num_heads=2, num_classes=10
    ).replace(**changes)
    model = build(config)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(8, 8), mean=(0.5,), std=(0.5,)))
    return model


def test_only_a_new_head_is_fitted():
    model = tiny()
    assert is_fresh(model)
    model.head.weight.data[0, 0] = 1.0
    assert not is_fresh(model)


@pytest.mark.slow
def test_of_two_heads_the_first_gives_the_answer_of_the_fit():
    recipe = read_recipe("finetune-small").replace(workers=0, head_init="least_squares")
    model = tiny(distillation=True).eval()
    head = fit_head(model, open_dataset("digits").train, recipe, processes=Processes(), report=print)
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.features(pixels).double() @ head.weight.double() + head.bias.double()
        torch.testing.assert_close(model(pixels).double(), wanted, atol=1e-4, rtol=1e-4)


class Heard(Listener):
    def __init__(self):
        self.texts, self.lines = [], []

    def said(self, text):
        self.texts.append(text)

    def recorded(self, line):
        self.lines.append(line)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["least_squares", "probe"])
def test_a_run_begins_where_the_probe_ends(tmp_path, kind):
    settings = ["steps=1", "lr=1e-9", "warmup=0", "average=none", "architecture.pool=mean"]
    heard = Heard()
    run = train("digits", out=tmp_path / "run", settings=[*settings, f"head_init={kind}"], listeners=[heard])
    assert "fitting the head to 1,438 images" in heard.texts
    assert run.metrics("val")[-1]["top1"] > 70  # random features, ten classes
    zero = train("digits", out=tmp_path / "zero", settings=settings)
    assert zero.metrics("val")[-1]["top1"] < 20


def test_a_sigmoid_loss_has_no_such_head():
    with pytest.raises(ConfigError, match="head_init='probe' needs loss='cross_entropy', not 'bce'"):
        change_recipe(read_recipe("finetune-small"), ["loss=bce"]).for_target("single")


def test_one_image_a_class_leaves_nothing_to_choose_by_and_gets_the_strongest_regularization():
    features, labels = clouds(count=3)
    found = FeatureSet(
        values=features.numpy(), labels=labels.numpy(), classes=("a", "b", "c"), unreadable=[], computed=0
    )
    head = fit_logistic(found)
    assert head.strength == 1.0
    assert (features @ head.weight + head.bias).argmax(1).tolist() == labels.tolist()

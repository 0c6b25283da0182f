"""A head that starts as a linear probe: the fit of `vit probe`, and a start better than chance."""

import numpy as np
import pytest
import torch

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError
from vitruvian.evaluation.features import FeatureSet
from vitruvian.evaluation.probe_classifiers import choose_l2, fit_linear, hold_out_examples
from vitruvian.model.build import build
from vitruvian.training import Listener, read_recipe, train
from vitruvian.training.distributed import Processes
from vitruvian.training.initial_model import fit_head, fit_logistic, is_fresh, subsample, with_head
from vitruvian.training.recipe import change_recipe


def clouds(count=60, classes=3, width=8, seed=0, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centers = spread * torch.randn(classes, width, generator=generator)
    return centers[labels] + torch.randn(count, width, generator=generator) + 5, labels


def test_the_logistic_head_reads_features_as_they_are():
    features, labels = clouds()
    found = FeatureSet(
        values=features.numpy(), labels=labels.numpy(), classes=("a", "b", "c"), unreadable=[], computed=0
    )
    weight, bias = fit_logistic(found)
    l2, _ = choose_l2(*hold_out_examples(found.examples, classes=3), classes=3)
    expected = fit_linear(features.numpy(), labels.numpy(), classes=3, l2=l2).logits(features.numpy())
    np.testing.assert_allclose((features.double() @ weight.double() + bias).numpy(), expected.numpy(), atol=1e-4)


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


@pytest.mark.parametrize("changes", [{"representation_size": 32}, {"distillation": True}, {"num_classes": 0}])
def test_another_head_reads_the_features_that_it_was_fitted_to(changes):
    model, pixels = tiny(**changes).eval(), torch.randn(2, 1, 8, 8)
    weight, bias = torch.randn(32, 3), torch.randn(3)
    with torch.no_grad():
        logits = with_head(model, (weight, bias), ("a", "b", "c"), "a probe")(pixels)
        torch.testing.assert_close(logits, model.features(pixels) @ weight + bias)


def test_only_a_new_head_is_fitted():
    model = tiny()
    assert is_fresh(model)
    model.head.weight.data[0, 0] = 1.0
    assert not is_fresh(model)


@pytest.mark.slow
def test_of_two_heads_the_first_gives_the_answer_of_the_fit():
    recipe = read_recipe("finetune-small").replace(workers=0, head_init="probe")
    model = tiny(distillation=True).eval()
    weight, bias = fit_head(model, open_dataset("digits").train, recipe, processes=Processes(), report=print)
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.features(pixels).double() @ weight.double() + bias.double()
        torch.testing.assert_close(model(pixels).double(), wanted, atol=1e-4, rtol=1e-4)


class Heard(Listener):
    def __init__(self):
        self.texts, self.lines = [], []

    def said(self, text):
        self.texts.append(text)

    def recorded(self, line):
        self.lines.append(line)


@pytest.mark.slow
def test_a_run_begins_where_the_probe_ends(tmp_path):
    settings = ["steps=1", "lr=1e-9", "warmup=0", "average=none", "architecture.pool=mean"]
    heard = Heard()
    run = train("digits", out=tmp_path / "run", settings=[*settings, "head_init=probe"], listeners=[heard])
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
    weight, bias = fit_logistic(found)
    strongest = fit_linear(*found.examples, classes=3, l2=1.0).logits(features.numpy())
    logits = features.double() @ weight.double() + bias
    np.testing.assert_allclose(logits.numpy(), strongest.numpy(), atol=1e-4)
    assert logits.argmax(1).tolist() == labels.tolist()

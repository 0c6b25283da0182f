"""Every recipe of the paper trains in small: a tiny model learns a few colors within seconds."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvian.config import ResNetConfig
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.evaluation.metrics import class_measures, score_logits
from vitruvian.training import read_recipe, recipe_names, train
from vitruvian.training.initial_model import config_of
from vitruvian.training.objective import LOSSES

PAPER = [name for name in recipe_names() if name.startswith("paper-")]
COLORS = np.array([(240, 16, 16), (16, 240, 16), (16, 16, 240), (240, 240, 16), (240, 16, 240), (16, 240, 240)])
SHORT = {"epochs": 0.0, "steps": 60, "batch_size": 24, "warmup": 6.0, "workers": 0, "eval_every": 0.0}


class Colors(torch.utils.data.Dataset):
    """Noisy images of 6 colors, the same color in all of an image."""

    classes = ("red", "green", "blue", "yellow", "magenta", "cyan")

    def __len__(self):
        return 144

    def __getitem__(self, index):
        noise = np.random.default_rng(index).normal(0, 20, (16, 16, 3))
        return Image.fromarray((COLORS[index % 6] + noise).clip(0, 255).astype(np.uint8)), index % 6


def tiny(recipe):
    """The recipe with a model of some ten thousand parameters and a few steps; everything else is its own."""
    config, single = config_of(recipe, 6), {"precision": "float32", "parallel": "ddp", "image_size": 16}
    if isinstance(config, ResNetConfig):
        return recipe.replace(architecture={"stages": (1,), "width": 32}, **SHORT, **single)
    shape = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4}
    if recipe.architecture.get("representation_size"):
        shape["representation_size"] = 32
    if config.stem:
        shape |= {"stem": dataclasses.replace(config.stem, stages=(1,), width=32), "patch_size": 1}
    return recipe.replace(architecture={**recipe.architecture, **shape}, **SHORT, **single)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_a_small_version_of_every_recipe_of_the_paper_learns(tmp_path, name):
    """Chance is 16.7%: the share of a color among images, and among the patches that `paper-masked` predicts."""
    recipe = tiny(read_recipe(name))
    if recipe.objective == "masked":  # its learning rate of 2e-4 takes 1,000,000 steps
        recipe = recipe.replace(steps=150, lr=4e-3)
    run = train(Colors(), recipe=recipe, out=tmp_path / "run", progress=False)
    assert run.evaluation["top1"] > 40
    assert run.model().meta.score_function == ("sigmoid" if recipe.loss == "bce" else "softmax")


@pytest.mark.parametrize("loss", ["bce", "cross_entropy"])
def test_the_validation_loss_is_the_loss_that_training_minimizes(tmp_path, loss):
    recipe = tiny(read_recipe("paper-jft-b")).replace(loss=loss, steps=3, warmup=0.0)
    run = train("digits", recipe=recipe, out=tmp_path / "run", progress=False)
    result = evaluate("digits", run.model())
    assert result.measures.loss_name == {"bce": "binary cross-entropy", "cross_entropy": "cross-entropy"}[loss]
    assert result.measures.loss == pytest.approx(run.evaluation["loss"], rel=1e-5)


@pytest.mark.parametrize(("score_function", "loss"), [("sigmoid", "bce"), ("softmax", "cross_entropy")])
def test_metrics_have_the_loss_of_the_score_function(score_function, loss):
    logits, labels = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 5
    kind = {"classes": 5, "score_function": score_function}
    measures = class_measures(score_logits(logits, labels, torch.arange(7), **kind), **kind)
    assert measures.loss == pytest.approx(LOSSES[loss](logits, labels, 0.0).mean().item())
    worst = measures.mistakes[0]
    probabilities = logits[worst].sigmoid() if loss == "bce" else logits[worst].softmax(dim=0)
    assert measures.probabilities[worst] == pytest.approx(probabilities.max().item())

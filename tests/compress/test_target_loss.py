"""The loss of a faster model of several labels in mAP, and of numbers in their mean absolute error."""

import numpy as np
import pytest
import torch

from vitruvian.compress.fewer_tokens import fit_cascade
from vitruvian.compress.loss import PixelSample, accuracy_loss
from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.build import build
from vitruvian.targets import Target


def model_of(target, labels):
    config = ViTConfig(image_size=8, patch_size=4, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=len(labels))
    model = build(config, seed=0)
    score = "sigmoid" if target.kind == "multi" else "identity"
    model.meta = model.meta.replace(labels=labels, target=target, score_function=score)
    return model


def sample_of(targets):
    blank = np.zeros((len(targets), 3, 8, 8), np.float32)
    return PixelSample(name="images", pixels=blank, labels=np.full(len(targets), -1), space=None, targets=targets)


def test_several_labels_lose_mean_average_precision():
    generator = np.random.default_rng(0)
    targets = (generator.random((64, 2)) < 0.4).astype(float)
    model = model_of(Target(kind="multi", thresholds=(0.5, 0.5)), ("a", "b"))
    before = torch.from_numpy(8 * targets - 4)
    loss = accuracy_loss(model, before, before, sample_of(targets))
    assert (loss.metric, loss.before, loss.after, loss.points) == ("mAP", 100, 100, 0)
    after = before.clone()
    after[:8] *= -1
    worse = accuracy_loss(model, before, after, sample_of(targets))
    assert worse.agreement == pytest.approx(87.5)
    assert worse.points >= worse.before - worse.after > 5
    assert "mAP 100.00 -> " in str(worse)


def test_numbers_lose_in_percent_of_their_mean_absolute_error():
    targets = np.arange(64.0)[:, None]
    model = model_of(Target(kind="number", mean=(32.0,), std=(10.0,)), ("age",))
    before = torch.from_numpy((targets + 1 - 32) / 10)
    after = torch.from_numpy((targets + 1.5 - 32) / 10)
    loss = accuracy_loss(model, before, after, sample_of(targets))
    assert (loss.metric, loss.before, loss.after) == ("MAE", pytest.approx(1), pytest.approx(1.5))
    assert loss.points == pytest.approx(50)


def test_a_cascade_needs_one_class_per_image():
    with pytest.raises(ConfigError, match="cascades are for models of one class per image"):
        fit_cascade(model_of(Target(kind="multi"), ("a", "b")), "digits")

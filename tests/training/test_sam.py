"""Sharpness-aware minimization: SAM and GSAM against independent formulas, and runs that use them."""

import numpy as np
import pytest
import torch
from runs import TINY
from torch import nn
from torch.func import functional_call

import vitruvian as vt
from vitruvian.data.augment import normalize_batch
from vitruvian.errors import ConfigError
from vitruvian.training.loop import Trainer
from vitruvian.training.optimizer import sharpness_aware
from vitruvian.training.recipe import Recipe

PLAIN = (*TINY, "optimizer=sgd", "momentum=0", "schedule=constant", "lr=0.05", "label_smoothing=0", "workers=0")


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_gradients_of_a_quadratic_are_those_of_the_papers(alpha):
    rng = np.random.default_rng(0)
    root, start, rho = rng.normal(size=(5, 5)), rng.normal(size=5), 0.3
    hessian = root @ root.T
    clean = hessian @ start
    robust = hessian @ (start + rho * clean / np.linalg.norm(clean))
    direction = robust / np.linalg.norm(robust)
    expected = robust - alpha * (clean - (clean @ direction) * direction)

    model = nn.Module()
    model.one, model.two = (nn.Parameter(torch.tensor(part)) for part in (start[:2], start[2:]))

    def backward():
        weights = torch.cat([model.one, model.two])
        (0.5 * weights @ torch.tensor(hessian) @ weights).backward()

    backward()
    sharpness_aware(model, backward, rho=rho, alpha=alpha)
    gradient = torch.cat([model.one.grad, model.two.grad]).numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    assert np.array_equal(torch.cat([model.one, model.two]).detach().numpy(), start)


def train(folder, *settings):
    return vt.train("digits", recipe="digits", out=folder, settings=[*PLAIN, *settings], progress=False)


def weights_of(run):
    return {name: tensor.clone() for name, tensor in vt.load(run.folder / "model").state_dict().items()}


def largest_difference(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_is_that_of_an_independent_implementation(tmp_path, monkeypatch, clip):
    records, step_of = [], Trainer.step

    def recorded(self, batch, step):
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        sums = step_of(self, batch, step)
        after = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        records.append((self.model, normalize_batch(batch.pixels, self.augment), batch.labels, before, after))
        return sums

    monkeypatch.setattr(Trainer, "step", recorded)
    off = ("augment.mixup_alpha=0", "augment.cutmix_alpha=0", "architecture.dropout=0", "architecture.drop_path=0")
    train(tmp_path / "run", "steps=2", "sam_rho=0.5", f"grad_clip={clip}", "weight_decay=0", "average=none", *off)
    for model, pixels, labels, before, after in records:

        def gradient(weights, model=model, pixels=pixels, labels=labels):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
            loss = nn.functional.cross_entropy(functional_call(model.train(), leaves, (pixels,)), labels)
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

        def norm(gradients):
            return torch.cat([g.flatten() for g in gradients.values()]).norm()

        first = gradient(before)
        second = gradient({name: before[name] + 0.5 * first[name] / norm(first) for name in before})
        factor = min(1.0, clip / float(norm(second))) if clip else 1.0
        for name, tensor in after.items():
            # float32 sums in another order
            torch.testing.assert_close(tensor, before[name] - 0.05 * factor * second[name], atol=1e-6, rtol=1e-4)


def test_accumulated_parts_give_the_step_of_the_whole_batch(tmp_path):
    runs = [train(tmp_path / str(parts), "sam_rho=0.1", f"grad_accum_steps={parts}") for parts in (1, 4)]
    plain = train(tmp_path / "plain")
    one, two, without = map(weights_of, (*runs, plain))
    assert largest_difference(one, two) < 1e-5
    assert largest_difference(one, without) > 1e-3


def test_gsam_differs_from_sam(tmp_path):
    one, two = (train(tmp_path / name, "sam_rho=0.1", f"gsam_alpha={name}") for name in ("0", "0.4"))
    assert largest_difference(weights_of(one), weights_of(two)) > 1e-5


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="sam_rho needs precision='float32' or 'bfloat16'"):
        Recipe(epochs=1, sam_rho=0.1, precision="float16")
    with pytest.raises(ConfigError, match=r"gsam_alpha=0\.4 needs sam_rho"):
        Recipe(epochs=1, gsam_alpha=0.4)

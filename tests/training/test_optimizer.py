"""Parameter groups, optimizers, schedules and averaged weights."""

import math

import pytest
import torch
from torch import nn

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.build import build
from vitruvian.training.optimizer import (
    Average,
    Muon,
    Schedule,
    build_optimizer,
    freeze,
    layers_above,
    set_lr,
    to_steps,
    trainable,
)
from vitruvian.training.recipe import Recipe


def tiny():
    return build(ViTConfig(image_size=8, patch_size=4, num_classes=3, depth=2, width=16, mlp_dim=16, num_heads=2))


def named_groups(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [({names[p] for p in group["params"]}, group) for group in optimizer.param_groups]


def test_only_kernels_decay():
    model = tiny()
    decaying = set()
    for names, group in named_groups(model, build_optimizer(model, Recipe(epochs=1, weight_decay=0.1))):
        if group["weight_decay"]:
            decaying |= names
    assert decaying == {name for name, p in model.named_parameters() if name.endswith("weight") and p.dim() > 1}
    assert "embed.pos_embed" not in decaying


def test_all_parameters_decay_if_asked():
    model = tiny()
    groups = build_optimizer(model, Recipe(epochs=1, weight_decay=0.1, weight_decay_on="all")).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1]


@pytest.mark.parametrize(("decouple", "shrunk"), [(False, 1 - 0.5 * 0.1), (True, 1 - 0.1)])
def test_decay_is_multiplied_by_lr_or_not(decouple, shrunk):
    model = tiny()
    recipe = Recipe(epochs=1, lr=0.5, weight_decay=0.1, decouple_lr=decouple)
    optimizer = build_optimizer(model, recipe)
    weight = model.blocks[0].mlp.fc1.weight
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * shrunk)


def test_the_lr_falls_from_layer_to_layer():
    model = tiny()
    optimizer = build_optimizer(model, Recipe(epochs=1, layer_decay=0.5))
    set_lr(optimizer, 0.8)
    lrs = {name: group["lr"] for names, group in named_groups(model, optimizer) for name in names}
    assert lrs["head.weight"] == lrs["norm.weight"] == pytest.approx(0.8)
    assert lrs["blocks.1.norm1.weight"] == pytest.approx(0.4)
    assert lrs["blocks.0.mlp.fc1.bias"] == pytest.approx(0.2)
    assert lrs["embed.patch.weight"] == lrs["embed.pos_embed"] == pytest.approx(0.1)


def test_a_resnet_has_layers_too():
    model = build(ResNetConfig(image_size=32, num_classes=2, stages=(1, 1), width=32))
    assert [layers_above(model, name) for name in ("root.weight", "stages.0.0.conv1.weight", "head.bias")] == [3, 2, 0]


def test_frozen_parameters_do_not_learn():
    model = tiny()
    freeze(model, Recipe(steps=1, freeze=("embed.*", "blocks.0.*")))
    assert {name.split(".")[0] for name, _ in trainable(model)} == {"blocks", "norm", "head"}
    assert not any(name.startswith("blocks.0.") for name, _ in trainable(model))


def test_a_pattern_that_fits_nothing_is_an_error():
    with pytest.raises(UnknownNameError, match=r"unknown parameters to freeze 'head.wight'; did you mean head.weight"):
        freeze(tiny(), Recipe(steps=1, freeze=("head.wight",)))


@pytest.mark.parametrize(("share", "frozen"), [(0.0, 0), (0.1, 0), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_a_share_of_the_layers_is_frozen_from_the_embedding_on(share, frozen):
    model = build(ViTConfig(image_size=(8, 8), patch_size=4, depth=4, width=8, mlp_dim=8, num_heads=2, num_classes=3))
    freeze(model, Recipe(steps=1, freeze_layers=share))
    assert [all(p.requires_grad for p in block.parameters()) for block in model.blocks] == [
        number >= frozen for number in range(4)
    ]
    assert all(p.requires_grad == (frozen == 0) for p in model.embed.parameters())
    assert model.head.weight.requires_grad
    assert model.norm.weight.requires_grad


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match=r"freeze=\['\*'\] with freeze_layers=0 leaves no parameter to train"):
        freeze(tiny(), Recipe(steps=1, freeze=("*",)))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_every_optimizer_takes_a_step(name):
    model = tiny()
    optimizer = build_optimizer(model, Recipe(epochs=1, optimizer=name))
    before = model.head.weight.detach().clone()
    model(torch.randn(2, 3, 8, 8)).logsumexp(1).sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


def test_muon_takes_orthogonal_steps_in_hidden_matrices_and_those_of_adamw_elsewhere():
    torch.manual_seed(0)
    models = [tiny(), tiny()]
    recipes = [Recipe(epochs=1, lr=0.1, optimizer=name, momentum=0.95) for name in ("muon", "adamw")]
    optimizers = [build_optimizer(model, recipe) for model, recipe in zip(models, recipes)]
    before = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    for pair in zip(*(model.parameters() for model in models)):
        pair[0].grad = torch.randn_like(pair[0])
        pair[1].grad = pair[0].grad.clone()
    for optimizer in optimizers:
        set_lr(optimizer, 0.1)
        optimizer.step()
    found, adamw = (dict(model.named_parameters()) for model in models)
    for name in ("head.weight", "embed.pos_embed", "blocks.0.norm1.weight", "blocks.1.mlp.fc1.bias"):
        torch.testing.assert_close(found[name], adamw[name])
    for name, parts in (
        ("blocks.0.attn.qkv.weight", 3),
        ("blocks.0.mlp.fc1.weight", 1),
        ("embed.patch.weight", 1),
    ):
        for change in (before[name] - found[name]).detach().flatten(1).chunk(parts):
            values = torch.linalg.svdvals(change) / (0.1 * 0.2 * max(change.shape) ** 0.5)
            assert values.min() > 0.3, name
            assert values.max() < 1.3, name


def test_muon_agrees_with_that_of_pytorch(monkeypatch):
    monkeypatch.setattr("vitruvian.training.optimizer.ITERATIONS", 5)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(8, 12)) for _ in range(2)]
    group = {"params": weights[:1], "weight_decay": 0.1, "lr_scale": 1.0, "matrices": 1}
    ours = Muon([group], Recipe(epochs=1, lr=0.1, momentum=0.95, optimizer="muon"))
    theirs = torch.optim.Muon(weights[1:], lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        weights[0].grad = torch.randn(8, 12)
        weights[1].grad = weights[0].grad.clone()
        ours.step()
        theirs.step()
    # PyTorch's own computes in bfloat16
    torch.testing.assert_close(weights[0], weights[1], atol=5e-3, rtol=0)


def schedule(kind, **changes):
    return Schedule(Recipe(epochs=1, **{"schedule": kind, "lr": 0.8, "warmup": 20} | changes), 100)


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
    made = schedule(kind, min_lr=0.1, timescale=25.0)
    for step in range(20, 100):
        assert made.lr_at(step) == pytest.approx(form((step - 20) / 80))


def test_cool_down_ends_at_the_end_rate():
    made = schedule("rsqrt", cooldown=10, min_lr=0.01)
    assert made.lr_at(90) == schedule("rsqrt").lr_at(90)
    assert made.lr_at(95) == pytest.approx(0.01 + (schedule("rsqrt").lr_at(95) - 0.01) / 2)
    assert made.lr_at(100) == pytest.approx(0.01)


def test_a_length_below_one_is_a_share_of_the_run():
    assert [to_steps(0.1, 50), to_steps(1, 50), to_steps(7, 50)] == [5, 1, 7]
    assert Schedule(Recipe(epochs=1, warmup=0.2), 40).warmup == 8


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup and cooldown of 200 and 0 steps do not fit into the 100 steps"):
        schedule("cosine", warmup=200)


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

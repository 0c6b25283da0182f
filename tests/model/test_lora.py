"""LoRA and DoRA layers: they start as the layers they replace, freeze the rest, and merge into plain weights."""

import copy

import pytest
import torch

from vitruvian.config import LoraConfig, ResNetConfig, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.build import build
from vitruvian.model.lora import add_lora, lora_layers, plain_state

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=3)
KINDS = [{}, {"dora": True}, {"targets": ("all",)}, {"targets": ("all",), "dora": True}, {"targets": ("qkv",)}]


def pixels():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def tiny(**settings):
    model = build(TINY.replace(**settings), seed=3)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model.eval()


def disturb(model):
    """Give all trainable parameters other values, as training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_update_changes_no_output_and_a_merged_one_gives_the_same_output(kind):
    model, x = tiny(), pixels()
    before = model(x)
    add_lora(model, LoraConfig(rank=4, **kind))
    assert torch.allclose(model(x), before, atol=1e-6)  # DoRA multiplies by a length and divides by it
    disturb(model)
    plain = build(TINY)
    plain.load_state_dict(plain_state(model))
    assert not torch.allclose(model(x), before, atol=1e-2)
    assert torch.allclose(plain.eval()(x), model(x), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_updates_and_head_get_gradients_and_a_step_reduces_the_loss(kind):
    model, x, y = tiny(), pixels(), torch.tensor([0, 1, 2])
    frozen = copy.deepcopy(model.state_dict())
    add_lora(model, LoraConfig(rank=4, **kind))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert losses[-1] < losses[0]
    assert all(torch.equal(state[name], frozen[name]) for name in frozen if not name.startswith("head."))
    assert all(bool(layer.lora_B[part].any()) for _, layer in lora_layers(model) for part in layer.lora_B)


def test_updates_are_of_the_chosen_slices_alone():
    model = tiny()
    weight = model.blocks[1].attn.qkv.weight.detach().clone()
    add_lora(model, LoraConfig(rank=2))
    difference = plain_state(disturb(model))["blocks.1.attn.qkv.weight"] - weight
    assert [bool(part.any()) for part in difference.chunk(3)] == [True, False, True]


def test_alpha_is_twice_the_rank_unless_given():
    assert (LoraConfig(rank=8).scale, LoraConfig(rank=8, alpha=4).scale) == (2, 0.5)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (("q", "qkv"), r"lora.targets=\['q', 'qkv'\] is empty, or has a layer twice"),
        ((), r"lora.targets=\[\] is empty"),
        (("heads",), "targets='heads' is not one of all, q, k, v, qkv, proj, fc1, fc2"),
    ],
)
def test_invalid_targets_are_refused(targets, text):
    with pytest.raises(ConfigError, match=text):
        LoraConfig(rank=1, targets=targets)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match=r"lora.targets=\['q', 'v'\]: this model has no layers"):
        add_lora(build(ResNetConfig(stages=(1,), num_classes=2)), LoraConfig(rank=2))

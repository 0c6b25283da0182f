"""New models start as the paper's release starts them."""

import math

import pytest
import torch

from vitruvian import create_model
from vitruvian.config import ViTConfig
from vitruvian.errors import UnknownNameError
from vitruvian.model.build import build


def test_names_and_settings_give_a_model():
    model = create_model("vit_tiny_patch16_224", num_classes=10, image_size=(32, 64), depth=1)
    assert model.config.num_classes == 10
    assert model.meta.preprocess.image_size == (32, 64)
    assert model(torch.zeros(1, 3, 32, 64)).shape == (1, 10)


def test_an_unknown_setting_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown setting of ViT-B/16 'classes'; did you mean num_classes"):
        create_model("ViT-B/16", classes=10)


def test_initial_values_are_those_of_the_release():
    model = create_model("ViT-S/16", depth=2, pos_embed="learned")
    assert (model.head.weight == 0).all()
    assert (model.head.bias == 0).all()
    assert (model.embed.cls_token == 0).all()
    assert model.embed.pos_embed.std().item() == pytest.approx(0.02, rel=0.02)
    block = model.blocks[0]
    assert block.mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    assert (block.attn.qkv.bias == 0).all()
    # xavier-uniform of each projection: limit sqrt(6 / (in + out)), deviation limit / sqrt(3)
    for weight, fans in [(block.mlp.fc1.weight, 384 + 1536), *((w, 768) for w in block.attn.qkv.weight.chunk(3))]:
        limit = math.sqrt(6 / fans)
        assert weight.abs().max().item() == pytest.approx(limit, rel=0.01)
        assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    assert model.embed.patch.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 16 * 16), rel=0.02)


def test_the_seed_decides_every_value():
    config = ViTConfig(image_size=16, patch_size=8, depth=1, width=8, mlp_dim=8, num_heads=2, num_classes=2)
    one, same, other = (build(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.patch.weight"], other["embed.patch.weight"])


def test_building_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    build(ViTConfig(image_size=16, patch_size=8, depth=1, width=8, mlp_dim=8, num_heads=2, num_classes=2))
    assert torch.equal(before, torch.get_rng_state())

"""Kinds beside the paper's: each learns in every parameter, gives feature maps and explains itself, or says why not."""

import pytest
import torch

import vitruvian as vt
from vitruvian.config import Numerics, RopeConfig, StemConfig, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.explain.attention import attention_map, attention_rollout, gradient_attention
from vitruvian.explain.figures import attention_distance
from vitruvian.model.build import build

TINY = ViTConfig(image_size=32, patch_size=8, depth=2, width=16, mlp_dim=24, num_heads=2, num_classes=3)
KINDS = {
    "differential": {"attention": "differential"},
    "factorized": {"pos_embed": "factorized", "numerics": Numerics(square_positions=True)},
    "ResNet-D": {"stem": StemConfig(style="resnet_d", stages=(1, 1), width=8), "patch_size": 1},
    "MobileCLIP": {"stem": StemConfig(style="mobile_clip", stages=(), width=8), "patch_size": 1},
    "scale of attention alone": {"layer_scale": True, "mlp_scale": False},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_kind_learns_in_every_parameter_and_is_explained(changes):
    model = build(TINY.replace(**changes))
    torch.nn.init.normal_(model.head.weight)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model.train()(pixels).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert gradient_attention(model, pixels).shape == attention_map(model, pixels).shape == (2, 4, 4)
    assert model.eval().features(pixels).shape == (2, 16)


def test_shares_of_differential_attention_are_refused():
    model = build(TINY.replace(attention="differential"))
    pixels = torch.zeros(1, 3, 32, 32)
    with pytest.raises(ConfigError, match="attention rollout is not defined for differential attention"):
        attention_rollout(model, pixels)
    with pytest.raises(ConfigError, match="attention distance is not defined for differential attention"):
        attention_distance(model, [pixels])


@torch.no_grad()
def test_square_positions_have_the_same_step_down_and_across(tmp_path):
    """The upper left part of a square image's positions is what an oblong one of the same longer side has."""
    model = build(TINY.replace(numerics=Numerics(position_resize="bicubic_antialias", square_positions=True)))
    square, oblong = (model.embed.grid_positions(grid) for grid in ((6, 6), (6, 2)))
    torch.testing.assert_close(oblong, square[:, :2])
    vt.save(model, tmp_path / "m")
    assert vt.load(tmp_path / "m").config == model.config


@pytest.mark.parametrize("changes", [{"pos_embed": "relative_bias", "pool": "mean"}, {"rope": RopeConfig()}])
def test_a_model_learns_after_it_has_answered_in_inference_mode(changes):
    """Tables of places are kept between calls, and one that was made in inference mode cannot be learned with."""
    config = ViTConfig(image_size=40, patch_size=8, width=32, mlp_dim=48, depth=1, num_heads=4, num_classes=2)
    model = build(config.replace(**changes))
    pixels = torch.randn(2, 3, 40, 40)
    with torch.inference_mode():
        model(pixels)
    model(pixels).sum().backward()
    assert model.embed.patch.weight.grad is not None

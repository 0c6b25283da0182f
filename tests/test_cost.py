"""Counts from settings equal the published ones, and those of the modules themselves."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitruvian.catalog import VARIANTS, resolve
from vitruvian.config import RopeConfig, StemConfig, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.model.build import build, empty

PUBLISHED = {
    "ViT-Ti/16": 5_717_416,
    "ViT-S/16": 22_050_664,
    "ViT-B/16": 86_567_656,
    "ViT-B/32": 88_224_232,
    "ViT-L/16": 304_326_632,
    "ViT-L/32": 306_535_400,
    "ViT-H/14": 632_045_800,
    "CLIP-B/32": 87_456_000,  # the image tower, as transformers counts it
    "SigLIP-B/16": 92_884_224,
    "Mixer-S/32": 19_104_624,  # the table of the MLP-Mixer paper, in millions: 19, 18, 60, 59, 207 and 431
    "Mixer-S/16": 18_528_264,
    "Mixer-B/32": 60_293_428,
    "Mixer-B/16": 59_880_472,
    "Mixer-L/16": 208_196_168,
}
PUBLISHED_GIGA_MULTIPLY_ADDS = {
    "ViT-B/16": "17.6",
    "ViT-B/32": "4.4",
    "ViT-L/16": "61.6",
    "ViT-L/32": "15.4",
    "ViT-H/14": "167",
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_count_is_the_published_one(name, count):
    assert parameters(resolve(name)) == count


@pytest.mark.parametrize(("name", "giga"), PUBLISHED_GIGA_MULTIPLY_ADDS.items())
def test_multiply_adds_are_the_published_ones(name, giga):
    digits = len(giga.split(".")[1]) if "." in giga else 0
    assert f"{multiply_adds(resolve(name)) / 1e9:.{digits}f}" == giga


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.slow
def test_counted_parameters_are_those_of_the_module(name):
    assert parameters(VARIANTS[name]) == sum(p.numel() for p in empty(VARIANTS[name]).parameters())


TINY = ViTConfig(image_size=(16, 24), patch_size=8, depth=2, width=32, mlp_dim=48, num_heads=4, num_classes=5)
ODD_ONES = {
    "wide attention": {"attn_dim": 48, "num_heads": 6, "attn_norm": True},
    "map": {"pool": "map", "cls_token": False},
    "two-dimensional positions": {"pos_embed": "learned_2d"},
    "relative positions": {"pos_embed": "relative"},
    "sin-cos positions": {"pos_embed": "sincos"},
    "no positions": {"pos_embed": "none"},
    "positions in every layer": {"pos_embed_at": "every_layer"},
    "positions shared by all layers": {"pos_embed": "learned_2d", "pos_embed_at": "every_layer_shared"},
    "axial": {"attention": "axial", "pool": "mean", "cls_token": False, "depth": 3},
    "mixer": {"attention": "mixer", "mixer_dim": 20, "pool": "mean", "cls_token": False, "pos_embed": "none"},
    "gated": {"mlp": "swiglu", "qkv_bias": False, "reg_tokens": 2},
    "distilled": {"distillation": True, "layer_scale": True, "cls_pos_embed": False},
    "pre-logits": {"representation_size": 7, "pool": "token_mean"},
    "headless": {"num_classes": 0},
    "mixed rotary": {"rope": RopeConfig(kind="mixed"), "qk_norm": True, "attn_norm": True, "mlp_norm": True},
    "relative bias": {"pos_embed": "relative_bias", "norm": "rms", "dense_bias": False},
    "parallel": {
        "block": "parallel",
        "layer_scale": True,
        "patch_norm": True,
        "pre_norm": True,
        "patch_bias": False,
        "final_norm": False,
    },
    "map beside a class token": {"pool": "map", "pool_num_heads": 2, "pool_mlp_dim": 8, "norm": "rms"},
    "projection": {"representation_size": 7, "projection": True},
    "two tokens concatenated": {"pool": "prefix_concat", "pool_tokens": 2, "reg_tokens": 2},
    "gray": {"in_channels": 1},
    "differential": {"attention": "differential", "qk_norm": True},
    "factorized positions": {"pos_embed": "factorized"},
    "ResNet-D": {"stem": StemConfig(style="resnet_d", stages=(1, 2), width=8), "patch_size": 1},
    "stem of MobileCLIP": {"stem": StemConfig(style="mobile_clip", stages=(), width=8), "patch_size": 1},
    "plain stem": {"stem": StemConfig(style="conv", stages=(1, 2), width=8), "patch_size": 2},
}


@pytest.mark.parametrize("changes", ODD_ONES.values(), ids=ODD_ONES)
def test_counted_parameters_follow_every_option(changes):
    config = TINY.replace(**changes)
    assert parameters(config) == sum(p.numel() for p in empty(config).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *ODD_ONES, "R26+ViT-S/32", "BiT-R50x1"])
def test_multiply_adds_are_what_torch_counts(name):
    config = VARIANTS.get(name) or TINY.replace(**ODD_ONES.get(name, {}))
    pixels = torch.zeros(1, config.in_channels, *config.image_size)
    model = build(config).eval()
    # torch does not count its fused attention on a CPU; the plain products are the same work
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # published counts are of every token in every block, also of those that a forward pass need not compute
        model.forward_head(model.forward_features(pixels)) if isinstance(config, ViTConfig) else model(pixels)
    assert counter.get_total_flops() == 2 * multiply_adds(config)

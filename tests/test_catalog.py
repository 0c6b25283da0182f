"""Names in every dialect lead to the published shapes."""

import pytest

from vitruvian.catalog import VARIANTS, canonical, resolve, title_of
from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "variant", "side"),
    [
        ("ViT-B/16", "ViT-B/16", None),
        ("B/16", "ViT-B/16", None),
        ("vit_b_16", "ViT-B/16", None),
        ("vit_h_14", "ViT-H/14", None),
        ("ViT-B_16", "ViT-B/16", None),
        ("ViT-B_16.npz", "ViT-B/16", None),
        ("vit_base_patch16_224", "ViT-B/16", 224),
        ("vit_base_patch16_384", "ViT-B/16", 384),
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "ViT-Ti/16", 224),
        ("google/vit-base-patch16-224", "ViT-B/16", 224),
        ("google/vit-large-patch32-224-in21k", "ViT-L/32", 224),
        ("R50+ViT-B_16", "R50+ViT-B/16", None),
        ("R50+B/16", "R50+ViT-B/16", None),
        ("R26_S_32", "R26+ViT-S/32", None),
        ("vit_small_r26_s32_224", "R26+ViT-S/32", 224),
        ("vit_tiny_r_s16_p8_224", "R+ViT-Ti/16", 224),
        ("R+Ti/16", "R+ViT-Ti/16", None),
        ("R152x2", "BiT-R152x2", None),
        ("BiT-M-R101x1", "BiT-R101x1", None),
        ("resnetv2_50x1_bit", "BiT-R50x1", None),
        ("facebook/deit-base-distilled-patch16-384", "DeiT-B/16-distilled", 384),
        ("deit3_small_patch16_224", "DeiT-III-S/16", 224),
        ("facebook/dino-vits16", "DINO-S/16", None),
        ("facebook/dinov2-base", "DINOv2-B/14", None),
        ("dinov2_vitl14", "DINOv2-L/14", None),
        ("vit_giant_patch14_224", "ViT-g/14", 224),
        ("ViT-G/14", "ViT-G/14", None),
    ],
)
def test_each_dialect_names_the_same_model(name, variant, side):
    assert canonical(name) == (variant, side and (side, side))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown model 'vit_bse_patch16'; did you mean vit_base_patch16 or"):
        resolve("vit_bse_patch16")


def test_a_size_that_the_patch_does_not_divide_is_refused_with_the_name():
    with pytest.raises(ConfigError, match=r"vit_base_patch16_225: image of 225x225 pixels is not divisible"):
        resolve("vit_base_patch16_225")


@pytest.mark.parametrize("size", ["Ti", "S", "B", "L", "H"])
@pytest.mark.parametrize("patch", [8, 14, 16, 32])
def test_every_size_of_the_paper_comes_with_every_patch(size, patch):
    config = VARIANTS[f"ViT-{size}/{patch}"]
    assert isinstance(config, ViTConfig)
    assert (config.patch_size, config.grid) == (patch, (224 // patch, 224 // patch))


def test_hybrids_step_over_the_image_as_their_release_does():
    steps = {name: VARIANTS[name].stride for name in VARIANTS if "+" in name}
    assert steps["R50+ViT-B/16"] == steps["R50+ViT-L/16"] == 16
    assert steps["R26+ViT-S/32"] == steps["R50+ViT-L/32"] == 32
    assert steps["R+ViT-Ti/16"] == 32  # the release's name says 16; its root steps 4, its patch 8


def test_baselines_are_resnets():
    assert all(isinstance(VARIANTS[name], ResNetConfig) for name in VARIANTS if name.startswith("BiT"))


def test_a_model_is_called_by_its_variant_or_by_its_size():
    assert title_of(resolve("vit_base_patch16_384").replace(num_classes=10)) == "ViT-B/16"
    assert title_of(resolve("R50+ViT-L/32")) == "R50+ViT-L/32"
    assert title_of(resolve("BiT-R50x3").replace(num_classes=2)) == "BiT-R50x3"
    assert title_of(resolve("ViT-Ti/16").replace(depth=4, width=96)) == "ViT of depth 4, width 96, patch 16"
    assert title_of(resolve("BiT-R50x1").replace(stages=(1, 1))) == "ResNet of 2 units, width 64"

"""Model names of every library, the table of published weights, and the classes of ImageNet."""

import re
import subprocess
import sys

import pytest

from vitruvian.catalog import (
    PUBLISHED,
    VARIANTS,
    canonical,
    find_published,
    imagenet_ids,
    imagenet_labels,
    published_for,
    published_names,
    resolve,
    title_of,
)
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
        ("ViT-b/32", "ViT-b/32", None),
        ("ViT-b_32", "ViT-b/32", None),
        ("ViT-b-32", "ViT-b/32", None),
        ("b/32", "ViT-b/32", None),
        ("vit_b_32", "ViT-B/32", None),
        ("vit-b/32", "ViT-B/32", None),
        ("R50x2", "BiT-R50x2", None),
        ("BiT-R152x1", "BiT-R152x1", None),
        ("R200x3", "BiT-R200x3", None),
    ],
)
def test_each_dialect_names_the_same_model(name, variant, side):
    assert canonical(name) == (variant, side and (side, side))


def test_the_halved_model_of_figure_4_is_spelled_with_a_small_letter():
    """ViT-b/32 is ViT-B/32 with all hidden dimensions halved: those of tokens, MLP and heads."""
    half, base = resolve("ViT-b/32"), resolve("ViT-B/32")
    assert [2 * size for size in (half.width, half.mlp_dim, half.head_width)] == [
        base.width,
        base.mlp_dim,
        base.head_width,
    ]
    assert (half.depth, half.num_heads, half.patch_size) == (base.depth, base.num_heads, base.patch_size)
    assert title_of(half) == "ViT-b/32"
    assert title_of(resolve("ViT-S/32")) == "ViT-S/32"


@pytest.mark.parametrize("name", ["ViT-b/14", "R50+ViT-b/32", "Axial-ViT-b/16"])
def test_other_names_with_the_small_letter_do_not_stand_for_the_large_model(name):
    with pytest.raises(UnknownNameError, match=f"unknown model {re.escape(repr(name))}"):
        resolve(name)


def test_the_resnets_of_table_6_have_names():
    assert resolve("R50x2") == ResNetConfig(stages=(3, 4, 6, 3), width=128)
    assert resolve("R152x1") == ResNetConfig(stages=(3, 8, 36, 3), width=64)
    assert resolve("R200x3") == ResNetConfig(stages=(3, 24, 36, 3), width=192)


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


STORAGE = "https://storage.googleapis.com"


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("ViT-B_16", f"{STORAGE}/vit_models/imagenet21k/ViT-B_16.npz"),
        ("ViT-B_16-224", f"{STORAGE}/vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz"),
        (
            "howto-i21k-L/16",
            f"{STORAGE}/vit_models/augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz",
        ),
        (
            "augreg/B_16-i21k-384",
            f"{STORAGE}/vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
            "--imagenet2012-steps_20k-lr_0.03-res_384.npz",
        ),
        ("i1k-s16-90ep", f"{STORAGE}/big_vision/vit_s16_i1k_90ep.npz"),
        ("BiT-M-R50x1-ILSVRC2012", f"{STORAGE}/bit_models/BiT-M-R50x1-ILSVRC2012.npz"),
        ("vit_b_16", "https://download.pytorch.org/models/vit_b_16-c867db91.pth"),
        ("vit_h_14", "https://download.pytorch.org/models/vit_h_14_swag-80465313.pth"),
        ("vit_base_patch16_224", "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k"),
        ("timm/vit_base_patch16_224.augreg_in1k", "hf://timm/vit_base_patch16_224.augreg_in1k"),
        ("google/vit-base-patch16-224", "hf://google/vit-base-patch16-224"),
        ("dino_vits16", "https://dl.fbaipublicfiles.com/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth"),
        ("dinov2_vitg14_reg", "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitg14/dinov2_vitg14_reg4_pretrain.pth"),
    ],
)
def test_a_name_in_each_dialect_means_its_publishers_file(name, location):
    row = find_published(name)
    assert row is not None
    assert row.location == location
    assert find_published(location) is row


def test_a_gs_address_and_its_https_address_are_the_same_row():
    assert find_published("gs://vit_models/imagenet21k/ViT-L_16.npz") is find_published("imagenet21k/ViT-L_16")


def test_the_name_of_a_shape_is_no_weights():
    assert [name for name in VARIANTS if find_published(name)] == []


@pytest.mark.parametrize(
    ("name", "image_size", "classes"),
    [
        ("imagenet21k+imagenet2012/ViT-L_16", 384, 1000),
        ("imagenet21k/ViT-H_14", 224, 21843),
        ("vit_small_patch16_384.augreg_in1k", 384, 1000),
        ("vit_large_patch14_dinov2.lvd142m", 518, 0),
        ("ViT_L_16_Weights.IMAGENET1K_SWAG_E2E_V1", 512, 1000),
        ("google/vit-huge-patch14-224-in21k", 224, 0),
    ],
)
def test_size_and_classes_are_the_published_ones(name, image_size, classes):
    row = PUBLISHED[name]
    assert (row.image_size, row.classes) == (image_size, classes)


def test_only_file_names_with_a_checksum_give_one():
    assert PUBLISHED["ViT_B_16_Weights.IMAGENET1K_V1"].sha256_prefix == "c867db91"
    with_checksum = {row.family for row in PUBLISHED.values() if row.sha256_prefix}
    assert with_checksum == {"torchvision"}


def test_every_row_has_a_shape_of_ours_that_fits_its_size():
    for row in PUBLISHED.values():
        config = VARIANTS[row.variant]
        if isinstance(config, ViTConfig):
            config.grid_of((row.image_size, row.image_size))


def test_names_and_aliases_are_unique_and_so_are_locations():
    every = [name for row in PUBLISHED.values() for name in (row.name, *row.aliases)]
    assert len(every) == len(set(every)) == len(published_names())
    assert len({row.location for row in PUBLISHED.values()}) == len(PUBLISHED)


def test_every_location_is_a_repository_or_an_https_file():
    for row in PUBLISHED.values():
        form = r"hf://[\w-]+/[\w.-]+" if row.location.startswith("hf") else r"https://[\w./+-]+\.(npz|pth)"
        assert re.fullmatch(form, row.location), row


def test_the_weights_of_a_shape_come_from_every_family_that_has_them():
    families = {row.family for row in published_for("ViT-B/16")}
    assert families == {"google", "timm", "torchvision", "huggingface"}


def test_the_table_is_read_without_torch():
    code = "import sys, vitruvian.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("index", "word_net_id", "label"),
    [
        (0, "n01440764", "tench"),
        (2, "n01484850", "great white shark"),
        (134, "n02012849", "crane (bird)"),
        (281, "n02123045", "tabby"),
        (517, "n03126707", "crane (machine)"),
        (638, "n03710637", "maillot"),
        (639, "n03710721", "maillot (tank suit)"),
        (999, "n15075141", "toilet tissue"),
    ],
)
def test_classes_stand_in_the_published_order(index, word_net_id, label):
    assert imagenet_ids()[index] == word_net_id
    assert imagenet_labels()[index] == label


def test_there_are_1000_classes_with_different_names_in_the_order_of_their_ids():
    assert len(set(imagenet_labels())) == len(imagenet_ids()) == 1000
    assert list(imagenet_ids()) == sorted(imagenet_ids())

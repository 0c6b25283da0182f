"""The table of published weights: facts of their publishers, and laws that every row keeps."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from vitruvian.catalog import VARIANTS
from vitruvian.config import ViTConfig
from vitruvian.published import PUBLISHED, find, names, of_variant

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
    row = find(name)
    assert row is not None
    assert row.location == location
    assert find(location) is row


def test_a_gs_address_and_its_https_address_are_the_same_row():
    assert find("gs://vit_models/imagenet21k/ViT-L_16.npz") is find("imagenet21k/ViT-L_16")


def test_the_name_of_a_shape_is_no_weights():
    assert [name for name in VARIANTS if find(name)] == []


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
    assert len(every) == len(set(every)) == len(names())
    assert len({row.location for row in PUBLISHED.values()}) == len(PUBLISHED)


def test_every_location_is_a_repository_or_an_https_file():
    for row in PUBLISHED.values():
        form = r"hf://[\w-]+/[\w.-]+" if row.location.startswith("hf") else r"https://[\w./+-]+\.(npz|pth)"
        assert re.fullmatch(form, row.location), row


def test_the_weights_of_a_shape_come_from_every_family_that_has_them():
    families = {row.family for row in of_variant("ViT-B/16")}
    assert families == {"google", "timm", "torchvision", "huggingface"}


def test_the_table_is_read_without_torch():
    code = "import sys, vitruvian.published; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

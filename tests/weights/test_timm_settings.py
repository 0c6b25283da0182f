"""What `config.json` of timm's folders says of images, labels and arguments: as timm's own code has it, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitruvian.catalog import VARIANTS
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, ResNetConfig, RopeConfig, ViTConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.model.build import build
from vitruvian.weights.families.timm_config import TimmConfig, choose, find_architecture
from vitruvian.weights.load import load
from vitruvian.weights.save import save

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
TINY = ViTConfig(image_size=32, patch_size=8, width=32, mlp_dim=128, depth=1, num_heads=4, num_classes=2)
CFG = {"input_size": [3, 32, 32], "crop_pct": 0.9, "interpolation": "bilinear", "mean": [0.1] * 3, "std": [0.2] * 3}


def written(folder, config, *, size=(32, 32), arguments=()):
    """A folder as on timm's hub, without the description that our files carry."""
    save(build(TINY.replace(image_size=size), seed=1), folder / "a.safetensors", family="timm")
    save_file(load_file(folder / "a.safetensors"), folder / "model.safetensors")
    (folder / "a.safetensors").unlink()
    shape = {"model_args": SHAPE | {"img_size": list(size)} | dict(arguments)}
    text = json.dumps({"architecture": "vit_base_patch16_224", "num_classes": 2} | shape | config)
    (folder / "config.json").write_text(text)
    return folder


def test_a_view_that_is_stated_in_part_has_timms_defaults(tmp_path):
    view = load(
        written(tmp_path, {"pretrained_cfg": {"input_size": [3, 32, 32], "interpolation": None}})
    ).meta.preprocess
    assert (view.mean, view.std, view.interpolation) == (IMAGENET_MEAN, IMAGENET_STD, "bicubic")
    assert view.scaled_size == (36, 36)  # 32 / 0.875


def test_an_image_that_is_not_square_is_resized_as_stated_which_timm_does_since_1_0_31(tmp_path):
    cfg = CFG | {"input_size": [3, 32, 48], "interpolation": "bicubic"}
    view = load(written(tmp_path, {"pretrained_cfg": cfg}, size=(32, 48))).meta.preprocess
    assert (view.interpolation, view.scaled_size) == ("bicubic", (35, 53))


def test_settings_of_earlier_versions_stand_beside_the_architecture(tmp_path):
    model = load(written(tmp_path, CFG | {"labels": ["cat", "dog"]}))
    assert (model.meta.preprocess.mean, model.meta.preprocess.interpolation) == ((0.1, 0.1, 0.1), "bilinear")
    assert model.meta.labels == ("cat", "dog")


@pytest.mark.parametrize(
    "place", [{"label_names": ["cat", "dog"]}, {"pretrained_cfg": {"label_names": ["cat", "dog"]}}]
)
def test_labels_stand_beside_the_view_or_in_it(place, tmp_path):
    assert load(written(tmp_path, place)).meta.labels == ("cat", "dog")


@pytest.mark.parametrize("size", [32, [3, 32], [3, 32.0, 32], "32", [3, 0, 32]])
def test_an_input_size_of_another_form_is_refused(size, tmp_path):
    with pytest.raises(CheckpointError, match=r"input_size .* is not \[channels, rows, columns\]"):
        load(written(tmp_path, {"pretrained_cfg": CFG | {"input_size": size}}))


def test_padding_to_whole_patches_is_refused(tmp_path):
    folder = written(tmp_path, {}, arguments={"img_size": 33, "dynamic_img_pad": True})
    with pytest.raises(CheckpointError, match="dynamic_img_pad pads images of 33x33 to whole patches of 8"):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "argument"),
    [
        ("vit_so400m_patch16_siglip_gap_256", "act_layer"),
        ("vit_so400m_patch16_siglip_gap_256", "fc_norm"),
        ("vit_base_patch16_224", "global_pool"),
    ],
)
def test_a_null_that_timm_reads_in_two_ways_is_refused(architecture, argument):
    with pytest.raises(CheckpointError, match=f"model_args {argument}=None"):
        TimmConfig.parse({"architecture": architecture, "model_args": {argument: None}})


def test_a_mean_of_all_tokens_is_refused_also_if_the_architecture_pools_them_otherwise():
    """`test_vit3` has attention pooling of all tokens, which `reset_classifier(n, "avg")` turns into their mean."""
    with pytest.raises(CheckpointError, match="pool_include_prefix with a mean of all tokens"):
        TimmConfig.parse({"architecture": "test_vit3", "global_pool": "avg"})


@pytest.mark.parametrize(("argument", "value"), [("act_layer", "quick_gelu"), ("global_pool", "map")])
def test_another_activation_beside_mlps_gated_by_silu_is_refused(argument, value):
    with pytest.raises(
        CheckpointError, match=f"{argument} gives aimv2_large_patch14_224, whose MLPs are gated by SiLU"
    ):
        TimmConfig.parse({"architecture": "aimv2_large_patch14_224", "model_args": {argument: value}})


def test_attention_pooling_beside_gated_mlps_is_not_written_as_an_architecture_with_silu_there():
    name = "aimv2_large_patch14_224"
    found = choose(find_architecture(name).config.replace(pool="map"), name)
    assert isinstance(found, list)
    assert "pool='mean', this model 'map'" in found[0]


def test_factorized_positions_of_a_grid_that_is_not_square_are_not_left_to_timm_s_resizing(
    tmp_path,
):
    numerics = TINY.numerics.replace(
        gelu="erf", norm_eps=1e-6, position_resize="bicubic_antialias", square_positions=True
    )
    square = TINY.replace(pos_embed="factorized", cls_token=False, pool="mean", norm_after_pool=True, numerics=numerics)
    save(build(square, seed=1), tmp_path / "square", "timm")
    arrays = load_file(tmp_path / "square" / "model.safetensors")
    arrays["embeds.pos_embed_y"] = arrays["embeds.pos_embed_y"][:, :3].clone()
    (tmp_path / "file").mkdir()
    save_file(arrays, tmp_path / "file" / "model.safetensors")
    (tmp_path / "file" / "config.json").write_text((tmp_path / "square" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="pos_embed_ar_preserving is only supported for square grids, not 3x4"):
        load(tmp_path / "file")
    save(build(square.replace(image_size=(24, 32)), seed=1), tmp_path / "other", "timm")
    written_as = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("square", "other")]
    assert written_as[0]["architecture"] == "naflexvit_base_patch16_parfac_gap"
    assert not written_as[1]["architecture"].startswith("naflex")  # one array for this grid alone


@pytest.mark.parametrize("changes", [{"offset": 0.5}, {"reference_grid": (4, 4)}, {"half": False}])
def test_rotary_positions_that_no_argument_of_timm_gives_are_not_written(changes, tmp_path):
    rope = RopeConfig(kind="normalized", temperature=100.0, half=True)
    numerics = VARIANTS["DINOv3-S/16"].numerics
    config = TINY.replace(pos_embed="none", rope=rope, layer_scale=True, qkv_bias=False, numerics=numerics)
    save(build(config, seed=1), tmp_path / "known", "timm")
    with pytest.raises(ConversionError, match="rope="):
        save(build(config.replace(rope=rope.replace(**changes)), seed=1), tmp_path / "other", "timm")


@pytest.mark.parametrize("change", [{"global_pool": "max"}, {"model_args": {"stem_type": "deep"}}])
def test_another_argument_of_a_bit_resnet_is_refused(change, tmp_path):
    save(build(ResNetConfig(stages=(1,), width=32, num_classes=2), seed=1), tmp_path / "a.safetensors", family="timm")
    arrays = load_file(tmp_path / "a.safetensors")
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "a.safetensors").unlink()
    stated = {"architecture": "resnetv2_50x1_bit", "model_args": {"num_classes": 2}, "global_pool": "avg"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert load(tmp_path)(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    (tmp_path / "config.json").write_text(json.dumps(stated | change))
    with pytest.raises(CheckpointError, match="is not supported for a BiT ResNet"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "method"),
    [
        ("naflexvit_base_patch16_radio_v3", {}, "zoom"),
        ("naflexvit_large_patch16_radio_v3", {}, "bilinear"),
        ("naflexvit_base_patch16_radio_v3", {"pos_embed_align_corners": False}, "bilinear"),
        ("naflexvit_base_patch16_gap", {"pos_embed_antialias": False}, "bicubic"),
        ("naflexvit_base_patch16_gap", {"pos_embed_interp_mode": "bilinear"}, "bilinear_antialias"),
        ("vit_base_patch16_radio_v3", {}, "zoom"),
        ("vit_so400m_patch16_radio_v4", {}, "bilinear"),
    ],
)
def test_positions_follow_another_grid_as_the_arguments_say(name, arguments, method):
    settings = TimmConfig.parse({"architecture": name, "model_args": arguments}).settings
    assert settings["position_resize"] == method


@pytest.mark.parametrize("arguments", [{"pos_embed_align_corners": True}, {"pos_embed_interp_mode": ["bicubic"]}])
def test_a_way_of_resizing_positions_that_we_do_not_have_is_refused(arguments):
    with pytest.raises(CheckpointError, match=r"model_args pos_embed_interp_mode=.* are not supported"):
        TimmConfig.parse({"architecture": "naflexvit_base_patch16_gap", "model_args": arguments})

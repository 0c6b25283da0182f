"""What `config.json` states and the arrays tell too must agree: a contradiction is refused, not decided."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.model.build import build
from vitruvian.weights.families.timm_config import TimmConfig
from vitruvian.weights.load import load
from vitruvian.weights.save import save

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}
TINY = ViTConfig(image_size=32, patch_size=8, width=32, mlp_dim=128, depth=2, num_heads=4, num_classes=7)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """timm's names, without the description that our files carry."""
    path = tmp_path_factory.mktemp("timm") / "a.safetensors"
    save(build(TINY, seed=1), path, family="timm")
    return load_file(path)


def folder_of(tmp_path, arrays, **changes):
    config = {"architecture": "vit_base_patch16_224", "num_classes": 7, "model_args": SHAPE | changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("qkv_bias", False, "qkv_bias=False, the arrays have True"),
        ("proj_bias", False, "dense_bias=False, the arrays have True"),
        ("class_token", False, "cls_token=False, the arrays have True"),
        ("no_embed_class", True, "cls_pos_embed=False, the arrays have True"),
        ("reg_tokens", 4, "reg_tokens=4, the arrays have 0"),
        ("depth", 3, "depth=3, the arrays have 2"),
        ("embed_dim", 64, "width=64, the arrays have 32"),
        ("mlp_ratio", 2, "mlp_dim=64, the arrays have 128"),
        ("patch_size", 16, "patch_size=16, the arrays have 8"),
        ("in_chans", 1, "in_channels=1, the arrays have 3"),
        ("num_classes", 0, "num_classes=0, the arrays have 7"),
        ("init_values", 1e-5, "layer_scale=True, the arrays have False"),
        ("qk_norm", True, "qk_norm=True, the arrays have False"),
        ("scale_mlp_norm", True, "mlp_norm=True, the arrays have False"),
        ("pre_norm", True, "pre_norm=True, the arrays have False"),
        ("fc_norm", True, "norm_after_pool=True, the arrays have False"),
        ("global_pool", "avg", "norm_after_pool=True, the arrays have False"),
        ("img_size", 64, "a grid of 8x8 does not fit"),
        ("num_heads", 5, "not divisible by num_heads=5"),
        ("norm_layer", "rmsnorm", "norm_layer='rmsnorm' is not supported"),
        ("ref_feat_shape", None, "ref_feat_shape=None is not supported"),
        ("rope_rotate_half", True, "rotary positions, which vit_base_patch16_224 does not have"),
    ],
)
def test_timm_arguments_that_the_arrays_contradict_are_refused(name, value, words, arrays, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        load(folder_of(tmp_path, arrays, **{name: value}))


def test_weights_that_lack_blocks_of_the_named_architecture_are_not_read_without_a_word(arrays, tmp_path, caplog):
    folder = folder_of(tmp_path, arrays)
    assert load(folder).config.depth == 2
    assert "config.json names" not in caplog.text
    config = json.loads((folder / "config.json").read_text())
    del config["model_args"]["depth"]
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
    assert caplog.messages[-1] == (
        f"{folder}: config.json names vit_base_patch16_224, which has depth=12; the weights have 2"
    )


def test_a_square_of_positions_that_may_be_an_oblong_and_a_class_token_is_said(arrays, tmp_path, caplog):
    oblong = arrays | {"pos_embed": torch.zeros(1, 4 * 6 + 1, 32)}
    save_file(oblong, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors", num_heads=4).config.grid == (5, 5)
    assert "grid=5x5 without a position of the class token" in caplog.text
    caplog.clear()
    assert load(tmp_path / "a.safetensors", num_heads=4, grid=(4, 6)).config.grid == (4, 6)
    assert "grid=" not in caplog.text


def test_timm_arguments_that_are_null_are_the_architecture_s_own(arrays, tmp_path):
    nothing = dict.fromkeys(("init_values", "qkv_bias", "reg_tokens", "act_layer"))
    assert load(folder_of(tmp_path, arrays, **nothing, patch_size=[8, 8])).config.qkv_bias


def test_two_norms_may_be_stated_as_the_arrays_have_them(arrays, tmp_path):
    stated = load(folder_of(tmp_path, arrays, global_pool="avg", fc_norm=False))
    assert stated.config.pool == "mean"
    assert not stated.config.norm_after_pool


@pytest.mark.parametrize(
    ("architecture", "argument", "value"),
    [
        ("vit_small_patch16_rope_mixed_224", "rope_grid_offset", 1.0),
        ("vit_small_patch16_rope_mixed_224", "ref_feat_shape", [4, 4]),
        ("vit_small_patch16_rope_mixed_224", "rope_temperature", 3.0),
        ("vit_small_patch16_dinov3", "ref_feat_shape", [4, 4]),
    ],
)
def test_rotary_arguments_that_timm_s_code_ignores_change_nothing(architecture, argument, value):
    plain, changed = (
        TimmConfig.parse({"architecture": architecture, "model_args": args}) for args in ({}, {argument: value})
    )
    assert plain.settings == changed.settings


def test_an_offset_of_dinov3_s_places_is_refused():
    with pytest.raises(CheckpointError, match=r"rope_grid_offset=0.5 is not supported for rotary positions normalized"):
        TimmConfig.parse({"architecture": "vit_small_patch16_dinov3", "model_args": {"rope_grid_offset": 0.5}})


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")

    def made(kind, **changes):
        shape = {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
            "intermediate_size": 64,
        }  # fmt: skip
        folder = tmp_path_factory.mktemp(kind)
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**shape | changes))
        model.save_pretrained(folder)
        return folder, model

    return made


@pytest.mark.parametrize(
    ("kind", "made_with", "edit", "words"),
    [
        ("ViT", {}, {"qkv_bias": False}, "qkv_bias=False, the arrays have True"),
        ("ViT", {}, {"hidden_size": 64}, "width=64, the arrays have 32"),
        ("ViT", {}, {"patch_size": [8, 4]}, "patch_size=.8, 4. is not a positive integer"),
        ("Dinov2", {}, {"use_swiglu_ffn": True}, "mlp_dim=88, the arrays have 128"),
        ("Dinov2", {}, {"mlp_ratio": 3}, "mlp_dim=96, the arrays have 128"),
        ("Dinov2WithRegisters", {}, {"num_register_tokens": 2}, "reg_tokens=2, the arrays have 4"),
        ("DINOv3ViT", {}, {"key_bias": True}, "key_bias=True, the arrays have False"),
        ("DINOv3ViT", {"num_register_tokens": 2}, {"num_register_tokens": 0}, "reg_tokens=0, the arrays have 2"),
        ("Beit", {}, {"layer_scale_init_value": 0}, "layer_scale=False, the arrays have True"),
        ("Beit", {}, {"use_mean_pooling": False}, "norm_after_pool=False, the arrays have True"),
        ("Beit", {}, {"use_relative_position_bias": True}, "use_relative_position_bias=True, the arrays have False"),
        (
            "Beit",
            {"use_relative_position_bias": True},
            {"use_absolute_position_embeddings": True},
            "embeddings=True, the",
        ),
        ("Data2VecVision", {}, {"use_mean_pooling": False}, "norm_after_pool=False, the arrays have True"),
        ("Siglip2Vision", {"num_patches": 16}, {"num_patches": 25}, "num_patches=25, the arrays have 16"),
        ("Dinov2", {"image_size": [16, 64]}, {}, "image_size=16x64 is not square"),
        ("Beit", {"image_size": [32, 48], "use_relative_position_bias": True}, {}, "not square"),
    ],
)
def test_settings_of_transformers_that_the_arrays_contradict_are_refused(
    kind, made_with, edit, words, transformers_folder
):
    folder, _ = transformers_folder(kind, **made_with)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | edit))
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize("absent", ["query", "key", "value", "proj", "mlp"])
def test_any_dense_layer_of_dinov3_may_be_without_bias(absent, transformers_folder):
    """Biases of query and value were dropped where the other's was absent."""
    biases = {"key_bias": True} | {f"{absent}_bias": False}
    folder, model = transformers_folder("DINOv3ViT", num_register_tokens=1, **biases)
    with torch.no_grad():
        for tensor in model.eval().parameters():
            tensor.add_(0.2 * torch.rand_like(tensor))
        model.save_pretrained(folder)
        pixels = torch.randn(2, 3, 32, 32)
        found, wanted = load(folder)(pixels), model(pixels).pooler_output
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()  # float32 sums in another order


def test_dinov2_with_registers_resizes_positions_in_its_own_way_also_where_it_has_none(transformers_folder):
    folder, model = transformers_folder("Dinov2WithRegisters", num_register_tokens=0)
    with torch.no_grad():
        for tensor in model.eval().parameters():
            tensor.add_(0.2 * torch.rand_like(tensor))
        model.save_pretrained(folder)
        pixels = torch.randn(2, 3, 40, 48)
        found, wanted = load(folder)(pixels), model(pixels).pooler_output
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()  # float32 sums in another order


@pytest.mark.parametrize(
    ("mark", "words"),
    [("lm_head.weight", "masked image modelling"), ("decode_head.classifier.weight", "a segmentation head")],
)
def test_beit_with_a_head_that_does_not_classify_says_what_it_is_and_what_to_do(mark, words, transformers_folder):
    folder, _ = transformers_folder("Beit")
    arrays = load_file(folder / "model.safetensors")
    save_file(arrays | {mark: torch.zeros(4, 32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"the weights have .*{words}.*; use a checkpoint fine-tuned"):
        load(folder)

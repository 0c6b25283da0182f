"""The image models of transformers that people use: their answers, from random weights of a small model."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import TOLERANCE
from safetensors.torch import save as save_tensors

from vitruvian.config import NUMERICS, ViTConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.model.build import build
from vitruvian.weights.families.tables import REFUSED
from vitruvian.weights.load import load
from vitruvian.weights.parse import warn_once
from vitruvian.weights.save import convert, save

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "intermediate_size": 64,
}  # fmt: skip
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
TOWERS = {"vision_config": SHAPE, "text_config": TEXT}
DINOV3 = SHAPE | {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"}
TIPS = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
SIZE_FREE = ("DINOv3ViTModel", "Tipsv2VisionModel", "Tipsv2Model")  # take every size without being asked to
RELATIVE = {"use_relative_position_bias": True}


def pooled(peer, pixels, **options):
    return peer(pixels, **options).pooler_output


def first_token(peer, pixels, **options):
    return peer(pixels, **options).last_hidden_state[:, 0]


def mean(peer, pixels, **options):
    return peer(pixels, **options).last_hidden_state.mean(dim=1)


def patch_mean(peer, pixels, **options):
    return peer(pixels, **options).last_hidden_state[:, 1:].mean(dim=1)


def logits(peer, pixels, **options):
    return peer(pixels, **options).logits


def image_embeds(peer, pixels, **options):
    return peer(pixels, **options).image_embeds


def image_features(peer, pixels, **options):
    found = peer.get_image_features(pixels, **options)
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def summary(peer, pixels, **options):
    """RADIO's, which normalizes the pixels itself."""
    mean, std = peer.input_conditioner.norm_mean, peer.input_conditioner.norm_std
    return peer(pixels * std + mean, **options).summary


KINDS = {
    # class: its settings, what it gives, whether it takes other sizes
    "CLIPVisionModel": ("CLIPVisionConfig", SHAPE, pooled, True),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", SHAPE | {"projection_dim": 16}, image_embeds, True),
    "CLIPModel": ("CLIPConfig", TOWERS | {"projection_dim": 16}, image_features, True),
    "MetaClip2VisionModel": ("MetaClip2VisionConfig", SHAPE, pooled, True),
    "MetaClip2VisionModelWithProjection": (
        "MetaClip2VisionConfig", SHAPE | {"projection_dim": 16}, image_embeds, True,
    ),
    "MetaClip2Model": ("MetaClip2Config", TOWERS | {"projection_dim": 16}, image_features, True),
    "MetaClip2ForImageClassification": ("MetaClip2Config", TOWERS | {"num_labels": 5}, logits, True),
    "Tipsv2VisionModel": ("Tipsv2VisionConfig", TIPS, pooled, True),
    "Tipsv2Model": (
        "Tipsv2Config", {"vision_config": TIPS, "text_config": TEXT | {"hidden_size": 32}}, image_features, True,
    ),
    "SiglipVisionModel": ("SiglipVisionConfig", SHAPE, pooled, True),
    "SiglipModel": ("SiglipConfig", TOWERS, image_features, True),
    "CLIPForImageClassification": ("CLIPConfig", TOWERS | {"num_labels": 5}, logits, True),
    "SiglipForImageClassification": ("SiglipConfig", TOWERS | {"num_labels": 5}, logits, True),
    "DINOv3ViTModel": ("DINOv3ViTConfig", DINOV3, pooled, True),
    "ViTMAEModel": ("ViTMAEConfig", SHAPE | {"mask_ratio": 0.0}, first_token, False),
    "ViTMSNModel": ("ViTMSNConfig", SHAPE, first_token, True),
    "ViTMSNForImageClassification": ("ViTMSNConfig", SHAPE | {"num_labels": 5}, logits, True),
    "IJepaModel": ("IJepaConfig", SHAPE, mean, True),
    "IJepaForImageClassification": ("IJepaConfig", SHAPE | {"num_labels": 5}, logits, True),
    "BeitModel": ("BeitConfig", SHAPE | RELATIVE, pooled, True),
    "BeitForImageClassification": (
        "BeitConfig", SHAPE | {"num_labels": 5, "use_shared_relative_position_bias": True}, logits, False,
    ),
    "Data2VecVisionModel": ("Data2VecVisionConfig", SHAPE | RELATIVE, patch_mean, True),
    "Data2VecVisionForImageClassification": (
        "Data2VecVisionConfig", SHAPE | RELATIVE | {"num_labels": 5}, logits, False,
    ),
}  # fmt: skip

SAPIENS = {
    "num_key_value_attention_heads": 2,
    "num_first_full_attention_layers": 1,
    "num_last_full_attention_layers": 0,
}
RADIO = TIPS | {"mlp_ratio": 2.0, "max_img_size": 64, "summary_idxs": [2, 0]}
RECENT = {
    "Sapiens2Model": ("Sapiens2Config", SHAPE | SAPIENS | {"key_bias": False}, pooled, True),
    "Aimv2VisionModel": ("Aimv2VisionConfig", SHAPE | {"use_head": False, "qkv_bias": True}, mean, False),
    "PixioModel": ("PixioConfig", TIPS | {"n_cls_tokens": 3}, pooled, True),
    "RadioModel": ("RadioConfig", RADIO, summary, True),
}
"""As in KINDS; their sizes need no option."""
SIZE_FREE += tuple(RECENT)


def made(architecture, folder):
    """A peer whose every parameter shows in its answers, saved as transformers saves it."""
    config, changes, answer, resizes = (KINDS | RECENT)[architecture]
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    torch.manual_seed(0)
    peer = getattr(transformers, architecture)(getattr(transformers, config)(**changes)).eval()
    for parameter in peer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    peer.save_pretrained(folder)
    return peer, answer, resizes


@torch.no_grad()
@pytest.mark.parametrize("architecture", KINDS | RECENT)
def test_answers_are_those_of_transformers(architecture, tmp_path):
    peer, answer, resizes = made(architecture, tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    sizes = [(32, 32), *([(48, 48)] if resizes else []), *([(32, 48)] if resizes and architecture in RECENT else [])]
    for size in sizes:
        pixels = torch.randn(2, 3, *size)
        options = {"interpolate_pos_encoding": True} if size != (32, 32) and architecture not in SIZE_FREE else {}
        wanted = answer(peer, pixels, **options)
        assert float((model(pixels) - wanted).abs().max()) < TOLERANCE * max(1.0, float(wanted.abs().max()))
    save(model, tmp_path / "native")
    torch.testing.assert_close(load(tmp_path / "native")(pixels), model(pixels), atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    "architecture", [*(name for name in KINDS if KINDS[name][1].keys().isdisjoint(TOWERS)), *RECENT]
)
def test_transformers_reads_what_is_written_as_its_own(architecture, tmp_path):
    peer, answer, _ = made(architecture, tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    save(model, tmp_path / "ours", "huggingface")
    again, seen = getattr(transformers, architecture).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not seen["missing_keys"]
    assert not seen["unexpected_keys"]
    assert seen.get("mismatched_keys", []) in ([], set())
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(answer(again.eval(), pixels), answer(peer, pixels), atol=TOLERANCE, rtol=TOLERANCE)
    assert load(tmp_path / "ours").config == model.config
    assert load(tmp_path / "ours", family="huggingface").config == model.config


@pytest.mark.parametrize("family", ["google", "timm", "torchvision"])
@pytest.mark.parametrize("architecture", ["PixioModel", "RadioModel"])
def test_features_of_several_class_tokens_are_not_written_for_libraries_that_lack_them(architecture, family, tmp_path):
    made(architecture, tmp_path / "theirs")
    path = tmp_path / ("ours" + {"google": ".npz", "torchvision": ".pth"}.get(family, ""))
    with pytest.raises(ConversionError, match=f"{family} cannot express this model: .*(several class tokens|pool)"):
        save(load(tmp_path / "theirs"), path, family)


@torch.no_grad()
def test_sapiens_2_is_written_as_the_architecture_that_timm_has(tmp_path):
    made("Sapiens2Model", tmp_path / "theirs")
    certificate = convert(tmp_path / "theirs", tmp_path / "ours", to="timm")
    assert certificate.reader_difference < TOLERANCE * max(1.0, certificate.largest_output)
    assert load(tmp_path / "ours", family="timm").config.norm == "rms"


def test_radio_normalizes_after_its_processor(tmp_path):
    made("RadioModel", tmp_path)
    processor = {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [2.0] * 3, "size": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    preprocess = load(tmp_path).meta.preprocess
    levels = torch.tensor([0.0, 100.0, 255.0])
    theirs = ((levels - 127.5) / 2 - 0.48145466) / 0.26862954
    torch.testing.assert_close((levels / 255 - preprocess.mean[0]) / preprocess.std[0], theirs)
    assert preprocess.image_size == (32, 32)


def test_an_aimv2_with_attention_pooling_or_fixed_positions_is_refused_with_the_reason(tmp_path):
    for changes, reason in (
        ({"use_head": True}, "attention pooling has no queries"),
        ({"is_native": True}, "is_native"),
    ):
        config = transformers.Aimv2VisionConfig(**SHAPE | {"use_head": False} | changes)
        transformers.Aimv2VisionModel(config).save_pretrained(tmp_path / reason)
        with pytest.raises(CheckpointError, match=reason):
            load(tmp_path / reason)


def test_what_a_kind_of_transformers_has_not_is_named(tmp_path):
    made("CLIPVisionModel", tmp_path / "theirs")
    model = load(tmp_path / "theirs", num_classes=3)
    with pytest.raises(ConversionError, match="CLIP of transformers has num_classes=0, this model 3"):
        save(model, tmp_path / "ours", "huggingface")


@torch.no_grad()
def test_siglip_2_takes_pixels_where_transformers_takes_patches_and_is_written_as_such(tmp_path):
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "image_size"}
    peer = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**shape, num_patches=16)).eval()
    for parameter in peer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    peer.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    save(model, tmp_path / "ours", "huggingface")
    again = transformers.Siglip2VisionModel.from_pretrained(tmp_path / "ours").eval()
    processor = json.loads((tmp_path / "ours" / "preprocessor_config.json").read_text())
    assert (processor["image_processor_type"], processor["max_num_patches"]) == ("Siglip2ImageProcessor", 16)
    for rows, columns in ((4, 4), (2, 6)):
        pixels = torch.randn(1, 3, rows * 8, columns * 8)
        patches = pixels.view(1, 3, rows, 8, columns, 8).permute(0, 2, 4, 3, 5, 1).reshape(1, rows * columns, -1)
        mask, shapes = torch.ones(1, rows * columns), torch.tensor([[rows, columns]])
        options = {"pixel_attention_mask": mask, "spatial_shapes": shapes}
        wanted = peer(patches, **options).pooler_output
        assert float((model(pixels) - wanted).abs().max()) < TOLERANCE * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(again(patches, **options).pooler_output, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert load(tmp_path / "ours", family="huggingface").meta.preprocess == model.meta.preprocess


def test_a_text_tower_is_named_as_not_used(tmp_path):
    made("CLIPModel", tmp_path)
    assert "(text tower)" in load(tmp_path).meta.origin


def test_dinov3_without_its_settings_asks_for_them(tmp_path):
    made("DINOv3ViTModel", tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"without config\.json, which states heads and rotary positions"):
        load(tmp_path)


MEAN = ViTConfig(
    image_size=32, patch_size=8, depth=2, width=32, mlp_dim=64, num_heads=4, num_classes=3, pool="mean",
    numerics=NUMERICS["huggingface"],
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("BeitForImageClassification", {"norm_after_pool": True}),
        ("BeitForImageClassification", {"norm_after_pool": True, "pos_embed": "sincos", "layer_scale": True}),
        ("BeitForImageClassification", {"pool": "token", "pos_embed": "relative_bias"}),
        ("IJepaForImageClassification", {"cls_token": False}),
    ],
)
def test_models_that_read_the_mean_are_written_as_the_kinds_that_do(architecture, changes, tmp_path):
    model = build(MEAN.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    save(model, tmp_path / "ours", "huggingface")
    peer = getattr(transformers, architecture).from_pretrained(tmp_path / "ours").eval()
    pixels = torch.randn(2, 3, *model.config.image_size, generator=generator)
    torch.testing.assert_close(peer(pixels).logits, model(pixels), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(load(tmp_path / "ours")(pixels), model(pixels), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"pos_embed": "relative_bias", "image_size": (32, 48)},
            "BEiT of transformers has positions of a square grid only",
        ),
        (
            {"layer_scale": True, "pool": "token_mean", "image_size": (32, 48)},
            "DINOv2 has positions of a square grid only",
        ),
        (
            {"pool": "map", "image_size": (32, 48)},
            "CLIP and SigLIP of transformers have positions of a square grid only",
        ),
        ({"layer_scale": True, "cls_token": False}, "DINOv2 always has a class token"),
        ({"pos_embed": "relative_bias", "norm_after_pool": False}, "has a norm after the mean of the patches"),
        ({"norm_after_pool": True, "qkv_bias": False}, "BEiT of transformers has qkv_bias=True, this model False"),
        ({"final_norm": False}, "have a norm before their head"),
        ({"cls_token": False, "norm_after_pool": True}, "no norm after the mean of the patches without a class"),
    ],
)
def test_what_beit_dinov2_siglip_and_i_jepa_of_transformers_have_not_is_named(changes, reason, tmp_path):
    with pytest.raises(ConversionError, match=reason):
        save(build(MEAN.replace(**changes)), tmp_path / "ours", "huggingface")


def test_a_clip_that_merges_tokens_is_written_with_a_note(tmp_path):
    clip = {"pool": "token", "cls_token": True, "pre_norm": True, "patch_bias": False, "num_classes": 0}
    model = build(MEAN.replace(norm_after_pool=False, **clip, tome_r=1))
    save(model, tmp_path / "native")
    notes = convert(tmp_path / "native", tmp_path / "clip", to="huggingface").notes
    assert "other libraries do not merge tokens" in notes
    assert load(tmp_path / "clip").config.tome_r == 1


@pytest.mark.parametrize("architecture", ["SiglipVisionModel", "CLIPVisionModel"])
def test_pixels_past_the_last_patch_are_left_out_as_in_siglip_so400m_at_384(architecture, tmp_path):
    """Its 384 pixels are 27 patches of 14 and 6 pixels that nobody reads; preprocessing still makes 384."""
    config, changes, answer, _ = KINDS[architecture]
    peer = getattr(transformers, architecture)(getattr(transformers, config)(**changes | {"image_size": 38})).eval()
    peer.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert (ours.config.image_size, ours.config.grid, ours.meta.preprocess.image_size) == ((38, 38), (4, 4), (38, 38))
    pixels = torch.randn(2, 3, 38, 38)
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), answer(peer, pixels), rtol=0, atol=TOLERANCE)
    save(ours, tmp_path / "native")
    assert load(tmp_path / "native").config == ours.config
    assert load(tmp_path, image_size=64).config.grid == (8, 8)


@pytest.mark.parametrize("architecture", ["SiglipVisionModel", "CLIPVisionModel"])
def test_a_tower_without_its_settings_is_known_by_its_arrays_and_what_is_assumed_is_said(
    architecture, tmp_path, caplog
):
    peer, answer, _ = made(architecture, tmp_path)
    (tmp_path / "config.json").unlink()
    warn_once.cache_clear()
    ours = load(tmp_path, num_heads=4)
    assert "gelu='tanh'" in caplog.text if "Siglip" in architecture else "gelu='quick'" in caplog.text
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), answer(peer, pixels), rtol=TOLERANCE, atol=TOLERANCE)


def test_what_a_classifier_of_clip_does_not_read_is_named(tmp_path):
    made("CLIPForImageClassification", tmp_path)
    model = load(tmp_path)
    assert (model.config.final_norm, model.config.pool, model.config.num_classes) == (False, "mean", 5)
    assert "unread.post_layernorm.weight (not read by its classifier)" in model.meta.origin


@torch.no_grad()
def test_the_gated_mlps_of_tipsv2_are_read_and_written(tmp_path, monkeypatch):
    changes = TIPS | {"use_swiglu_ffn": True, "mlp_ratio": 3, "num_register_tokens": 2}
    monkeypatch.setitem(KINDS, "Tipsv2VisionModel", ("Tipsv2VisionConfig", changes, pooled, True))
    test_transformers_reads_what_is_written_as_its_own("Tipsv2VisionModel", tmp_path / "written")
    test_answers_are_those_of_transformers("Tipsv2VisionModel", tmp_path)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_kinds_that_are_not_plain_vision_transformers_are_refused_by_name(kind, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "m" / "model.safetensors").write_bytes(save_tensors({"x": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=f"model_type {kind!r} is not supported: "):
        load(tmp_path / "m")

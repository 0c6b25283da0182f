"""Both towers written for transformers: its own code compares images and texts as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_towers import save_clip, save_siglip

import vitruvian as vt
from vitruvian.errors import ConversionError
from vitruvian.weights.zero_shot import load_text

transformers = pytest.importorskip("transformers")

PEERS = Path(__file__).parents[1] / "golden" / "peers"
TOLERANCE = 1e-4
"""The bound asked of two-tower similarity."""
TEXTS = ["a cat", "the dog", "dogs and cats and dogs and cats"]


def patches_of(pixels, side=8):
    B, C, rows, columns = pixels.shape
    cut = pixels.view(B, C, rows // side, side, columns // side, side)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(B, (rows // side) * (columns // side), -1)


def save_siglip2(folder):
    return save_siglip(folder, 2, model_input_names=["input_ids"], padding_side="right")


def save_metaclip2(folder):
    return save_clip(folder, "MetaClip2")


MAKERS = {
    "CLIPModel": save_clip,
    "MetaClip2Model": save_metaclip2,
    "SiglipModel": save_siglip,
    "Siglip2Model": save_siglip2,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", MAKERS)
def test_logits_per_image_of_transformers_are_the_same_from_the_written_folder(kind, tmp_path):
    peer, tokenizer = MAKERS[kind](tmp_path / "theirs")
    certificate = vt.convert(tmp_path / "theirs", tmp_path / "ours", to="huggingface")
    assert certificate.text_difference == 0.0
    assert "text tower: largest difference 0" in str(certificate)
    again, seen = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not seen["missing_keys"]
    assert not seen["unexpected_keys"]
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = {"pixel_values": pixels}
    if kind == "Siglip2Model":
        shapes = torch.tensor([[4, 4], [4, 4]])
        images = {
            "pixel_values": patches_of(pixels),
            "pixel_attention_mask": torch.ones(2, 16),
            "spatial_shapes": shapes,
        }
    options = {"truncation": True, "max_length": 16, "return_tensors": "pt"}
    padding = True if kind in ("CLIPModel", "MetaClip2Model") else "max_length"
    wanted = peer(**images, **tokenizer(TEXTS, padding=padding, **options)).logits_per_image
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    found = again.eval()(**images, **own(TEXTS, padding=padding, **options)).logits_per_image
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    model, text = vt.load(tmp_path / "ours"), load_text(tmp_path / "ours")
    ours = text.scale * torch.nn.functional.normalize(model.features(pixels), dim=-1) @ text.embed(TEXTS).T
    torch.testing.assert_close(ours + (text.bias or 0.0), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_changed_image_tower_is_saved_beside_its_text_tower(clip, tmp_path):
    folder, peer, _ = clip
    model = vt.load(folder)
    model.blocks[0].mlp.fc1.bias.data += 0.5
    vt.save(model, tmp_path / "ours", "huggingface", text=True)
    again = transformers.CLIPModel.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(features(again.get_text_features(tokens)), features(peer.get_text_features(tokens)))
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(features(again.get_image_features(pixels)), model(pixels), atol=1e-5, rtol=1e-5)


def features(found):
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def test_the_image_processor_is_the_one_of_the_kind(clip, siglip, tmp_path):
    for source, name in ((clip, "CLIPImageProcessor"), (siglip, "SiglipImageProcessor")):
        vt.convert(source[0], tmp_path / name, to="huggingface")
        assert json.loads((tmp_path / name / "preprocessor_config.json").read_text())["image_processor_type"] == name
        assert vt.load(tmp_path / name).meta.preprocess == vt.load(source[0]).meta.preprocess


@torch.no_grad()
def test_towers_of_open_clip_are_written_for_transformers(tmp_path):
    certificate = vt.convert(PEERS / "open_clip", tmp_path / "ours", to="huggingface")
    assert "the source has no tokenizer files, which other libraries need for texts" in certificate.notes
    expected = load_file(PEERS / "open_clip.texts.safetensors")
    peer = transformers.CLIPModel.from_pretrained(tmp_path / "ours").eval()
    found = peer(pixel_values=expected["pixels"], input_ids=expected["tokens"]).logits_per_image
    torch.testing.assert_close(found, expected["logits_per_image"], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_text_tower_that_transformers_has_not_beside_the_image_tower_is_left_out_with_the_reason(tmp_path):
    certificate = vt.convert(PEERS / "open_clip_siglip", tmp_path / "ours", to="huggingface")
    assert certificate.text_difference is None
    assert "left out: CLIPModel of transformers does not support causal=False" in "".join(certificate.notes)


def test_a_text_tower_that_cannot_be_is_refused_where_it_is_asked_for(clip, tmp_path):
    folder, _, _ = clip
    with pytest.raises(ConversionError, match="timm cannot store a text tower; huggingface can"):
        vt.save(vt.load(folder), tmp_path / "timm", "timm", text=True)
    with pytest.raises(ConversionError, match="the weights that this model was loaded from have no text tower"):
        vt.save(vt.create_model("CLIP-B/32", depth=1), tmp_path / "clip", "huggingface", text=True)

"""Text towers and tokenizers give what transformers and open_clip give, from the same files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from two_towers import change_json, clip_vocabulary, gemma_vocabulary, save_clip, save_siglip, transformers, without

import vitruvian as vt
from vitruvian.errors import CheckpointError
from vitruvian.weights.zero_shot import basic, load_text

PEERS = Path(__file__).parents[1] / "golden" / "peers"
TOLERANCE = 1e-4
"""The bound asked of two-tower similarity; float32 sums in another order give some 1e-6."""
TEXTS = [
    "a cat", "A Red  DOG!", "photo of the dog's 12 cats.", "", "naïve café — “quoted” İ",
    "a very long text that goes past the sixteen tokens of its context",
]  # fmt: skip


def similarity(folder, pixels, texts):
    """`logits_per_image` by our two towers."""
    model, text = vt.load(folder), load_text(folder)
    images = torch.nn.functional.normalize(model.features(pixels), dim=-1)
    return text.scale * images @ text.embed(texts).T + (text.bias or 0.0)


def difference(found, wanted):
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("text", [{}, {"eos_token_id": 2, "hidden_act": "gelu"}], ids=["quick GELU", "argmax"])
def test_clip_compares_images_and_texts_as_transformers_does(tmp_path, text):
    peer, tokenizer = save_clip(tmp_path, **text)
    pixels = torch.randn(3, 3, 32, 32)
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    wanted = peer(pixel_values=pixels, **inputs).logits_per_image
    assert difference(similarity(tmp_path, pixels, TEXTS), wanted) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [{"model_input_names": ["input_ids"], "padding_side": "right"}, {}],
    ids=["as published", "masked, left"],
)
def test_siglip_compares_images_and_texts_as_transformers_does(tmp_path, settings):
    peer, tokenizer = save_siglip(tmp_path, **settings)
    pixels = torch.randn(2, 3, 32, 32)
    inputs = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    wanted = peer(pixel_values=pixels, **inputs).logits_per_image
    assert difference(similarity(tmp_path, pixels, TEXTS), wanted) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"truncation_side": "left"},
        {"truncation_side": "left", "padding_side": "left", "pad_token": "!"},
        {"padding_side": "left", "pad_token": "<|startoftext|>", "model_input_names": ["input_ids"]},
    ],
    ids=["cut on the left", "both on the left", "no mask"],
)
def test_texts_are_cut_and_padded_where_the_tokenizer_s_settings_say(changes, tmp_path):
    peer, _ = save_clip(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    pixels = torch.randn(1, 3, 32, 32)
    wanted = peer(pixel_values=pixels, **inputs).logits_per_image
    assert difference(similarity(tmp_path, pixels, TEXTS), wanted) < TOLERANCE


def test_padding_by_a_token_that_is_not_in_the_vocabulary_is_refused(tmp_path):
    save_clip(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", pad_token="nowhere")
    with pytest.raises(CheckpointError, match="pad_token 'nowhere' is not in its vocabulary"):
        load_text(tmp_path)


@torch.no_grad()
def test_siglip_2_compares_images_and_texts_as_transformers_does(tmp_path):
    peer, tokenizer = save_siglip(tmp_path, 2, model_input_names=["input_ids"], padding_side="right")
    pixels = torch.randn(2, 3, 32, 32)
    patches = pixels.view(2, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(2, 16, -1)
    shapes = torch.tensor([[4, 4], [4, 4]])
    inputs = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    wanted = peer(pixel_values=patches, pixel_attention_mask=torch.ones(2, 16), spatial_shapes=shapes, **inputs)
    assert difference(similarity(tmp_path, pixels, TEXTS), wanted.logits_per_image) < TOLERANCE


def test_clip_tokens_are_the_same_from_each_of_its_files(clip, tmp_path):
    folder, _, peer = clip
    wanted = peer(TEXTS, padding=True, truncation=True, max_length=16)["input_ids"]
    vocabulary, merges = clip_vocabulary()
    pair = without(folder, tmp_path / "pair", "tokenizer.json")
    (pair / "vocab.json").write_text(json.dumps(vocabulary))
    (pair / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    for path in (folder, pair):
        assert load_text(path).tokenizer(TEXTS)[0].tolist() == wanted


def test_siglip_removes_punctuation_and_case_before_its_tokens(siglip, tmp_path):
    """As SiglipTokenizer.canonicalize_text of transformers does, which needs sentencepiece."""
    folder = without(siglip[0], tmp_path / "siglip")
    change_json(folder / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    tokens, mask = load_text(folder).tokenizer(["A  Cat's, tail!", "a cats tail"])
    assert tokens[0].tolist() == tokens[1].tolist()
    assert tokens.shape == (2, 16)
    assert mask is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["GemmaTokenizer", "Siglip2Tokenizer"])
def test_siglip_2_of_one_size_keeps_punctuation_as_its_tokenizer_does(kind, tmp_path):
    """Its model_type is SigLIP's, whose own tokenizer removes it."""
    peer, _ = save_siglip(tmp_path)
    vocabulary, merges = gemma_vocabulary()
    tokenizer = getattr(transformers, kind)(vocab=vocabulary, merges=merges, add_eos_token=True)
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == kind
    inputs = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    pixels = torch.randn(1, 3, 32, 32)
    wanted = peer(pixel_values=pixels, **inputs).logits_per_image
    assert difference(similarity(tmp_path, pixels, TEXTS), wanted) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["open_clip", "open_clip_siglip"])
def test_token_numbers_give_the_similarity_of_open_clip(name):
    from vitruvian.weights import checkpoint_files
    from vitruvian.weights.families.registry import recognize
    from vitruvian.weights.families.text_towers import TEXT_FAMILIES, text_tower

    checkpoint, expected = (
        checkpoint_files.read_checkpoint(PEERS / name),
        load_file(PEERS / f"{name}.texts.safetensors"),
    )
    family = TEXT_FAMILIES[type(recognize(checkpoint))]
    tower, _ = text_tower(family, checkpoint, family.tensors(checkpoint))
    texts = torch.nn.functional.normalize(tower(expected["tokens"]), dim=-1)
    images = torch.nn.functional.normalize(vt.load(PEERS / name).features(expected["pixels"]), dim=-1)
    scale, bias = checkpoint.tensors["logit_scale"].exp(), checkpoint.tensors.get("logit_bias", 0.0)
    assert difference(scale * images @ texts.T + bias, expected["logits_per_image"]) < TOLERANCE


@torch.no_grad()
def test_embeddings_of_images_and_texts_have_unit_length_and_one_space(clip, photos):
    folder, peer, tokenizer = clip
    images = sorted(photos.rglob("*.png"))
    model = vt.load(folder)
    texts = vt.embed_texts(model, TEXTS)
    wanted = peer.get_text_features(
        **tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    )
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted.pooler_output
    torch.testing.assert_close(texts, wanted / wanted.norm(dim=-1, keepdim=True), atol=1e-5, rtol=1e-5)
    found = vt.embed_images(folder, images)
    assert found.shape == (4, 24)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(found, vt.embed_images(model, images))


def test_a_model_without_a_text_tower_says_so(clip, tmp_path):
    vt.save(vt.load(clip[0]), tmp_path / "native")
    with pytest.raises(CheckpointError, match=r"native: has no text tower; use a CLIP or SigLIP"):
        vt.embed_texts(tmp_path / "native", ["a cat"])
    with pytest.raises(CheckpointError, match="was not loaded from weights"):
        vt.embed_texts(vt.create_model("ViT-Ti/16"), ["a cat"])


def test_what_a_text_tower_lacks_is_named(clip, tmp_path):
    bare = without(clip[0], tmp_path / "bare", "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"no tokenizer: texts need tokenizer\.json"):
        load_text(bare)
    other = without(clip[0], tmp_path / "other")
    change_json(other / "config.json", text_config={"num_attention_heads": 3})
    with pytest.raises(CheckpointError, match="width=16 is not divisible by num_heads=3"):
        load_text(other)
    (other / "tokenizer.json").write_text("{}")
    change_json(other / "config.json", text_config={"num_attention_heads": 2, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load_text(other)
    (other / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"the text tower needs config\.json of model_type clip, metaclip_2, siglip or siglip2"
    ):
        load_text(other)


@torch.no_grad()
def test_siglip_of_big_vision_is_that_of_transformers_under_other_names(siglip, tmp_path):
    folder, peer, _ = siglip
    np.savez(tmp_path / "siglip.npz", **big_vision_arrays(peer.state_dict()))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    pixels, texts = torch.randn(2, 3, 32, 32), ["a cat", "the dog"]
    found = similarity(tmp_path / "siglip.npz", pixels, texts)
    assert difference(found, similarity(folder, pixels, texts)) < TOLERANCE
    view = vt.load(tmp_path / "siglip.npz").meta.preprocess
    assert (view.fit, view.interpolation, view.antialias) == ("squash", "bilinear", False)


def big_vision_arrays(state):
    """Both towers as big_vision's two_towers keeps them: Flax's layouts, blocks one by one."""
    arrays = {"params/t": state["logit_scale"], "params/b": state["logit_bias"]}
    for tower, start in (("img", "vision_model"), ("txt", "text_model")):
        encoder = "Transformer" if tower == "img" else "Encoder_0"
        inner = {name.removeprefix(f"{start}."): x for name, x in state.items() if name.startswith(f"{start}.")}
        rename = [
            (r"embeddings\.patch_embedding\.weight", "embedding/kernel"),
            (r"embeddings\.patch_embedding\.bias", "embedding/bias"),
            (r"embeddings\.token_embedding\.weight", "Embed_0/embedding"),
            (r"embeddings\.position_embedding\.weight", "pos_embedding"),
            (r"encoder\.layers\.(\d)\.", rf"{encoder}/encoderblock_\1/"),
            (r"(post_layernorm|final_layer_norm)\.", f"{encoder}/encoder_norm/"),
            (r"layer_norm1\.", "LayerNorm_0/"), (r"layer_norm2\.", "LayerNorm_1/"),
            (r"mlp\.fc1\.", "MlpBlock_0/Dense_0/"), (r"mlp\.fc2\.", "MlpBlock_0/Dense_1/"),
            (r"head\.layernorm\.", "MAPHead_0/LayerNorm_0/"), (r"head\.mlp", "MAPHead_0/mlp"),
            (r"head\.MlpBlock", "MAPHead_0/MlpBlock"), (r"head\.probe", "MAPHead_0/probe"),
            (r"head\.attention\.out_proj\.", "MAPHead_0/MultiHeadDotProductAttention_0/out/"),
            (r"head\.(weight|bias)", r"head/\1"),
            (r"self_attn\.([qkv])_proj\.", r"MultiHeadDotProductAttention_0/\1/"),
            (r"self_attn\.out_proj\.", "MultiHeadDotProductAttention_0/out/"),
        ]  # fmt: skip
        heads = 4 if tower == "img" else 2
        width = inner["embeddings.position_embedding.weight"].shape[1]
        for kind in ("weight", "bias"):
            joined = inner.pop(f"head.attention.in_proj_{kind}", None)
            for part, piece in zip("qkv", joined.chunk(3) if joined is not None else ()):
                inner[f"MAPHead_0/MultiHeadDotProductAttention_0/{part}/{kind}"] = piece
        for name, x in inner.items():
            for old, new in rename:
                name = re.sub(old, new, name)
            name = re.sub(r"/q/", "/query/", re.sub(r"/k/", "/key/", re.sub(r"/v/", "/value/", name)))
            if "LayerNorm" in name or "encoder_norm" in name:
                name = name.replace("weight", "scale")
            elif re.search(r"/(query|key|value)/weight", name):
                x = x.T.reshape(width, heads, -1)
            elif re.search(r"/(query|key|value)/bias", name):
                x = x.reshape(heads, -1)
            elif name.endswith("/out/weight"):
                x = x.T.reshape(heads, -1, width)
            elif name == "embedding/kernel":
                x = x.permute(2, 3, 1, 0)
            elif name == "pos_embedding":
                x = x[None]
            elif name.endswith("weight"):
                x = x.T
            arrays[f"params/{tower}/{name.replace('weight', 'kernel')}"] = x
    return {name: x.contiguous().numpy() for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ﬁne ĳs ½", "fine ijs ½"),
        ("ＷＩＤＥ\u3000ｶﾞ", "WIDE ガ"),
        ("“quoted” e\u0301 don’t", '"quoted" é don\'t'),
        ("a &amp;lt; b", "a < b"),
    ],
)
def test_open_clips_texts_are_cleaned_as_ftfy_does(text, wanted):
    """What ftfy 6.3 and open_clip's two unescapings give."""
    assert basic(text) == wanted

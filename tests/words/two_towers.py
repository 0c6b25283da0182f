"""Small two-tower models with their tokenizers, as transformers saves them; every parameter shows in the answers."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "intermediate_size": 64,
}  # fmt: skip
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!'0123456789-"


def clip_vocabulary():
    """Vocabulary and merges in the layout of CLIP's: letters, letters that end a word, merges, marks."""
    merges = ["c a", "ca t</w>", "d o", "do g</w>", "r e", "re d</w>", "p h", "o f</w>"]
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(code) for code in (*visible, *range(256, 512 - len(visible)))]  # one for each byte
    tokens = [*letters, *(f"{x}</w>" for x in letters), *(merge.replace(" ", "") for merge in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}, merges


def gemma_vocabulary():
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{code:02X}>" for code in range(256)), *LETTERS, "▁"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "d"), ("▁d", "o")]
    tokens += ["".join(merge) for merge in merges]
    return {token: number for number, token in enumerate(tokens)}, merges


def perturbed(peer):
    torch.manual_seed(0)
    for parameter in peer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    return peer.eval()


def save_clip(folder, kind="CLIP", **text):
    vocabulary, merges = clip_vocabulary()
    end = vocabulary["<|endoftext|>"]
    settings = TEXT | {"vocab_size": len(vocabulary), "max_position_embeddings": 16, "eos_token_id": end} | text
    maker, settings_maker = (getattr(transformers, kind + part) for part in ("Model", "Config"))
    peer = perturbed(maker(settings_maker(vision_config=VISION, text_config=settings, projection_dim=24)))
    peer.save_pretrained(folder)
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[tuple(m.split()) for m in merges])
    tokenizer.save_pretrained(folder)
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return peer, tokenizer


def save_siglip(folder, version=1, **settings):
    vocabulary, merges = gemma_vocabulary()
    text = TEXT | {"vocab_size": len(vocabulary), "max_position_embeddings": 16, "projection_size": 32}
    if version == 1:
        config = transformers.SiglipConfig(vision_config=VISION, text_config=text)
        peer = perturbed(transformers.SiglipModel(config))
    else:
        vision = {key: value for key, value in VISION.items() if key != "image_size"} | {"num_patches": 16}
        peer = perturbed(transformers.Siglip2Model(transformers.Siglip2Config(vision_config=vision, text_config=text)))
    peer.save_pretrained(folder)
    tokenizer = transformers.Siglip2Tokenizer(vocab=vocabulary, merges=merges, add_eos_token=True, **settings)
    tokenizer.save_pretrained(folder)
    transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return peer, tokenizer


def without(folder, target, *names):
    """A copy of a folder's files without these."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in names:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

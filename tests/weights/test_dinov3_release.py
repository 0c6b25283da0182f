"""DINOv3's own `.pth`: the numbers of transformers' model of the same weights."""

from __future__ import annotations

import pytest
import torch

from vitruvian.errors import CheckpointError
from vitruvian.weights.load import load

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "intermediate_size": 64, "num_register_tokens": 3,
}  # fmt: skip


def made(**changes):
    torch.manual_seed(0)
    model = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SHAPE | changes)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.2 * torch.rand_like(tensor) if tensor.dim() == 1 else 0.1 * torch.randn_like(tensor))
    return model


def released(model):
    """The same weights under the names of facebookresearch/dinov3."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    found = {
        "cls_token": state["embeddings.cls_token"],
        "storage_tokens": state["embeddings.register_tokens"],
        "mask_token": state["embeddings.mask_token"][0],
        "rope_embed.periods": 100.0 ** (torch.arange(2) / 2),
        "local_cls_norm.weight": torch.ones(32),
    }
    pairs = {
        "embeddings.patch_embeddings": "patch_embed.proj", "norm": "norm",
        **{f"layer.{i}.norm{n}": f"blocks.{i}.norm{n}" for i in range(2) for n in (1, 2)},
        **{f"layer.{i}.attention.o_proj": f"blocks.{i}.attn.proj" for i in range(2)},
        **{f"layer.{i}.mlp.up_proj": f"blocks.{i}.mlp.fc1" for i in range(2)},
        **{f"layer.{i}.mlp.down_proj": f"blocks.{i}.mlp.fc2" for i in range(2)},
    }  # fmt: skip
    if model.config.use_gated_mlp:
        pairs |= {f"layer.{i}.mlp.{part}_proj": f"blocks.{i}.mlp.{name}" for i in range(2) for part, name in
                  (("gate", "w1"), ("up", "w2"), ("down", "w3"))}  # fmt: skip
    for old, new in pairs.items():
        found |= {f"{new}.{kind}": state[f"{old}.{kind}"] for kind in ("weight", "bias")}
    for i in range(2):
        attention = f"layer.{i}.attention"
        found[f"blocks.{i}.ls1.gamma"] = state[f"layer.{i}.layer_scale1.lambda1"]
        found[f"blocks.{i}.ls2.gamma"] = state[f"layer.{i}.layer_scale2.lambda1"]
        found[f"blocks.{i}.attn.qkv.weight"] = torch.cat([state[f"{attention}.{part}_proj.weight"] for part in "qkv"])
        query, value = (state[f"{attention}.{part}_proj.bias"] for part in "qv")
        found[f"blocks.{i}.attn.qkv.bias"] = torch.cat([query, torch.full((32,), 3.0), value])  # masked, whatever it is
        found[f"blocks.{i}.attn.qkv.bias_mask"] = torch.ones(96).index_fill(0, torch.arange(32, 64), 0)
    return found


@pytest.mark.parametrize("changes", [{}, {"use_gated_mlp": True, "hidden_act": "silu"}])
def test_the_release_gives_the_numbers_of_transformers(changes, tmp_path):
    model = made(**changes)
    torch.save(released(model), tmp_path / "dinov3_vits16_pretrain.pth")
    ours = load(tmp_path / "dinov3_vits16_pretrain.pth")
    assert ours.config.num_heads == 4
    for size in ((32, 32), (64, 48)):
        pixels = torch.randn(2, 3, *size)
        with torch.no_grad():
            wanted = model(pixels).pooler_output
        torch.testing.assert_close(ours(pixels), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("rope_embed.periods", torch.tensor([1.0, 3.0, 4.0, 9.0]), "powers of one base"),
        ("blocks.0.attn.qkv.bias_mask", torch.full((96,), torch.nan), "not a mask of zeros and ones"),
        ("cls_norm.weight", torch.ones(32), "separate norms for class token and patches"),
    ],
)
def test_what_is_not_known_of_a_release_is_refused(name, array, words, tmp_path):
    torch.save(released(made()) | {name: array}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "a.pth")

"""The variants of the paper's ablations equal independent implementations in NumPy (float64)."""

import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.errors import ConfigError
from vitruvian.model.build import build

TINY = ViTConfig(image_size=(24, 40), patch_size=8, depth=3, width=16, mlp_dim=24, num_heads=2, num_classes=5)
MIXER = {"attention": "mixer", "mixer_dim": 20, "pool": "mean", "cls_token": False, "pos_embed": "none"}
AXIAL = {"attention": "axial", "pool": "mean", "cls_token": False}
TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}  # both in float64; erf and tanh differ in the last digits


def random_model(config):
    """A model in float64 in which no parameter is zero, and its parameters as arrays."""
    model = build(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model, {name: value.detach().numpy() for name, value in model.state_dict().items()}


def images(model, count=2):
    size = (count, model.config.in_channels, *model.config.image_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Reference:
    """A forward pass of one image, written from the equations, with loops where they make it plain."""

    def __init__(self, config, weights, attention, layer_positions=lambda layer: 0.0):
        self.config, self.w = config, weights
        self.attention, self.layer_positions = attention, layer_positions

    def dense(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def norm(self, x, name):
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def patches(self, image):
        P, (rows, columns) = self.config.patch_size, self.config.grid
        cells = [image[:, r * P : r * P + P, c * P : c * P + P] for r in range(rows) for c in range(columns)]
        kernel = self.w["embed.patch.weight"]
        return np.stack([np.tensordot(kernel, cell, axes=3) for cell in cells]) + self.w["embed.patch.bias"]

    def with_registers(self, x, registers):
        """Registers after the class token; they have no positions."""
        count = self.config.reg_tokens
        if not count or np.ndim(x) == 0:
            return x
        registers = np.zeros((count, x.shape[1])) if registers is None or np.ndim(registers) == 0 else registers[0]
        return np.concatenate([x[:1], registers, x[1:]])

    def logits(self, image):
        x = self.patches(image)
        if self.config.cls_token:
            x = np.concatenate([self.w["embed.cls_token"][0], x])
        x = self.with_registers(x + self.layer_positions(0), self.w.get("embed.reg_tokens"))
        for layer in range(self.config.depth):
            if layer:
                x = x + self.with_registers(self.layer_positions(layer), 0)
            x = x + self.attention(self, self.norm(x, f"blocks.{layer}.norm1"), layer)
            hidden = gelu(self.dense(self.norm(x, f"blocks.{layer}.norm2"), f"blocks.{layer}.mlp.fc1"))
            x = x + self.dense(hidden, f"blocks.{layer}.mlp.fc2")
        x = self.norm(x, "norm")
        return self.dense(x[0] if self.config.cls_token else x.mean(0), "head")


def self_attention(ref, x, layer, groups=None):
    """Attention among the tokens of each group (all of them by default)."""
    D, H = ref.config.width, ref.config.num_heads
    q, k, v = np.split(ref.dense(x, f"blocks.{layer}.attn.qkv"), 3, axis=-1)
    out = np.zeros_like(x)
    for tokens in [range(len(x))] if groups is None else groups:
        tokens = list(tokens)
        for head in range(H):
            part = slice(head * D // H, (head + 1) * D // H)
            weights = softmax(q[tokens, part] @ k[tokens, part].T / math.sqrt(D // H))
            out[tokens, part] = weights @ v[tokens, part]
    return ref.dense(out, f"blocks.{layer}.attn.proj")


def axial_attention(ref, x, layer):
    rows, columns = ref.config.grid
    grid = np.arange(rows * columns).reshape(rows, columns)
    return self_attention(ref, x, layer, grid if layer % 2 == 0 else grid.T)


def token_mixing(ref, x, layer):
    return ref.dense(gelu(ref.dense(x.T, f"blocks.{layer}.attn.fc1")), f"blocks.{layer}.attn.proj").T


def compare(model, reference):
    batch = images(model)
    expected = np.stack([reference.logits(image.numpy()) for image in batch])
    with torch.no_grad():
        np.testing.assert_allclose(model(batch).numpy(), expected, **TOLERANCE)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("size", [(24, 40), (8, 40), (40, 8)])  # one row or one column attends to itself
def test_axial_layers_attend_within_rows_and_columns_in_turn(depth, size):
    model, weights = random_model(TINY.replace(**AXIAL, depth=depth, image_size=size))
    table = weights["embed.pos_embed"].reshape(-1, TINY.width)
    compare(model, Reference(model.config, weights, axial_attention, lambda layer: 0.0 if layer else table))


def test_axial_attention_maps_are_zero_outside_the_line():
    model, _ = random_model(TINY.replace(**AXIAL))
    rows, columns = model.config.grid
    for layer, attention in model.attention_maps(images(model)):
        cells = attention.detach().reshape(2, 2, rows, columns, rows, columns)
        for r in range(rows):
            for c in range(columns):
                inside = cells[:, :, r, c, :, c] if layer % 2 else cells[:, :, r, c, r]
                torch.testing.assert_close(inside.sum(-1), torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("size", [(24, 40), (40, 24), (8, 8)])
def test_mixer_blocks_mix_tokens_then_channels(size):
    model, weights = random_model(TINY.replace(**MIXER, image_size=size))
    compare(model, Reference(model.config, weights, token_mixing))


def test_a_mixer_refuses_other_image_sizes_and_attention_maps():
    model, _ = random_model(TINY.replace(**MIXER))
    with pytest.raises(ConfigError, match="works only at its own image size, with 3x5 patches"):
        model(torch.zeros(1, 3, 32, 40, dtype=torch.float64))
    with pytest.raises(ConfigError, match="MLP-Mixer has no attention"):
        list(model.attention_maps(images(model)))
    assert "block_0/attention" not in model.intermediate_names


@pytest.mark.parametrize("kind", ["learned", "learned_2d"])
@pytest.mark.parametrize("where", ["every_layer", "every_layer_shared"])
@pytest.mark.parametrize("registers", [0, 2])
def test_positions_are_added_to_the_input_of_every_layer(kind, where, registers):
    model, weights = random_model(TINY.replace(pos_embed=kind, pos_embed_at=where, reg_tokens=registers))
    rows, columns = model.config.grid

    def positions(layer):
        prefix = f"blocks.{layer}.pos" if layer and where == "every_layer" else "embed"
        if kind == "learned":
            table = weights[f"{prefix}.pos_embed"].reshape(rows * columns, -1)
        else:
            down, across = weights[f"{prefix}.row_pos_embed"], weights[f"{prefix}.col_pos_embed"]
            table = np.stack([np.concatenate([down[r], across[c]]) for r in range(rows) for c in range(columns)])
        return np.concatenate([weights[f"{prefix}.prefix_pos_embed"], table])

    compare(model, Reference(model.config, weights, self_attention, positions))


def test_tables_of_positions_belong_to_their_layer_or_to_the_embedding():
    names = dict(build(TINY.replace(pos_embed_at="every_layer")).named_parameters())
    assert [name for name in names if name.endswith(".pos_embed")] == [
        "embed.pos_embed",
        "blocks.1.pos.pos_embed",
        "blocks.2.pos.pos_embed",
    ]
    shared = build(TINY.replace(pos_embed_at="every_layer_shared"))
    assert dict(shared.named_parameters()).keys() == dict(build(TINY).named_parameters()).keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "axial"}, "needs the patches alone"),
        ({**MIXER, "mixer_dim": 0}, "attention='mixer' needs a width"),
        ({"mixer_dim": 8}, "other kinds need 0"),
        ({"pos_embed": "none", "pos_embed_at": "every_layer"}, "is not added to tokens"),
        ({"pos_embed_at": "every_layer", "tome_r": 2}, "cannot be combined with positions added in every layer"),
        ({**AXIAL, "tome_r": 2}, "cannot be combined with rows and columns of axial attention"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        TINY.replace(**changes)


def line_attention(x, qkv, offsets, heads=8):
    """Attention within one line (length, C), with a learned key for each offset between query and key."""
    length, C = x.shape
    K = C // heads
    q, k, v = np.split(x @ qkv.T, 3, axis=-1)
    out = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * K, (head + 1) * K)
        logits = np.empty((length, length))
        for i in range(length):
            for j in range(length):
                logits[i, j] = q[i, part] @ (k[j, part] + offsets[i - j + length - 1]) / math.sqrt(K)
        out[:, part] = softmax(logits) @ v[:, part]
    return out


@pytest.mark.parametrize("stride", [1, 2])
def test_axial_resnet_attends_to_rows_then_columns_instead_of_convolving(stride):
    model, weights = random_model(ResNetConfig(stages=(2, 2), width=32, image_size=(32, 48), axial=True, num_classes=3))
    name = "stages.1.0.conv2" if stride == 2 else "stages.0.1.conv2"
    unit = model.get_submodule(name)
    channels = 64 if stride == 2 else 32
    maps = torch.randn(1, channels, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = maps[0].numpy().transpose(1, 2, 0)  # (rows, columns, C)
    row, column = (
        [weights[f"{name}.{axis}.{part}"] for part in ("qkv.weight", "position.offsets")] for axis in ("row", "column")
    )
    x = np.stack([line_attention(line, *row) for line in x])
    x = np.stack([line_attention(line, *column) for line in x.transpose(1, 0, 2)]).transpose(2, 1, 0)
    if stride == 2:
        x = x.reshape(channels, 4, 2, 6, 2).mean(axis=(2, 4))
    with torch.no_grad():
        np.testing.assert_allclose(unit(maps)[0].numpy(), x, **TOLERANCE)


def test_axial_resnet_counts_its_parameters_and_accepts_other_sizes():
    config = ResNetConfig(stages=(1, 2), width=32, image_size=(32, 48), axial=True, num_classes=3)
    model, _ = random_model(config)
    assert parameters(config) == sum(value.numel() for value in model.parameters())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images(model, count=1))
    assert counter.get_total_flops() == 2 * multiply_adds(config)
    assert model(torch.zeros(1, 3, 48, 40, dtype=torch.float64)).shape == (1, 3)

"""Arrays in the pieces that some of timm's architectures keep them in; reverses `timm_pieces`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.model.encoder import differential_share
from vitruvian.weights.families.rules import Tensors, rename
from vitruvian.weights.families.timm_pieces import PARALLEL_NAMES, as_matrix
from vitruvian.weights.families.timm_shapes import BRANCHES

# D width, H heads of K channels


def in_pieces(tensors: Tensors, config: ViTConfig, pieces: frozenset[str], *, maker: str) -> Tensors:
    """Arrays under the names of the table as an architecture of timm's class `maker` with these pieces keeps them."""
    found = dict(tensors)
    for layer in range(config.depth):
        for piece, split in SPLITS.items():
            if piece in pieces:
                split(found, f"blocks.{layer}", config)
        if "key_bias" not in pieces:
            found.pop(f"blocks.{layer}.attn.k_proj.bias", None)
        if "branches" in pieces:
            split_branches(found, f"blocks.{layer}", BRANCHES)
    frequencies = [found.pop(f"blocks.{layer}.attn.rope_freqs", None) for layer in range(config.depth)]
    known = [each for each in frequencies if each is not None]
    if known:
        found["rope.freqs"] = torch.stack(known, dim=1)  # (2, layers, H, K / 2)
    if maker in ("Eva", "Beit"):
        found = rename(found, [(r"^(blocks\.\d+)\.ls([12])\.gamma$", r"\1.gamma_\2")])
    if "naflex" in pieces:
        found = naflex_names(found, config)
    return with_stem_names(found, config)


def split_bias(found: Tensors, block: str, config: ViTConfig) -> None:
    bias = found.pop(f"{block}.attn.qkv.bias", None)
    if bias is not None:
        found[f"{block}.attn.q_bias"], _, found[f"{block}.attn.v_bias"] = bias.chunk(3)


def split_projections(found: Tensors, block: str, config: ViTConfig) -> None:
    """Query, key and value apart; keys and values that heads share, once."""
    shared = shared_heads(found, block, config.num_heads)
    for kind in ("weight", "bias"):
        joined = found.pop(f"{block}.attn.qkv.{kind}", None)
        if joined is None:
            continue
        for part, array in zip("qkv", joined.chunk(3)):
            kept = array if part == "q" else grouped(array, config.num_heads)[::shared].flatten(0, 1)
            found[f"{block}.attn.{part}_proj.{kind}"] = kept


def shared_heads(found: Tensors, block: str, heads: int) -> int:
    """How many neighboring heads have the same keys and the same values."""
    arrays = [found[f"{block}.attn.qkv.{kind}"] for kind in ("weight", "bias") if f"{block}.attn.qkv.{kind}" in found]
    parts = [grouped(part, heads) for array in arrays for part in array.chunk(3)[1:]]  # each (H, K, ...)
    for count in range(heads, 1, -1):
        if heads % count == 0 and all(torch.equal(part, part[::count].repeat_interleave(count, 0)) for part in parts):
            return count
    return 1


def grouped(part: Tensor, heads: int) -> Tensor:
    return part.reshape(heads, -1, *part.shape[1:])


def split_gate(found: Tensors, block: str, config: ViTConfig) -> None:
    for kind in ("weight", "bias"):
        joined = found.pop(f"{block}.mlp.fc1.{kind}", None)
        if joined is not None:
            found[f"{block}.mlp.fc1_g.{kind}"], found[f"{block}.mlp.fc1_x.{kind}"] = joined.chunk(2)


def split_branches(found: Tensors, block: str, count: int) -> None:
    """As many attentions and MLPs side by side; each has the norm, the first has the bias of the sum."""
    for side, inner, norm, first, last, parts in (
        ("attns", "attn", "norm1", "qkv", "proj", 3),
        ("ffns", "mlp", "norm2", "fc1", "fc2", 1),
    ):
        own = [name for name in found if name.startswith((f"{block}.{inner}.", f"{block}.{norm}."))]
        arrays = {name: found.pop(name) for name in own}
        for number in range(count):
            branch = f"{block}.{side}.{number}"
            for kind in ("weight", "bias"):
                found[f"{branch}.norm.{kind}"] = arrays[f"{block}.{norm}.{kind}"].clone()
                if f"{block}.{inner}.{first}.{kind}" in arrays:
                    pieces = arrays[f"{block}.{inner}.{first}.{kind}"].chunk(parts)
                    found[f"{branch}.{inner}.{first}.{kind}"] = torch.cat([p.chunk(count)[number] for p in pieces])
            out, bias = (arrays[f"{block}.{inner}.{last}.{kind}"] for kind in ("weight", "bias"))
            found[f"{branch}.{inner}.{last}.weight"] = out.chunk(count, dim=1)[number]
            found[f"{branch}.{inner}.{last}.bias"] = torch.zeros_like(bias) if number else bias
            found[f"{branch}.ls.gamma"] = torch.ones_like(bias)


def split_lambdas(found: Tensors, block: str, config: ViTConfig) -> None:
    """Two exponentials whose difference is what is subtracted, and their parts; the norm without its last factor."""
    share = differential_share(int(block.split(".")[1]))
    difference = found.pop(f"{block}.attn.subtracted").double() - share
    logarithms = difference.clamp(min=0.0).log1p(), (-difference).clamp(min=0.0).log1p()  # one of them is 0
    for number, logarithm in enumerate(logarithms, start=1):
        first = torch.zeros(config.head_width // 2)
        first[0] = logarithm
        found[f"{block}.attn.lambda_q{number}"] = first
        found[f"{block}.attn.lambda_k{number}"] = (torch.arange(len(first)) == 0).float()
    found[f"{block}.attn.sub_norm.weight"] = found[f"{block}.attn.sub_norm.weight"] / (1 - share)


def join_parallel(found: Tensors, block: str, config: ViTConfig) -> None:
    """ViT-22B's block: one projection for the MLP and for query, key, value."""
    for kind in ("weight", "bias"):
        if f"{block}.attn.qkv.{kind}" in found:
            parts = [found.pop(f"{block}.{layer}.{kind}") for layer in ("mlp.fc1", "attn.qkv")]
            found[f"{block}.in_proj.{kind}"] = torch.cat(parts)
    for theirs, table_name in PARALLEL_NAMES.items():
        if f"{block}.{table_name}" in found:
            found[f"{block}.{theirs}"] = found.pop(f"{block}.{table_name}")
    for name in [name for name in found if name.startswith(f"{block}.attn.lambda_")]:
        found[name.replace(".attn.", ".")] = found.pop(name)


def join_out(found: Tensors, block: str, config: ViTConfig) -> None:
    """One projection after attention and MLP, too."""
    weights = [found.pop(f"{block}.{part}_out_proj.weight") for part in ("attn", "mlp")]
    found[f"{block}.out_proj.weight"] = torch.cat(weights, dim=1)
    biases = [found.pop(f"{block}.{part}_out_proj.bias", None) for part in ("attn", "mlp")]
    if biases[0] is not None and biases[1] is not None:
        found[f"{block}.out_proj.bias"] = biases[0] + biases[1]


SPLITS: dict[str, Callable[[Tensors, str, ViTConfig], None]] = {
    "split_bias": split_bias,
    "projections": split_projections,
    "gate": split_gate,
    "lambdas": split_lambdas,
    "parallel": join_parallel,
    "joined_out": join_out,
}
"""By the piece, in this order."""


def naflex_names(found: Tensors, config: ViTConfig) -> Tensors:
    """NaFlexVit's embedding, with its linear layer as a matrix."""
    rows, columns = config.grid
    found["patch_embed.proj.weight"] = as_matrix(found["patch_embed.proj.weight"])
    if "pos_embed" in found:
        found["pos_embed"] = found["pos_embed"].reshape(1, rows, columns, -1)
    for axis in "yx":
        if f"pos_embed_{axis}" in found:
            found[f"pos_embed_{axis}"] = found[f"pos_embed_{axis}"][None]
    return rename(found, [(r"^patch_embed\.", "embeds."), (r"^(cls_token|reg_token|pos_embed)", r"embeds.\1")])


def with_stem_names(found: Tensors, config: ViTConfig) -> Tensors:
    """A stem with BatchNorm under the names of its own code; the counts that BatchNorm keeps are 0."""
    style = config.stem.style if config.stem else ""
    if style not in STEM_NAMES:
        return found
    renamed = rename(found, STEM_NAMES[style])
    counted = [name for name in renamed if name.endswith(".running_var")]
    counts = {name.replace("running_var", "num_batches_tracked"): torch.tensor(0) for name in counted}
    return renamed | counts


BACKBONE = "patch_embed.backbone"
STEM_NAMES = {
    "resnet_d": [
        *((rf"^patch_embed\.backbone\.stages\.{n}\.units\.", f"{BACKBONE}.layer{n + 1}.") for n in range(8)),
        *((rf"^patch_embed\.root\.{n}\.conv\.", f"{BACKBONE}.conv1.{3 * n}.") for n in range(3)),
        *((rf"^patch_embed\.root\.{n}\.norm\.", f"{BACKBONE}.conv1.{3 * n + 1}.") for n in range(2)),
        (r"^patch_embed\.root\.2\.norm\.", f"{BACKBONE}.bn1."),
    ],
    "mobile_clip": [
        *((rf"^patch_embed\.root\.{n}\.conv\.", f"{BACKBONE}.{n}.conv.") for n in range(2)),
        *((rf"^patch_embed\.root\.{n}\.norm\.", f"{BACKBONE}.{n}.bn.") for n in range(2)),
        (r"^patch_embed\.proj\.", f"{BACKBONE}.2.conv."),
    ],
}

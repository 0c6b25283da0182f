"""Arrays that some of timm's architectures keep in other pieces than the table of names has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitruvian.errors import CheckpointError
from vitruvian.model.encoder import differential_share
from vitruvian.weights.families.rules import Tensors

# D width, H heads, P patch side


def in_one_piece(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    """The same arrays with query, key and value together, gate and value together, and rotations in their blocks.

    `settings` are those of the architecture, as far as it is stated: heads, and the channels of an image.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".num_batches_tracked")}
    try:
        for name in tensors:
            if match := PIECES.fullmatch(name):
                JOINS[match[2]](found, match[1])
            elif match := re.fullmatch(r"(blocks\.\d+)\.attn\.q_proj\.weight", name):
                join_projections(found, match[1], settings.get("num_heads"))
        if "rope.freqs" in found:
            for layer, frequencies in enumerate(found.pop("rope.freqs").unbind(1)):  # (2, layers, H, K / 2)
                found[f"blocks.{layer}.attn.rope_freqs"] = frequencies
        if "embeds.proj.weight" in found:
            found = classic_names(found, settings.get("in_channels", 3))
    except (RuntimeError, IndexError, KeyError) as error:
        raise CheckpointError(f"arrays of query, key, value or MLP do not fit together: {error}") from error
    return found


def join_split_bias(found: Tensors, block: str) -> None:
    """EVA and BEiT: query and value have a bias, the key has none."""
    q, v = found.pop(f"{block}.attn.q_bias"), found.pop(f"{block}.attn.v_bias")
    found[f"{block}.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])


def join_projections(found: Tensors, block: str, heads: int | None) -> None:
    parts = [f"{block}.attn.{part}_proj" for part in "qkv"]
    rows = len(found[f"{parts[0]}.weight"])
    found[f"{block}.attn.qkv.weight"] = torch.cat(
        [for_all_heads(found.pop(f"{part}.weight"), rows, heads) for part in parts]
    )
    if f"{parts[0]}.bias" in found:
        q, v = found.pop(f"{parts[0]}.bias"), for_all_heads(found.pop(f"{parts[2]}.bias"), rows, heads)
        k = found.pop(f"{parts[1]}.bias", None)
        k = torch.zeros_like(q) if k is None else for_all_heads(k, rows, heads)
        found[f"{block}.attn.qkv.bias"] = torch.cat([q, k, v])


def for_all_heads(part: Tensor, rows: int, heads: int | None) -> Tensor:
    """Keys or values that several heads share (grouped-query attention), once for each of them."""
    if len(part) == rows:
        return part
    if heads is None or rows % len(part) or rows % heads:
        raise CheckpointError(f"keys or values of {len(part)} rows do not fit queries of {rows} and {heads} heads")
    each = part.reshape(-1, rows // heads, *part.shape[1:])
    return each.repeat_interleave(rows // len(part), dim=0).flatten(0, 1)


def join_gate(found: Tensors, block: str) -> None:
    for kind in ("weight", "bias"):
        if f"{block}.mlp.fc1_g.{kind}" in found:
            parts = [found.pop(f"{block}.mlp.fc1_{part}.{kind}") for part in "gx"]
            found[f"{block}.mlp.fc1.{kind}"] = torch.cat(parts)


def branches_in(tensors: Tensors) -> int:
    """Attentions side by side in each block; together they are one of so many times the heads."""
    return max((1 + int(match[1]) for name in tensors if (match := re.search(r"\.attns\.(\d+)\.", name))), default=1)


def join_branches(found: Tensors, block: str) -> None:
    """Attentions side by side, and MLPs, as one of each: norms go into the layers after them, scales into the last.

    What is left of the norms does nothing, so that all branches share them.
    """
    for side, inner, norm, layers in (
        ("attns", "attn", "norm1", ("qkv", "proj")),
        ("ffns", "mlp", "norm2", ("fc1", "fc2")),
    ):
        count = 1 + max(int(name.split(".")[3]) for name in found if name.startswith(f"{block}.{side}."))
        branches = [f"{block}.{side}.{number}" for number in range(count)]
        first, last, biases, out_bias = [], [], [], []
        for branch in branches:
            scale, shift = found.pop(f"{branch}.norm.weight"), found.pop(f"{branch}.norm.bias")
            weight = found.pop(f"{branch}.{inner}.{layers[0]}.weight")
            biases.append(weight @ shift + found.pop(f"{branch}.{inner}.{layers[0]}.bias", torch.zeros(len(weight))))
            first.append(weight * scale)
            gain = found.pop(f"{branch}.ls.gamma", torch.ones(len(scale)))
            last.append(gain[:, None] * found.pop(f"{branch}.{inner}.{layers[1]}.weight"))
            out_bias.append(gain * found.pop(f"{branch}.{inner}.{layers[1]}.bias"))
        parts = 3 if inner == "attn" else 1  # all queries, then all keys, then all values
        found[f"{block}.{inner}.{layers[0]}.weight"] = interleaved(first, parts)
        found[f"{block}.{inner}.{layers[0]}.bias"] = interleaved(biases, parts)
        found[f"{block}.{inner}.{layers[1]}.weight"] = torch.cat(last, dim=1)
        found[f"{block}.{inner}.{layers[1]}.bias"] = torch.stack(out_bias).sum(dim=0)
        found[f"{block}.{norm}.weight"], found[f"{block}.{norm}.bias"] = torch.ones_like(scale), torch.zeros_like(scale)


def interleaved(branches: list[Tensor], parts: int) -> Tensor:
    """The first part of every branch, then the second, and so on."""
    return torch.cat([part for group in zip(*(branch.chunk(parts) for branch in branches)) for part in group])


def split_parallel(found: Tensors, block: str) -> None:
    """ViT-22B's block: one projection for the MLP and for query, key, value; perhaps one after both, too."""
    out = found.pop(f"{block}.out_proj.weight", None)
    if out is not None:
        width = len(out)
        found[f"{block}.attn_out_proj.weight"], found[f"{block}.mlp_out_proj.weight"] = out[:, :width], out[:, width:]
        if (bias := found.pop(f"{block}.out_proj.bias", None)) is not None:
            found[f"{block}.attn_out_proj.bias"], found[f"{block}.mlp_out_proj.bias"] = torch.zeros_like(bias), bias
    width = found[f"{block}.mlp_out_proj.weight"].shape[1]
    for kind in ("weight", "bias"):
        if f"{block}.in_proj.{kind}" in found:
            joined = found.pop(f"{block}.in_proj.{kind}")
            found[f"{block}.mlp.fc1.{kind}"], found[f"{block}.attn.qkv.{kind}"] = joined[:width], joined[width:]
    for old, new in PARALLEL_NAMES.items():
        if f"{block}.{old}" in found:
            found[f"{block}.{new}"] = found.pop(f"{block}.{old}")
    if f"{block}.lambda_q1" in found or f"{block}.lambda_a" in found:
        join_lambdas(found, block, block)


PARALLEL_NAMES = {
    "mlp_bias": "mlp.fc1.bias",
    **{f"in_norm.{kind}": f"norm1.{kind}" for kind in ("weight", "bias")},
    **{f"{part}_norm.{kind}": f"attn.{part}_norm.{kind}" for part in "qk" for kind in ("weight", "bias")},
    "ls.gamma": "ls1.gamma",
    "sub_norm.weight": "attn.sub_norm.weight",
    **{f"attn_out_proj.{kind}": f"attn.proj.{kind}" for kind in ("weight", "bias")},
    **{f"mlp_out_proj.{kind}": f"mlp.fc2.{kind}" for kind in ("weight", "bias")},
}


def join_lambdas(found: Tensors, block: str, owner: str | None = None) -> None:
    """What differential attention subtracts, and its last factor in the norm before it; both depend on the layer."""
    owner = owner or f"{block}.attn"
    share = differential_share(int(block.split(".")[1]))
    if f"{owner}.lambda_a" in found:
        first, second = (found.pop(f"{owner}.lambda_{part}").exp() for part in "ab")
    else:
        first, second = (
            (found.pop(f"{owner}.lambda_q{n}") * found.pop(f"{owner}.lambda_k{n}")).sum().exp() for n in (1, 2)
        )
    found[f"{block}.attn.subtracted"] = first - second + share
    found[f"{block}.attn.sub_norm.weight"] = found[f"{block}.attn.sub_norm.weight"] * (1 - share)


def classic_names(found: Tensors, channels: int) -> Tensors:
    """NaFlexVit's embedding under the names of timm's other models; its linear layer as a convolution."""
    renamed = {re.sub(r"^embeds\.(proj|norm)\.", r"patch_embed.\1.", name): t for name, t in found.items()}
    renamed = {name.removeprefix("embeds."): tensor for name, tensor in renamed.items()}
    renamed["patch_embed.proj.weight"] = as_kernel(renamed["patch_embed.proj.weight"], channels)
    if "pos_embed" in renamed:
        renamed["pos_embed"] = renamed["pos_embed"].flatten(1, 2)  # (1, R C, D)
    for axis in "yx":
        if f"pos_embed_{axis}" in renamed:
            renamed[f"pos_embed_{axis}"] = renamed[f"pos_embed_{axis}"][0]
    return renamed


def as_kernel(matrix: Tensor, channels: int = 3) -> Tensor:
    """A patch embedding (D, P P C), channels of a pixel side by side, as a convolution's (D, C, P, P)."""
    if matrix.dim() != 2:
        return matrix
    side = round((matrix.shape[1] / channels) ** 0.5)
    if side * side * channels != matrix.shape[1]:
        raise CheckpointError(
            f"the patch embedding has shape {tuple(matrix.shape)}, not that of square patches of {channels} channels"
        )
    return torch.movedim(matrix.reshape(-1, side, side, channels), 3, 1)


def as_matrix(kernel: Tensor) -> Tensor:
    """A convolution's (D, C, P, P) as a patch embedding (D, P P C); reverses `as_kernel`."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


PIECES = re.compile(
    r"(blocks\.\d+)\.(attn\.q_bias|mlp\.fc1_g\.weight|in_proj\.weight|attns\.0\.norm\.weight|attn\.lambda_(?:q1|a))"
)
JOINS: dict[str, Callable[[Tensors, str], None]] = {
    "attn.q_bias": join_split_bias,
    "mlp.fc1_g.weight": join_gate,
    "in_proj.weight": split_parallel,
    "attns.0.norm.weight": join_branches,
    "attn.lambda_q1": join_lambdas,
    "attn.lambda_a": join_lambdas,
}
"""By the array that tells of the pieces."""

"""Arrays that some of timm's architectures store in other parts than our table of names: joined, and split again."""

import re
from typing import Any

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.model.encoder import initial_lambda
from vitruvian.weights.families.tables import Tensors, rename
from vitruvian.weights.families.timm_config import NAMES, Architecture

# D width, H heads of K channels, P patch side
KINDS = ("weight", "bias")

# Functions with a `block` prefix such as "blocks.0" change the dictionary of tensors in place.


def join_parts(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    """Join query, key and value, gate and value, and parallel branches; move rotations into their blocks.

    `settings` has "in_channels", and "num_heads" if the architecture is stated.
    """
    state = {name: tensor for name, tensor in tensors.items() if not name.endswith(".num_batches_tracked")}
    try:
        for block in dict.fromkeys(match[0] for name in tensors if (match := re.match(r"blocks\.\d+", name))):
            attn, mlp = f"{block}.attn", f"{block}.mlp"
            if f"{attn}.q_bias" in state:  # EVA and BEiT: query and value have a bias, the key has none
                q, v = state.pop(f"{attn}.q_bias"), state.pop(f"{attn}.v_bias")
                state[f"{attn}.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
            if f"{attn}.q_proj.weight" in state:
                join_projections(state, block, settings.get("num_heads"))
            for kind in KINDS:
                if f"{mlp}.fc1_g.{kind}" in state:
                    state[f"{mlp}.fc1.{kind}"] = torch.cat([state.pop(f"{mlp}.fc1_{part}.{kind}") for part in "gx"])
            if f"{block}.in_proj.weight" in state:
                split_parallel_block(state, block)
            if f"{block}.attns.0.norm.weight" in state:
                join_branches(state, block)
            if f"{attn}.lambda_q1" in state or f"{attn}.lambda_a" in state:
                join_lambdas(state, block)
        if "rope.freqs" in state:
            for layer, frequencies in enumerate(state.pop("rope.freqs").unbind(1)):  # (2, depth, H, K / 2)
                state[f"blocks.{layer}.attn.rope_freqs"] = frequencies
        if "embeds.proj.weight" in state:
            state = join_naflex_embedding(state, settings.get("in_channels", 3))
    except (RuntimeError, IndexError, KeyError) as error:
        raise CheckpointError(f"arrays of query, key, value or MLP do not fit together: {error}") from error
    return state


def split_parts(tensors: Tensors, config: ViTConfig, architecture: Architecture) -> Tensors:
    """Split arrays as `architecture` stores them; reverses `join_parts`."""
    state, pieces = dict(tensors), architecture.pieces
    for block in (f"blocks.{layer}" for layer in range(config.depth)):
        attn, mlp = f"{block}.attn", f"{block}.mlp"
        if "split_bias" in pieces and f"{attn}.qkv.bias" in state:
            state[f"{attn}.q_bias"], _, state[f"{attn}.v_bias"] = state.pop(f"{attn}.qkv.bias").chunk(3)
        if "projections" in pieces:
            split_projections(state, block, config.num_heads)
        for kind in KINDS if "gate" in pieces else ():
            if f"{mlp}.fc1.{kind}" in state:
                gate, value = state.pop(f"{mlp}.fc1.{kind}").chunk(2)
                state |= {f"{mlp}.fc1_g.{kind}": gate, f"{mlp}.fc1_x.{kind}": value}
        if "lambdas" in pieces:
            split_lambdas(state, block, config.head_width)
        if "parallel" in pieces:
            join_parallel_block(state, block, joined_out="joined_out" in pieces)
        if "key_bias" not in pieces:
            state.pop(f"{attn}.k_proj.bias", None)
        if architecture.branches > 1:
            split_branches(state, block, architecture.branches)
    frequencies = [state.pop(f"blocks.{layer}.attn.rope_freqs", None) for layer in range(config.depth)]
    stored = [tensor for tensor in frequencies if tensor is not None]
    if stored:
        state["rope.freqs"] = torch.stack(stored, dim=1)  # (2, depth, H, K / 2)
    if architecture.maker in ("Eva", "Beit"):
        state = rename(state, [(r"^(blocks\.\d+)\.ls([12])\.gamma$", r"\1.gamma_\2")])
    if "naflex" in pieces:
        state = split_naflex_embedding(state, config)
    names = NAMES["stems"].get(config.stem.style if config.stem else "", {})
    state = rename(state, [(f"^{re.escape(ours)}", theirs) for theirs, ours in names.items()])
    variances = [name for name in state if name.endswith(".running_var")]  # BatchNorm also has a step counter
    return state | {name.replace("running_var", "num_batches_tracked"): torch.tensor(0) for name in variances}


def join_projections(state: Tensors, block: str, heads: int | None) -> None:
    names = [f"{block}.attn.{part}_proj" for part in "qkv"]
    rows = len(state[f"{names[0]}.weight"])
    weights = [repeat_for_heads(state.pop(f"{name}.weight"), rows, heads) for name in names]
    state[f"{block}.attn.qkv.weight"] = torch.cat(weights)
    if f"{names[0]}.bias" in state:
        q, v = state.pop(f"{names[0]}.bias"), repeat_for_heads(state.pop(f"{names[2]}.bias"), rows, heads)
        k = state.pop(f"{names[1]}.bias", None)
        k = torch.zeros_like(q) if k is None else repeat_for_heads(k, rows, heads)
        state[f"{block}.attn.qkv.bias"] = torch.cat([q, k, v])


def split_projections(state: Tensors, block: str, heads: int) -> None:
    """Store query, key and value separately; keys and values that heads share, once."""
    group = shared_heads(state, block, heads)
    for kind in KINDS:
        joined = state.pop(f"{block}.attn.qkv.{kind}", None)
        if joined is None:
            continue
        for part, array in zip("qkv", joined.chunk(3)):
            stored = array if part == "q" else by_head(array, heads)[::group].flatten(0, 1)
            state[f"{block}.attn.{part}_proj.{kind}"] = stored


def repeat_for_heads(part: Tensor, rows: int, heads: int | None) -> Tensor:
    """Repeat keys or values that several heads share (grouped-query attention) for each of them."""
    if len(part) == rows:
        return part
    if heads is None or rows % len(part) or rows % heads:
        raise CheckpointError(f"keys or values of {len(part)} rows do not fit queries of {rows} and {heads} heads")
    heads_stored = part.reshape(-1, rows // heads, *part.shape[1:])
    return heads_stored.repeat_interleave(rows // len(part), dim=0).flatten(0, 1)


def shared_heads(state: Tensors, block: str, heads: int) -> int:
    """The number of neighboring heads with equal keys and equal values."""
    arrays = [state[f"{block}.attn.qkv.{kind}"] for kind in KINDS if f"{block}.attn.qkv.{kind}" in state]
    parts = [by_head(part, heads) for array in arrays for part in array.chunk(3)[1:]]  # each (H, K, ...)
    for count in range(heads, 1, -1):
        if heads % count == 0 and all(torch.equal(part, part[::count].repeat_interleave(count, 0)) for part in parts):
            return count
    return 1


def by_head(part: Tensor, heads: int) -> Tensor:
    return part.reshape(heads, -1, *part.shape[1:])


def count_branches(tensors: Tensors) -> int:
    return max((1 + int(match[1]) for name in tensors if (match := re.search(r"\.attns\.(\d+)\.", name))), default=1)


BRANCHES = (("attns", "attn", "norm1", "qkv", "proj", 3), ("ffns", "mlp", "norm2", "fc1", "fc2", 1))
"""timm's list of branches, our layer, its norm, its first and last dense layer, and the parts of the first."""


def join_branches(state: Tensors, block: str) -> None:
    """Join parallel attentions, and MLPs, into one with the heads and hidden units of all.

    Each branch has a norm and a LayerScale. The norm's scale and shift are folded into the first dense layer and the
    LayerScale into the last, so that all branches can share one norm that scales by 1 and shifts by 0.
    """
    for branches, layer, norm, first, last, parts in BRANCHES:
        count = 1 + max(int(name.split(".")[3]) for name in state if name.startswith(f"{block}.{branches}."))
        first_weights, first_biases, last_weights, last_biases = [], [], [], []
        for branch in (f"{block}.{branches}.{index}" for index in range(count)):
            scale, shift = state.pop(f"{branch}.norm.weight"), state.pop(f"{branch}.norm.bias")
            weight = state.pop(f"{branch}.{layer}.{first}.weight")
            bias = state.pop(f"{branch}.{layer}.{first}.bias", torch.zeros(len(weight)))
            first_biases.append(weight @ shift + bias)
            first_weights.append(weight * scale)
            gain = state.pop(f"{branch}.ls.gamma", torch.ones(len(scale)))
            last_weights.append(gain[:, None] * state.pop(f"{branch}.{layer}.{last}.weight"))
            last_biases.append(gain * state.pop(f"{branch}.{layer}.{last}.bias"))
        state[f"{block}.{layer}.{first}.weight"] = interleave(first_weights, parts)
        state[f"{block}.{layer}.{first}.bias"] = interleave(first_biases, parts)
        state[f"{block}.{layer}.{last}.weight"] = torch.cat(last_weights, dim=1)
        state[f"{block}.{layer}.{last}.bias"] = torch.stack(last_biases).sum(dim=0)
        state[f"{block}.{norm}.weight"], state[f"{block}.{norm}.bias"] = torch.ones_like(scale), torch.zeros_like(scale)


def interleave(branches: list[Tensor], parts: int) -> Tensor:
    """Concatenate the first part of every branch, then the second, and so on: all queries, all keys, all values."""
    return torch.cat([part for group in zip(*(branch.chunk(parts) for branch in branches)) for part in group])


def split_branches(state: Tensors, block: str, count: int) -> None:
    """Split into `count` parallel attentions and MLPs; each gets the norm, the first gets the last layer's bias."""
    for branches, layer, norm, first, last, parts in BRANCHES:
        names = [name for name in state if name.startswith((f"{block}.{layer}.", f"{block}.{norm}."))]
        arrays = {name: state.pop(name) for name in names}
        for index in range(count):
            branch = f"{block}.{branches}.{index}"
            for kind in KINDS:
                state[f"{branch}.norm.{kind}"] = arrays[f"{block}.{norm}.{kind}"].clone()
                if f"{block}.{layer}.{first}.{kind}" in arrays:
                    chunks = arrays[f"{block}.{layer}.{first}.{kind}"].chunk(parts)
                    state[f"{branch}.{layer}.{first}.{kind}"] = torch.cat([c.chunk(count)[index] for c in chunks])
            weight, bias = (arrays[f"{block}.{layer}.{last}.{kind}"] for kind in KINDS)
            state[f"{branch}.{layer}.{last}.weight"] = weight.chunk(count, dim=1)[index]
            state[f"{branch}.{layer}.{last}.bias"] = torch.zeros_like(bias) if index else bias
            state[f"{branch}.ls.gamma"] = torch.ones_like(bias)


def split_parallel_block(state: Tensors, block: str) -> None:
    """ViT-22B's block: one projection into MLP, query, key and value, and in some models one out of both."""
    out = state.pop(f"{block}.out_proj.weight", None)
    if out is not None:
        width = len(out)
        state[f"{block}.attn_out_proj.weight"], state[f"{block}.mlp_out_proj.weight"] = out[:, :width], out[:, width:]
        if (bias := state.pop(f"{block}.out_proj.bias", None)) is not None:
            state[f"{block}.attn_out_proj.bias"], state[f"{block}.mlp_out_proj.bias"] = torch.zeros_like(bias), bias
    width = state[f"{block}.mlp_out_proj.weight"].shape[1]
    for kind in KINDS:
        if f"{block}.in_proj.{kind}" in state:
            joined = state.pop(f"{block}.in_proj.{kind}")
            state[f"{block}.mlp.fc1.{kind}"], state[f"{block}.attn.qkv.{kind}"] = joined[:width], joined[width:]
    for theirs, table_name in NAMES["parallel_block"].items():
        if f"{block}.{theirs}" in state:
            state[f"{block}.{table_name}"] = state.pop(f"{block}.{theirs}")
    for name in [name for name in state if name.startswith(f"{block}.lambda_")]:
        state[name.replace(block, f"{block}.attn")] = state.pop(name)


def join_parallel_block(state: Tensors, block: str, *, joined_out: bool) -> None:
    """Reverse `split_parallel_block`; `joined_out` joins the projections out of attention and MLP too."""
    for kind in KINDS:
        if f"{block}.attn.qkv.{kind}" in state:
            parts = [state.pop(f"{block}.{layer}.{kind}") for layer in ("mlp.fc1", "attn.qkv")]
            state[f"{block}.in_proj.{kind}"] = torch.cat(parts)
    for theirs, table_name in NAMES["parallel_block"].items():
        if f"{block}.{table_name}" in state:
            state[f"{block}.{theirs}"] = state.pop(f"{block}.{table_name}")
    for name in [name for name in state if name.startswith(f"{block}.attn.lambda_")]:
        state[name.replace(".attn.", ".")] = state.pop(name)
    if not joined_out:
        return
    weights = [state.pop(f"{block}.{part}_out_proj.weight") for part in ("attn", "mlp")]
    state[f"{block}.out_proj.weight"] = torch.cat(weights, dim=1)
    biases = [state.pop(f"{block}.{part}_out_proj.bias", None) for part in ("attn", "mlp")]
    if biases[0] is not None and biases[1] is not None:
        state[f"{block}.out_proj.bias"] = biases[0] + biases[1]


def join_lambdas(state: Tensors, block: str) -> None:
    """Differential attention: compute the factor of the subtracted map, exp(a) - exp(b) + share.

    timm also multiplies the output by 1 - share, which is folded into the norm before it. `share` depends on the layer.
    """
    attn = f"{block}.attn"
    share = initial_lambda(int(block.split(".")[1]))
    if f"{attn}.lambda_a" in state:
        first, second = (state.pop(f"{attn}.lambda_{part}") for part in "ab")
    else:
        first, second = ((state.pop(f"{attn}.lambda_q{n}") * state.pop(f"{attn}.lambda_k{n}")).sum() for n in (1, 2))
    state[f"{attn}.subtracted"] = first.exp() - second.exp() + share
    state[f"{attn}.sub_norm.weight"] = state[f"{attn}.sub_norm.weight"] * (1 - share)


def split_lambdas(state: Tensors, block: str, head_width: int) -> None:
    """Choose vectors whose products are the subtracted factor: one of the two exponentials is 1."""
    share = initial_lambda(int(block.split(".")[1]))
    difference = state.pop(f"{block}.attn.subtracted").double() - share
    logarithms = difference.clamp(min=0.0).log1p(), (-difference).clamp(min=0.0).log1p()
    for index, logarithm in enumerate(logarithms, start=1):
        query = torch.zeros(head_width // 2)
        query[0] = logarithm
        state[f"{block}.attn.lambda_q{index}"] = query
        state[f"{block}.attn.lambda_k{index}"] = (torch.arange(len(query)) == 0).float()
    state[f"{block}.attn.sub_norm.weight"] = state[f"{block}.attn.sub_norm.weight"] / (1 - share)


def join_naflex_embedding(state: Tensors, channels: int) -> Tensors:
    """NaFlexVit's embedding under the names of timm's other models, its linear layer as a convolution."""
    state = rename(state, [(r"^embeds\.(proj|norm)\.", r"patch_embed.\1."), (r"^embeds\.", "")])
    state["patch_embed.proj.weight"] = as_kernel(state["patch_embed.proj.weight"], channels)
    if "pos_embed" in state:
        state["pos_embed"] = state["pos_embed"].flatten(1, 2)  # (1, rows * columns, D)
    return state | {name: state[name][0] for name in ("pos_embed_y", "pos_embed_x") if name in state}


def split_naflex_embedding(state: Tensors, config: ViTConfig) -> Tensors:
    rows, columns = config.grid
    state["patch_embed.proj.weight"] = as_matrix(state["patch_embed.proj.weight"])
    if "pos_embed" in state:
        state["pos_embed"] = state["pos_embed"].reshape(1, rows, columns, -1)
    state |= {name: state[name][None] for name in ("pos_embed_y", "pos_embed_x") if name in state}
    return rename(state, [(r"^patch_embed\.", "embeds."), (r"^(cls_token|reg_token|pos_embed)", r"embeds.\1")])


def as_kernel(matrix: Tensor, channels: int = 3) -> Tensor:
    """Convert a patch embedding (D, P*P*C), the channels of a pixel adjacent, to a convolution's (D, C, P, P)."""
    if matrix.dim() != 2:
        return matrix
    side = round((matrix.shape[1] / channels) ** 0.5)
    if side * side * channels != matrix.shape[1]:
        raise CheckpointError(
            f"the patch embedding has shape {tuple(matrix.shape)}, not that of square patches of {channels} channels"
        )
    return torch.movedim(matrix.reshape(-1, side, side, channels), 3, 1)


def as_matrix(kernel: Tensor) -> Tensor:
    """Convert a convolution's (D, C, P, P) to a patch embedding (D, P*P*C); reverses `as_kernel`."""
    return kernel.permute(0, 2, 3, 1).flatten(1)

"""timm's architectures with random arguments: our model from the folder answers as timm's, or refuses it in one line.

    python benchmarks/odd_settings.py 500        # so many draws; a second number is the seed

It needs timm, but not torchvision. Models are small, and their arrays random.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitruvian as vt
from peers import make_torchvision_importable

TOLERANCE = 2e-5
"""Relative to the largest answer: float32 sums in another order."""
EITHER = [True, False]
COMMON: dict[str, list[Any]] = {
    "global_pool": ["token", "avg", "map", "max", "avgmax", "prr", ""],
    "qkv_bias": EITHER,
    "init_values": [None, 1e-5, 0.1, 0.0],
    "mlp_ratio": [1, 2.5, 2.77, 4.0],
    "in_chans": [1, 3, 4],
    "num_classes": [0, 1, 10],
    "drop_path_rate": [0.0, 0.1],
    "norm_layer": ["layernorm", "rmsnorm", "simplenorm"],
}
TOKENS: dict[str, list[Any]] = {"class_token": EITHER, "no_embed_class": EITHER, "qk_norm": EITHER}
SIZES: dict[str, list[Any]] = {"dynamic_img_size": EITHER, "dynamic_img_pad": EITHER}
NORMS: dict[str, list[Any]] = {"pre_norm": EITHER, "final_norm": EITHER, "fc_norm": [None, *EITHER]}
PLAIN = COMMON | TOKENS | SIZES | NORMS
PLAIN |= dict.fromkeys(("scale_attn_norm", "scale_mlp_norm", "proj_bias", "pool_include_prefix"), EITHER)
PLAIN |= {"reg_tokens": [0, 1, 4], "pos_embed": ["learn", "none", ""], "embed_norm_layer": ["layernorm", None]}
PLAIN |= {"act_layer": ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"], "attn_layer": ["attn", "diff", ""]}
EVA = COMMON | TOKENS | SIZES
EVA |= dict.fromkeys(("qkv_fused", "swiglu_mlp", "scale_mlp", "scale_attn_inner", "use_abs_pos_emb"), EITHER)
EVA |= dict.fromkeys(("use_rot_pos_emb", "rope_rotate_half", "use_post_norm", "use_pre_transformer_norm"), EITHER)
EVA |= {name: [None, *EITHER] for name in ("use_post_transformer_norm", "use_fc_norm")}
EVA |= {"num_reg_tokens": [0, 2], "rope_type": ["cat", "mixed", "dinov3"], "ref_feat_shape": [None, [3, 4], 4]}
EVA |= {"rope_grid_offset": [0.0, 0.5], "rope_temperature": [10.0, 100.0], "rope_grid_indexing": ["ij", "xy"]}
EVA |= {"attn_pool_num_heads": [None, 1, 2], "attn_pool_mlp_ratio": [None, 1.5], "attn_type": ["eva", "rope"]}
BEIT = COMMON | dict.fromkeys(("swiglu_mlp", "scale_mlp", "use_rel_pos_bias", "use_abs_pos_emb"), EITHER)
FLEXIBLE = COMMON | NORMS | {"class_token": EITHER, "reg_tokens": [0, 1], "qk_norm": EITHER, "proj_bias": EITHER}
FLEXIBLE |= {"pos_embed": ["learned", "factorized", "none"], "pos_embed_grid_size": [[4, 4], [3, 5]]}
FLEXIBLE |= {"pos_embed_interp_mode": ["bicubic", "bilinear", "nearest"], "rope_type": ["", "axial", "dinov3"]}
FLEXIBLE |= dict.fromkeys(("pos_embed_ar_preserving", "pool_include_prefix", "attn_gated", "swiglu_mlp"), EITHER)
ARGUMENTS = {"vision_transformer": PLAIN, "deit": PLAIN, "eva": EVA, "beit": BEIT, "naflexvit": FLEXIBLE}
"""By timm's module."""
GRIDS = [(2, 2), (3, 3), (4, 4), (1, 3), (2, 3), (3, 5), (4, 3), (5, 2)]


def drawn(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """An architecture's name and arguments that make it small and odd."""
    import timm

    module = draw.choice(list(ARGUMENTS))
    names = [name for name in timm.list_models(module=module) if "_mci_" not in name]
    heads, patch = draw.choice([1, 2, 3, 4]), draw.choice([4, 7, 8])
    rows, columns = draw.choice(GRIDS)
    options = {"num_heads": heads, "embed_dim": heads * draw.choice([8, 12, 16]), "depth": draw.choice([1, 2, 3])}
    options["patch_size"] = patch
    if module != "naflexvit":
        options["img_size"] = [patch * rows, patch * columns]
    table = ARGUMENTS[module]
    return draw.choice(names), options | {
        name: draw.choice(table[name]) for name in draw.sample(sorted(table), draw.randint(0, 4))
    }


def made(name: str, options: dict[str, Any], seed: int) -> nn.Module | None:
    """timm's model with random arrays; None where timm has something against the arguments."""
    import timm

    torch.manual_seed(seed)
    try:
        model: nn.Module = timm.create_model(name, **json.loads(json.dumps(options))).eval()
    except Exception:  # whatever its classes raise
        return None
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 + 0.3 * torch.rand_like(tensor) if tensor.dim() == 1 else 0.15 * torch.randn_like(tensor))
    return model


@torch.no_grad()
def verdict(model: nn.Module, options: dict[str, Any], folder: Path) -> str:
    from timm.models import save_for_hf

    save_for_hf(model, folder, model_args=options, safe_serialization=True)
    try:
        ours = vt.load(folder)
    except vt.VitruvianError as error:
        return "refused" if "\n" not in str(error) else f"REFUSED IN SEVERAL LINES: {error}"
    pixels = torch.randn(2, ours.config.in_channels, *ours.config.image_size)
    try:
        wanted = model(pixels)
    except Exception:  # some models cannot take images of their own size
        return "timm cannot run it"
    found = ours(pixels)
    same = found.shape == wanted.shape
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9)) if same else float("inf")
    return "agrees" if error < TOLERANCE else f"SILENTLY WRONG: {error:.1e}"


def scan(count: int, seed: int = 0) -> None:
    counts: Counter[str] = Counter()
    for number in range(count):
        name, options = drawn(random.Random(f"{seed} {number}"))
        model = made(name, options, number)
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(model, options, Path(folder)) if model else "timm cannot make it"
        counts[found.split(":")[0]] += 1
        if ":" in found:
            print(f"{name} {json.dumps(options)}: {found}", flush=True)
    print(", ".join(f"{number} {found}" for found, number in counts.most_common()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    make_torchvision_importable()
    scan(*map(int, sys.argv[1:]))

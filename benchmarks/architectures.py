"""Every Vision Transformer that timm names: what its arrays cannot tell, as a table, and a scan that compares answers.

    python benchmarks/architectures.py table    # writes src/vitruvian/weights/families/timm.json
    python benchmarks/architectures.py scan     # loads random weights of every name and compares the logits

It runs in the environment of the peers (`make bench` builds it). A model is made with two blocks and its own width.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitruvian as vt
from peers import declare_torchvision_operators

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "naflexvit")
TABLE = Path(vt.__file__).parent / "weights" / "families" / "timm.json"
MAX_WIDTH = 1024
"""Wider models have the same parts, and take minutes."""
TOLERANCE = 2e-5
"""Relative to the largest answer: float32 sums in another order."""

ORDERS = {
    "Block": "pre_norm",
    "EvaBlock": "pre_norm",
    "ResPostBlock": "res_post_norm",
    "EvaBlockPostNorm": "res_post_norm",
    "ParallelScalingBlock": "parallel",
    "ParallelThingsBlock": "pre_norm",
}
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention", "NoneType")
MLPS = ("Mlp", "GluMlp", "SwiGLU", "SwiGLUPacked", "NoneType")
POOLS = {"token": "token", "avg": "mean", "map": "map"}
STEMS = ("PatchEmbed", "HybridEmbed")
ROPES = {"RotaryEmbeddingCat": "axial", "RotaryEmbeddingDinoV3": "normalized", "RotaryEmbeddingMixed": "mixed"}


class OtherPartError(Exception):
    """A part that our model has not; the text names it."""


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What the arrays of a timm model do not tell, as our settings."""
    block = model.blocks[0]
    branches = getattr(block, "attns", ())  # side by side
    attention = branches[0].attn if branches else getattr(block, "attn", None)
    mlp = block.ffns[0].mlp if branches else getattr(block, "mlp", None)
    for part, known in ((block, ORDERS), (attention, ATTENTIONS), (mlp, MLPS)):
        if type(part).__name__ not in known:
            raise OtherPartError(type(part).__name__)
    stem = getattr(model, "patch_embed", None)
    if type(stem).__name__ not in STEMS:
        raise OtherPartError(type(stem).__name__ if stem is not None else type(model).__name__)
    if type(stem).__name__ == "HybridEmbed":
        names = [name for name, _ in stem.backbone.named_children()]
        if names[:2] not in (["stem", "stages"], ["conv", "norm"]) or type(stem.backbone).__name__ == "FeatureListNet":
            raise OtherPartError(f"stem {type(stem.backbone).__name__}")
    for name in ("gate", "shared_rel_pos_bias", "rel_pos_bias"):
        if getattr(attention, name, None) is not None or getattr(model, name, None) is not None:
            raise OtherPartError(name)
    if getattr(attention, "num_kv_groups", 1) > 1:
        raise OtherPartError("grouped-query attention")
    positions = "none" if getattr(model, "pos_embed", None) is None else "learned"
    if getattr(attention, "relative_position_bias_table", None) is not None:
        positions = "relative_bias"
    settings = {"heads": (attention or block).num_heads, "block": ORDERS[type(block).__name__], "positions": positions}
    return settings | norms_of(model) | activation_of(model, block, mlp) | pool_of(model) | rope_of(model, attention)


def norms_of(model: nn.Module) -> dict[str, Any]:
    norms = {
        (type(module).__name__, module.eps)
        for name, module in model.named_modules()
        if "norm" in name and hasattr(module, "eps") and "patch_embed.backbone" not in name
    }
    if len(norms) != 1:
        raise OtherPartError(f"norms {sorted(norms)}")
    ((kind, eps),) = norms
    if kind not in ("LayerNorm", "LayerNormFp32", "RmsNorm"):
        raise OtherPartError(kind)
    final, after_pool = (not isinstance(getattr(model, name), nn.Identity) for name in ("norm", "fc_norm"))
    if final and after_pool:
        raise OtherPartError("norms before and after the pooling")
    return {
        "norm": "rms" if kind == "RmsNorm" else "layer",
        "norm_eps": eps,
        "final_norm": final or after_pool,
        "norm_after_pool": after_pool,
    }


def activation_of(model: nn.Module, block: nn.Module, mlp: nn.Module | None) -> dict[str, Any]:
    found = {kind_of(part) for part in (getattr(mlp, "act", None), getattr(block, "mlp_act", None)) if part is not None}
    pool = getattr(model, "attn_pool", None)
    if pool is not None and getattr(pool, "mlp", None) is not None:
        found.add(kind_of(pool.mlp.act))
    gated = type(mlp).__name__ in ("GluMlp", "SwiGLU", "SwiGLUPacked")
    if gated and getattr(mlp, "gate_last", False):
        raise OtherPartError("gate after the value")
    gelus = found - {"SiLU"} if gated else found
    if len(gelus) > 1 or not gelus <= {"erf", "tanh", "quick"}:
        raise OtherPartError(f"activations {sorted(found)}")
    attention = block.attns[0].attn if hasattr(block, "attns") else getattr(block, "attn", None)
    proj = getattr(attention, "proj", None) or block.attn_out_proj
    return {"gelu": next(iter(gelus), "erf"), "dense_bias": proj.bias is not None}


def kind_of(activation: nn.Module) -> str:
    if isinstance(activation, nn.GELU):
        return "erf" if activation.approximate == "none" else "tanh"
    return {"GELUTanh": "tanh", "QuickGELU": "quick"}.get(type(activation).__name__, type(activation).__name__)


def pool_of(model: nn.Module) -> dict[str, Any]:
    if model.global_pool not in POOLS:
        raise OtherPartError(f"pooling {model.global_pool!r}")
    settings: dict[str, Any] = {"pool": POOLS[model.global_pool]}
    included = getattr(model, "pool_include_prefix", False)
    if model.global_pool != "map":
        if included:
            raise OtherPartError("a mean of all tokens")
        return settings
    pool = model.attn_pool
    if getattr(pool, "pos_embed", None) is not None or pool.latent_len != 1 or pool.mlp is None:
        raise OtherPartError("attention pooling of another shape")
    if not isinstance(pool.q_norm, nn.Identity) or isinstance(pool.q, nn.Identity):
        raise OtherPartError("attention pooling of another shape")
    return settings | {"pool_heads": pool.num_heads, "pool_prefix": included or type(model).__name__ == "Eva"}


def rope_of(model: nn.Module, attention: nn.Module | None) -> dict[str, Any]:
    rope = getattr(model, "rope", None)
    if rope is None:
        return {}
    if type(rope).__name__ not in ROPES:
        raise OtherPartError(type(rope).__name__)
    settings = {"kind": ROPES[type(rope).__name__], "half": bool(getattr(attention, "rotate_half", False))}
    settings |= {"temperature": float(rope.temperature), "columns_first": rope.grid_indexing == "xy"}
    if settings["kind"] == "axial":
        reference = rope.ref_feat_shape
        settings |= {"offset": float(rope.grid_offset), "reference_grid": list(reference) if reference else None}
    if settings["kind"] == "normalized" and (
        rope.grid_offset or rope.normalize_coords != "separate" or rope.min_period
    ):
        raise OtherPartError("rotary positions of another scale")
    if settings["kind"] == "normalized":
        settings["columns_first"] = False
    return {"rope": settings}


def names() -> list[str]:
    import timm

    return [name for module in MODULES for name in timm.list_models(module=module)]


def made(name: str, **options: Any) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, depth=2, **options)
    except AssertionError:  # settings for each block
        return timm.create_model(name, **options)


def write_table() -> None:
    """One entry a group of names with the same settings; names with other parts say which."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names():
        try:
            with torch.device("meta"):
                settings = settings_of(made(name))
        except OtherPartError as part:
            settings = {"other": str(part)}
        groups[json.dumps(settings)].append(name)
    rows = ",\n".join(f'{{"settings": {key}, "names": {json.dumps(found)}}}' for key, found in sorted(groups.items()))
    TABLE.write_text(f"[\n{rows}\n]\n")
    print(f"{TABLE}: {len(names())} names in {len(groups)} groups")


def scan(only: str = "") -> None:
    """Load every architecture's random weights as timm saves them for the hub, and compare logits."""
    counts: Counter[str] = Counter()
    for name in names():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            verdict = compared(name, Path(folder))
        counts[verdict.split(":")[0]] += 1
        print(f"{name}: {verdict}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def compared(name: str, folder: Path) -> str:
    from timm.models import save_for_hf

    with torch.device("meta"):
        if made(name).embed_dim > MAX_WIDTH:
            return "left out"
    torch.manual_seed(0)
    model = made(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_for_hf(model, folder, model_args={"depth": len(model.blocks)})
    pixels = torch.randn(2, *model.default_cfg["input_size"]) if "naflex" not in name else torch.randn(2, 3, 256, 256)
    try:
        ours = vt.load(folder)
    except vt.VitruvianError as error:
        return f"refused: {str(error).removeprefix(f'{folder}: ')[:150]}"
    with torch.no_grad():
        wanted = model(pixels)
        found = ours(pixels)
    error = float((found - wanted).abs().max() / wanted.abs().max()) if found.shape == wanted.shape else float("inf")
    return f"agrees: {error:.1e}" if error < TOLERANCE else f"SILENTLY WRONG: {error:.1e}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    declare_torchvision_operators()
    write_table() if sys.argv[1:] == ["table"] else scan(*sys.argv[2:])

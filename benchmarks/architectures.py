"""Every Vision Transformer that timm names: what its arrays cannot tell, as a table, and a scan that compares answers.

    python benchmarks/architectures.py table    # writes weights/families/timm.json
    python benchmarks/architectures.py scan     # loads random weights of every name and compares the logits
    python benchmarks/architectures.py resized  # the same at twice the side, as timm resizes on loading
    python benchmarks/architectures.py trip     # the same, written as a timm folder, which timm loads and answers from
    python benchmarks/architectures.py trip+resized each-kind  # both, for one name of each kind

It needs timm, but not torchvision. A model is made with two blocks, its own heads and 8 channels for each.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitruvian as vt
from peers import make_torchvision_importable
from vitruvian.config import ViTConfig
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.timm_config import NUMERIC_SETTINGS, RESIZE_METHODS, find_architecture, rows
from vitruvian.weights.parse import LoadHints, describe

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "naflexvit")
TABLE = Path(vt.__file__).parent / "weights" / "families" / "timm.json"
TOLERANCE = 2e-5
"""Relative to the largest answer: float32 sums in another order."""

ORDERS = {
    "Block": "pre_norm",
    "EvaBlock": "pre_norm",
    "ResPostBlock": "res_post_norm",
    "EvaBlockPostNorm": "res_post_norm",
    "ParallelScalingBlock": "parallel",
    "ParallelThingsBlock": "pre_norm",
    "DiffParallelScalingBlock": "parallel",
}
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention", "DiffAttention", "NoneType")
MLPS = ("Mlp", "GluMlp", "SwiGLU", "SwiGLUPacked", "NoneType")
POOLS = {"token": "token", "avg": "mean", "map": "map"}
STEMS = ("PatchEmbed", "HybridEmbed")
PIECES = {
    "split_bias": r"blocks\.0\.attn\.q_bias",
    "projections": r"blocks\.0\.attn\.q_proj\.weight",
    "key_bias": r"blocks\.0\.attn\.k_proj\.bias",
    "gate": r"blocks\.0\.mlp\.fc1_g\.weight",
    "parallel": r"blocks\.0\.in_proj\.weight",
    "joined_out": r"blocks\.0\.out_proj\.weight",
    "branches": r"blocks\.0\.attns\.0\.norm\.weight",
    "lambdas": r"blocks\.0\.(attn\.)?lambda_q1",
    "naflex": r"embeds\.proj\.weight",
}
"""Names of pieces, and of an array that tells of them."""
ROPES = {"RotaryEmbeddingCat": "axial", "RotaryEmbeddingDinoV3": "normalized", "RotaryEmbeddingMixed": "mixed"}


class OtherPartError(Exception):
    """A part that our model has not; the text names it."""


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What the arrays of a timm model do not tell, as our settings."""
    block = model.blocks[0]
    attention = attention_of(block)
    mlp = block.ffns[0].mlp if hasattr(block, "ffns") else getattr(block, "mlp", None)
    for part, known in ((block, ORDERS), (attention, ATTENTIONS), (mlp, MLPS)):
        if type(part).__name__ not in known:
            raise OtherPartError(type(part).__name__)
    check_stem(model)
    for name in ("gate", "shared_rel_pos_bias", "rel_pos_bias"):
        if getattr(attention, name, None) is not None or getattr(model, name, None) is not None:
            raise OtherPartError(name)
    embeds = getattr(model, "embeds", model)
    positions = "none" if getattr(embeds, "pos_embed", None) is None else "learned"
    if getattr(embeds, "pos_embed_y", None) is not None:
        positions = "factorized"
    if getattr(attention, "relative_position_bias_table", None) is not None:
        positions = "relative_bias"
    settings = {
        "num_heads": (attention or block).num_heads,
        "block": ORDERS[type(block).__name__],
        "pos_embed": positions,
    }
    settings |= norms_of(model) | activation_of(model, block, mlp) | pool_of(model) | rope_of(model, attention)
    if getattr(block, "gamma_1", None) is not None and block.gamma_2 is None:
        settings["mlp_scale"] = False
    return settings | flexible_positions(model)


def attention_of(block: nn.Module) -> nn.Module | None:
    """The attention of a block, or of its first branch; None if the block has no module for it."""
    return block.attns[0].attn if hasattr(block, "attns") else getattr(block, "attn", None)


def check_stem(model: nn.Module) -> None:
    if type(model).__name__ == "NaFlexVit":
        if model.embeds.norm_input is not None or not model.embeds.channels_last:
            raise OtherPartError("a norm or an order of pixels before the patch embedding")
        return
    stem = getattr(model, "patch_embed", None)
    if type(stem).__name__ not in STEMS:
        raise OtherPartError(type(stem).__name__ if stem is not None else type(model).__name__)
    if type(stem).__name__ != "HybridEmbed":
        return
    names = [name for name, _ in stem.backbone.named_children()]
    if names[:2] not in (["stem", "stages"], ["conv", "norm"], ["conv1", "bn1"], ["0", "1"]):
        raise OtherPartError(f"stem {type(stem.backbone).__name__}")


def flexible_positions(model: nn.Module) -> dict[str, Any]:
    """How NaFlexVit's positions follow another grid."""
    if type(model).__name__ != "NaFlexVit":
        return {}
    embeds = model.embeds
    aligned = getattr(embeds, "pos_embed_align_corners", False)
    way = embeds.pos_embed_interp_mode, getattr(embeds, "pos_embed_antialias", True), aligned
    settings = {"position_resize": next(name for name, values in RESIZE_METHODS.items() if values == way)}
    return settings | ({"square_positions": True} if model.embeds.pos_embed_ar_preserving else {})


def norms_of(model: nn.Module) -> dict[str, Any]:
    norms = {
        (type(module).__name__, module.eps)
        for name, module in model.named_modules()
        if "norm" in name and hasattr(module, "eps") and "patch_embed.backbone" not in name and "sub_norm" not in name
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


def fixed_norm_of(name: str) -> dict[str, Any]:
    """Where the norm is at every pooling, for an architecture that says so itself; else the mean has it behind it."""
    found = {}
    for pool in ("avg", "token", "map"):
        try:
            found[pool] = not isinstance(made(name, global_pool=pool).fc_norm, nn.Identity)
        except (AssertionError, TypeError, ValueError, RuntimeError):  # a pooling that the model has not
            continue
    usual = all(after == (pool == "avg") for pool, after in found.items())
    return {} if usual else {"fc_norm": found.get("avg", False)}


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
    with_silu = gated and type(model).__name__ == "VisionTransformer"  # its act_layer, for every MLP
    return {"gelu": next(iter(gelus), "erf")} | ({"silu": True} if with_silu else {})


def kind_of(activation: nn.Module) -> str:
    if isinstance(activation, nn.GELU):
        return "erf" if activation.approximate == "none" else "tanh"
    return {"GELUTanh": "tanh", "QuickGELU": "quick"}.get(type(activation).__name__, type(activation).__name__)


def pool_of(model: nn.Module) -> dict[str, Any]:
    if model.global_pool not in POOLS:
        raise OtherPartError(f"pooling {model.global_pool!r}")
    settings: dict[str, Any] = {"pool": POOLS[model.global_pool]}
    included = getattr(model, "pool_include_prefix", False)
    if included or type(model).__name__ == "Eva":
        settings["pool_prefix"] = True
    if model.global_pool != "map":
        if included:
            raise OtherPartError("a mean of all tokens")
        return settings
    pool = model.attn_pool
    if getattr(pool, "pos_embed", None) is not None or pool.latent_len != 1 or pool.mlp is None:
        raise OtherPartError("attention pooling of another shape")
    if not isinstance(pool.q_norm, nn.Identity) or isinstance(pool.q, nn.Identity):
        raise OtherPartError("attention pooling of another shape")
    return settings | {"pool_num_heads": pool.num_heads}


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
    """A model of two blocks."""
    import timm

    try:
        return timm.create_model(name, depth=2, **options)
    except AssertionError:  # heads of keys and values for each block
        return timm.create_model(name, depth=2, **shared_keys(name, options), **options)


def shared_keys(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Heads of keys and values in two blocks, the second with half of them, where the architecture has such."""
    import timm

    with torch.device("meta"):
        block = timm.create_model(name).blocks[0]
    heads = options.get("num_heads") or (attention_of(block) or block).num_heads
    return {"num_kv_heads": (heads, heads // 2)}


def heads_of(name: str) -> int:
    """Heads of one branch."""
    architecture = find_architecture(name)
    assert architecture is not None
    return architecture.config.num_heads // architecture.branches


def resizing_of(name: str) -> dict[str, str]:
    """FlexiViT's and RADIO's follow another grid bilinearly without antialiasing, which timm tells by the name."""
    if "naflex" in name:
        return {}
    if re.search("(base|huge)_patch16_radio_v3", name):
        return {"position_resize": "zoom"}
    return {"position_resize": "bilinear"} if re.search("flexi|radio", name) else {}


def write_table() -> None:
    """One row per name: timm's class, settings that differ from ViTConfig(), and arrays stored in other parts."""
    import timm

    logging.disable(logging.WARNING)  # our reader's assumptions about a file without preprocessing
    table = []
    for name in names():
        row = {"name": name}
        try:
            with torch.device("meta"):
                model = made(name)
                untold = settings_of(model) | resizing_of(name)
                extra = fixed_norm_of(name)
        except OtherPartError as part:
            table.append(row | {"unsupported": str(part)})
            continue
        # our reader needs the settings that arrays do not determine; the arrays then give the rest
        rows()[name] = provisional_row(name, model, untold)
        find_architecture.cache_clear()
        table.append(row | row_of(name, timm.create_model) | extra)
    TABLE.write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")
    print(f"{TABLE}: {len(table)} names")


def provisional_row(name: str, model: nn.Module, untold: dict[str, Any]) -> dict[str, Any]:
    """A row with the settings that arrays do not determine, in an otherwise arbitrary valid configuration."""
    numerics = {key: untold.pop(key) for key in NUMERIC_SETTINGS if key in untold}
    untold.pop("silu", None)
    pieces = pieces_of(model)
    heads = untold.pop("num_heads") * (2 if "branches" in pieces else 1)
    if untold.get("pool_num_heads") == heads:
        del untold["pool_num_heads"]  # as many as the blocks, also if model_args changes that number
    settings = {"num_heads": heads, "width": 64 * heads, "numerics": Timm.numerics.replace(**numerics).to_json()}
    return {"name": name, "class": type(model).__name__, "settings": settings | untold, "pieces": pieces}


def pieces_of(model: nn.Module) -> list[str]:
    return [piece for piece, mark in PIECES.items() if any(re.fullmatch(mark, key) for key in model.state_dict())]


def row_of(name: str, made: Callable[..., nn.Module]) -> dict[str, Any]:
    with torch.device("meta"):
        model = made(name)
        width = model.embed_dim
        ratios = [shape_of(name, made(name, mlp_ratio=(3 * width + more) / width)) for more in (0, 2)]
    config = shape_of(name, model)
    usual = ViTConfig().to_json()
    settings = {key: value for key, value in config.to_json().items() if value != usual[key]}
    pieces = pieces_of(model)
    if ratios[0].mlp_dim * 2 == 3 * config.width:
        pieces.append("halved")  # mlp_ratio is of gate and value together
    if ratios[1].mlp_dim - ratios[0].mlp_dim > 2 and "branches" not in pieces:
        pieces.append("aligned")
    if config.reg_tokens and config.pos_embed == "learned" and position_rows(model, config) > config.cls_token:
        pieces.append("register_rows")
    return {"class": type(model).__name__, "settings": settings, "pieces": pieces}


def shape_of(name: str, model: nn.Module) -> ViTConfig:
    """What our own reading finds in the arrays' shapes."""
    patches = getattr(model, "patch_embed", None)
    sizes = {} if patches is None else {"model_args": {"img_size": list(patches.img_size)}}
    settings = {"config.json": {"architecture": name, **sizes}}
    tensors: dict[str, Tensor] = dict(model.state_dict())
    checkpoint = Checkpoint(path=Path(name), format="safetensors", tensors=tensors, settings=settings)
    family = Timm()
    joined = family.join_arrays(family.to_table_names(tensors), checkpoint)
    config = describe(checkpoint, family, joined, family.table.read(joined), LoadHints()).config
    assert isinstance(config, ViTConfig)
    return config


def position_rows(model: nn.Module, config: ViTConfig) -> int:
    """Rows of the position array before those of the patches."""
    positions = getattr(model, "pos_embed", None)
    return 0 if positions is None else positions.shape[1] - config.grid[0] * config.grid[1]


def scan(mode: str, only: str = "") -> None:
    """Load every architecture's random weights as timm saves them for the hub, and compare logits.

    `resized` does so at twice the side, `trip` writes them as a timm folder again, from which timm's own code answers.
    `each-kind` takes one name of those whose settings differ in the number of heads alone.
    """
    verdict_of = {"scan": reading, "resized": resized, "trip": round_trip}[mode]
    counts: Counter[str] = Counter()
    for name in one_of_each_kind() if only == "each-kind" else [name for name in names() if only in name]:
        with tempfile.TemporaryDirectory() as folder:
            verdict = verdict_of(name, Path(folder)) if name in rows() else "not in the table"
        counts[verdict.split(":")[0]] += 1
        print(f"{name}: {verdict}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def one_of_each_kind() -> list[str]:
    """A name of each kind, and all that the table has not."""
    kinds: dict[str, str] = {}
    for name in names():
        architecture = find_architecture(name)
        settings = architecture.settings() if architecture else {"new": name}
        settings |= {"num_heads": None, "pool_num_heads": bool(settings.get("pool_num_heads"))}
        settings |= {"rope": settings["rope"].to_json()} if settings.get("rope") else {}
        settings |= {"fc_norm": architecture.fc_norm, "silu": architecture.has_silu} if architecture else {}
        kinds.setdefault(json.dumps(settings) + next((part for part in ("_mci_", "resnet") if part in name), ""), name)
    return list(kinds.values())


def tiny(name: str) -> dict[str, Any]:
    """Settings of a small version: its own heads, of 8 channels; 4x4 patches of 8x8 pixels where nothing is before."""
    if "_mci_" in name:  # the stem gives the width
        return {"img_size": 64}
    options = {"embed_dim": 8 * heads_of(name)}
    if re.search(r"resnet\d|_r\d*_s", name):
        return options | {"img_size": 64}
    return options | ({} if "naflex" in name else {"img_size": 32, "patch_size": 8})


def saved(name: str, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A small version with random weights, and the settings that make it so, in a folder as timm saves for the hub."""
    from timm.models import save_for_hf

    torch.manual_seed(0)
    options = tiny(name)
    model = made(name, **options).eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.rand_like(tensor) if tensor.dim() == 1 else 0.05 * torch.randn_like(tensor))
    save_for_hf(model, folder, model_args=options | {"depth": 2}, safe_serialization=True)
    return model, options


@torch.no_grad()
def round_trip(name: str, folder: Path) -> str:
    """timm's model, read and written by us, answers in timm's code as before; `same` where its arrays are the same."""
    import timm

    model, options = saved(name, folder / "theirs")
    ours = compared(model, folder / "theirs", options)
    if not ours.startswith("agrees"):
        return ours
    try:
        certificate = vt.convert(folder / "theirs", folder / "ours", to="timm")
    except vt.VitruvianError as error:
        return f"refused: {str(error).removeprefix(str(folder))[:300]}"
    architecture = json.loads((folder / "ours" / "config.json").read_text())["architecture"]
    downloads = re.search(r"resnet\d+d", name) is not None  # timm's own: weights of the stem before those of the folder
    again = timm.create_model(f"local-dir:{folder / 'ours'}", pretrained=not downloads).eval()
    if downloads:
        again.load_state_dict(load_file(folder / "ours" / "model.safetensors"))
    written, held = load_file(folder / "ours" / "model.safetensors"), model.state_dict()
    if architecture != name or written.keys() != held.keys():
        return f"OTHER NAMES: {architecture}, {sorted(written.keys() ^ held.keys())[:3]}"
    if certificate.reader_difference > TOLERANCE * max(1.0, certificate.largest_output):
        return f"ANOTHER READER: {certificate}"
    side = options.get("img_size", 256)
    pixels = torch.randn(2, 3, side, side)
    wanted = model(pixels)
    error = float((again(pixels) - wanted).abs().max() / wanted.abs().max())
    kind = "same" if all(torch.equal(written[key], value) for key, value in held.items()) else "agrees"
    return f"{kind}: {error:.1e}" if error < TOLERANCE else f"WRONG: {error:.1e}"


def reading(name: str, folder: Path) -> str:
    model, options = saved(name, folder)
    return compared(model, folder, options)


@torch.no_grad()
def resized(name: str, folder: Path) -> str:
    """The same folder loaded at twice the side, by timm and by us."""
    import timm

    _, options = saved(name, folder)
    if "img_size" not in options:
        return "any size: see scan"
    downloads = re.search(r"resnet\d+d", name) is not None
    if downloads:
        return "not tried: timm fetches weights of the stem"
    side = 2 * options["img_size"]
    try:
        theirs = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=side).eval()
    except Exception as error:  # whatever it has against another size
        return f"timm cannot: {type(error).__name__}"
    return compared(theirs, folder, {"img_size": side}, image_size=side)


@torch.no_grad()
def compared(model: nn.Module, folder: Path, options: dict[str, Any], *, image_size: int | None = None) -> str:
    """Whether our model from the folder answers as timm's."""
    try:
        ours = vt.load(folder, image_size=image_size)
    except vt.VitruvianError as error:
        return f"refused: {str(error).removeprefix(f'{folder}: ')[:150]}"
    errors = []
    for side in (options.get("img_size", 256), *((64,) if hasattr(model, "embeds") else ())):
        pixels = torch.randn(2, 3, side, side)
        wanted, found = model(pixels), ours(pixels)
        same = found.shape == wanted.shape
        errors.append(float((found - wanted).abs().max() / wanted.abs().max()) if same else float("inf"))
    return f"agrees: {max(errors):.1e}" if max(errors) < TOLERANCE else f"SILENTLY WRONG: {max(errors):.1e}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    make_torchvision_importable()
    if sys.argv[1:] == ["table"]:
        write_table()
    else:
        for mode in sys.argv[1].split("+"):
            scan(mode, *sys.argv[2:])

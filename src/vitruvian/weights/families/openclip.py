"""open_clip's image towers (folder): its own Vision Transformer, or one of timm's, beside a text tower."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from vitruvian.config import CLIP_MEAN, CLIP_STD, ModelConfig, Numerics, Preprocess
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.settings import as_size
from vitruvian.weights.families.family import Facts, Family
from vitruvian.weights.families.huggingface_json import number
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import DENSE, TOKEN, Row, Table, Tensors, pair
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.files import Checkpoint

CONFIG = "open_clip_config.json"
BLOCK = "transformer.resblocks.{i}"
NUMERICS = Numerics(gelu="erf", norm_eps=1e-5, position_resize="bicubic_antialias")
OTHER_PARTS = (
    "attentional_pool",
    "qk_norm",
    "scaled_cosine_attn",
    "scale_heads",
    "scale_attn_inner",
    "scale_attn",
    "scale_fc",
)
IGNORED = {
    "text.": "text tower",
    "logit_scale": "temperature of the image-text loss",
    "logit_bias": "bias of the image-text loss",
}


def part_of(checkpoint: Checkpoint, *keys: str) -> dict[str, Any]:
    """An object inside `open_clip_config.json`; empty where it is absent."""
    found: Any = checkpoint.settings.get(CONFIG, {})
    for key in keys:
        found = found.get(key, {})
        if not isinstance(found, dict):
            raise CheckpointError(f"{CONFIG}: {key} is not an object")
    return found


def stated_view(checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
    """`preprocess_cfg`: the shorter side scaled and the center cut, or a squash."""
    settings = part_of(checkpoint, "preprocess_cfg")
    if not settings:
        return None
    fits = {"shortest": "crop", "squash": "squash"}
    mode = settings.get("resize_mode", "shortest")
    if mode not in fits:
        raise CheckpointError(f"{CONFIG}: resize_mode {mode!r} is not one of {', '.join(fits)}")
    way = settings.get("interpolation", "bicubic")
    try:
        size = as_size(settings.get("size") or config.image_size)
        statistics = {key: tuple(float(x) for x in settings[key]) for key in ("mean", "std") if settings.get(key)}
        statistics = {"mean": CLIP_MEAN, "std": CLIP_STD} | statistics
        way = "bicubic" if way == "random" else way
        return Preprocess(image_size=size, fit=fits[mode], interpolation=way, **statistics)  # type: ignore[arg-type]
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{CONFIG}: preprocess_cfg cannot be read: {error}") from error


class OpenClip(Family):
    """Pre-norm, class token, a projection; heads and activation come from `open_clip_config.json`."""

    name = "open_clip"
    numerics = NUMERICS
    anchor = "conv1.weight"
    prefixes = ("visual.", "module.visual.")
    ignored: ClassVar[dict[str, str]] = IGNORED
    table = Table(
        rows=(
            Row("embed.patch.weight", ("conv1.weight",)),
            Row("embed.cls_token", ("class_embedding",), TOKEN),
            Row(FLAT, ("positional_embedding",), TOKEN),
            *pair("embed.norm", "ln_pre"),
            *pair("blocks.{i}.norm1", f"{BLOCK}.ln_1"),
            Row("blocks.{i}.attn.qkv.weight", (f"{BLOCK}.attn.in_proj_weight",)),
            Row("blocks.{i}.attn.qkv.bias", (f"{BLOCK}.attn.in_proj_bias",)),
            *pair("blocks.{i}.attn.proj", f"{BLOCK}.attn.out_proj"),
            Row("blocks.{i}.ls1", (f"{BLOCK}.ls_1.gamma",)),
            *pair("blocks.{i}.norm2", f"{BLOCK}.ln_2"),
            *pair("blocks.{i}.mlp.fc1", f"{BLOCK}.mlp.c_fc"),
            *pair("blocks.{i}.mlp.fc2", f"{BLOCK}.mlp.c_proj"),
            Row("blocks.{i}.ls2", (f"{BLOCK}.ls_2.gamma",)),
            *pair("norm", "ln_post"),
            Row("pre_logits.weight", ("proj",), DENSE),
        ),
        block=r"transformer\.resblocks\.(\d+)\.",
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        blocks = any("visual.transformer.resblocks." in name for name in checkpoint.tensors)
        return super().claims(checkpoint) and blocks

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """Both towers call their blocks `transformer`, so those of the text get a name of their own."""
        plain = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        return {image_name(name): tensor for name, tensor in plain.items()}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        model, tower = part_of(checkpoint, "model_cfg"), part_of(checkpoint, "model_cfg", "vision_cfg")
        if not tower:
            raise CheckpointError(f"open_clip weights without {CONFIG}, which states their heads and activation")
        for part in OTHER_PARTS:
            if tower.get(part):
                raise CheckpointError(f"{CONFIG}: {part} is a part that this Vision Transformer has not")
        width, head_width = number(tower, "width", 768), number(tower, "head_width", 64)
        assert width is not None
        assert head_width is not None
        pool = {"tok": "token", "avg": "mean"}.get(tower.get("pool_type", "tok"))
        if pool is None:
            raise CheckpointError(f"{CONFIG}: pool_type {tower.get('pool_type')!r} is not tok or avg")
        size = tower.get("image_size", 224)
        return Facts(
            numerics=self.numerics_of(model, tower),
            num_heads=max(1, width // head_width),
            depth=number(tower, "layers", 12),
            stated={"width": width, "patch_size": number(tower, "patch_size", 16)},
            image_size=as_size(size) if isinstance(size, int | list | tuple) else None,
            norm_after_pool=bool(tower.get("final_ln_after_pool")),
            settings={"pool": pool, "projection": "proj" in tensors, "patch_bias": False},
        )

    def numerics_of(self, model: dict[str, Any], tower: dict[str, Any]) -> Numerics:
        act, norm = tower.get("act_kwargs") or {}, tower.get("norm_kwargs") or {}
        unknown = [*(act.keys() - {"approximate"}), *(norm.keys() - {"eps"})]
        eps, approximate = norm.get("eps", 1e-5), act.get("approximate", "none")
        if unknown or not isinstance(eps, float | int) or approximate not in ("none", "tanh"):
            raise CheckpointError(f"{CONFIG}: act_kwargs {act} or norm_kwargs {norm} is not known")
        gelu = "quick" if model.get("quick_gelu") else "tanh" if approximate == "tanh" else "erf"
        return NUMERICS.replace(gelu=gelu, norm_eps=float(eps))

    def default_labels(self, num_classes: int) -> None:
        """None: the head is a projection."""

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        return stated_view(checkpoint, config)

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        size = config.image_size
        return Preprocess(image_size=size, fit="crop", interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD)


class OpenClipTimm(Timm):
    """A tower of timm's inside open_clip (SigLIP, EVA-02, PE); a linear projection is the pre-logits layer."""

    name = "open_clip"
    prefixes = ("visual.trunk.", "module.visual.trunk.")
    ignored: ClassVar[dict[str, str]] = IGNORED
    suffixes = ()
    table = Table(
        rows=(
            *(row for row in Timm.table.rows if not row.native.startswith("pre_logits.")),
            Row("pre_logits.weight", ("visual.head.proj.weight",)),
        ),
        block=Timm.table.block,
        unit=Timm.table.unit,
    )

    def to_table_names(self, tensors: Tensors) -> Tensors:
        renamed = super().to_table_names(tensors)
        return {name if name.startswith("visual.") else text_name(name, tensors): t for name, t in renamed.items()}

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tower = part_of(checkpoint, "model_cfg", "vision_cfg")
        if "timm_model_name" not in tower:
            raise CheckpointError(f"open_clip weights without {CONFIG}, which states the architecture")
        return {"architecture": tower["timm_model_name"], "global_pool": tower.get("timm_pool", "avg")}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        size = part_of(checkpoint, "model_cfg", "vision_cfg").get("image_size")
        settings = facts.settings | {"projection": "visual.head.proj.weight" in tensors}
        return replace(facts, settings=settings, image_size=as_size(size) if isinstance(size, int | list) else None)

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        return stated_view(checkpoint, config)


def image_name(name: str) -> str:
    if name.startswith("visual."):
        return name.removeprefix("visual.")
    return name if name in IGNORED or name.startswith("text.") else f"text.{name}"


def text_name(name: str, tensors: Tensors) -> str:
    """A name of the text tower, which stands beside `visual.trunk`, under `text.`."""
    beside = name in tensors or f"module.{name}" in tensors
    return f"text.{name}" if beside and not re.match(r"text\.|logit_", name) else name

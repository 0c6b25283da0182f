"""open_clip's image towers (folder): its own Vision Transformer or one of timm's, next to a text tower."""

import re
from dataclasses import replace
from typing import Any, ClassVar

from vitruvian.config import CLIP_MEAN, CLIP_STD, ModelConfig, Numerics, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.settings import as_size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family
from vitruvian.weights.families.huggingface import read_int
from vitruvian.weights.families.tables import TABLES, Tensors, rename
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.timm_config import TimmConfig

CONFIG = "open_clip_config.json"
NUMERICS = Numerics(gelu="erf", norm_eps=1e-5, position_resize="bicubic_antialias")
UNSUPPORTED = (
    "attentional_pool", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc",
)  # fmt: skip


def config_section(checkpoint: Checkpoint, *keys: str) -> dict[str, Any]:
    section: Any = checkpoint.settings.get(CONFIG, {})
    for key in keys:
        section = section.get(key, {})
        if not isinstance(section, dict):
            raise CheckpointError(f"{CONFIG}: {key} is not an object")
    return section


def read_preprocess_cfg(checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
    """The preprocessing in `preprocess_cfg`: a squash, or the shorter side resized and a center crop."""
    settings = config_section(checkpoint, "preprocess_cfg")
    if not settings:
        return None
    fits = {"shortest": "crop", "squash": "squash"}
    mode = settings.get("resize_mode", "shortest")
    if mode not in fits:
        raise CheckpointError(f"{CONFIG}: resize_mode {mode!r} is not one of {', '.join(fits)}")
    interpolation = settings.get("interpolation", "bicubic")
    try:
        size = as_size(settings.get("size") or config.image_size)
        statistics = {key: tuple(float(x) for x in settings[key]) for key in ("mean", "std") if settings.get(key)}
        statistics = {"mean": CLIP_MEAN, "std": CLIP_STD} | statistics
        interpolation = "bicubic" if interpolation == "random" else interpolation
        return Preprocess(image_size=size).replace(fit=fits[mode], interpolation=interpolation, **statistics)
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{CONFIG}: preprocess_cfg cannot be read: {error}") from error


class OpenClip(Family[ViTConfig]):
    """Pre-norm, class token, a projection; heads and activation come from `open_clip_config.json`."""

    name = "open_clip"
    numerics = NUMERICS
    preprocess: ClassVar = {"fit": "crop", "interpolation": "bicubic", "mean": CLIP_MEAN, "std": CLIP_STD}
    table = TABLES["open_clip"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        has_blocks = any("visual.transformer.resblocks." in name for name in checkpoint.tensors)
        return super().claims(checkpoint) and has_blocks

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """Both towers call their blocks `transformer`; put those of the text tower under `text.`."""
        known = map(re.escape, ("visual.", "text.", *self.table.ignored))
        return rename(tensors, [(r"^module\.", ""), (rf"^(?!{'|'.join(known)})", "text."), (r"^visual\.", "")])

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        model, tower = config_section(checkpoint, "model_cfg"), config_section(checkpoint, "model_cfg", "vision_cfg")
        if not tower:
            raise CheckpointError(f"open_clip weights without {CONFIG}, which states their heads and activation")
        for part in UNSUPPORTED:
            if tower.get(part):
                raise CheckpointError(f"{CONFIG}: {part} is not supported")
        width, head_width = read_int(tower, "width", 768) or 768, read_int(tower, "head_width", 64) or 64
        pool = {"tok": "token", "avg": "mean"}.get(tower.get("pool_type", "tok"))
        if pool is None:
            raise CheckpointError(f"{CONFIG}: pool_type {tower.get('pool_type')!r} is not tok or avg")
        size = tower.get("image_size", 224)
        return Facts(
            numerics=self.numerics_of(model, tower),
            num_heads=max(1, width // head_width),
            depth=read_int(tower, "layers", 12),
            stated={"width": width, "patch_size": read_int(tower, "patch_size", 16)},
            image_size=as_size(size) if isinstance(size, int | list | tuple) else None,
            norm_after_pool=bool(tower.get("final_ln_after_pool")),
            settings={"pool": pool, "projection": "proj" in tensors, "patch_bias": False},
        )

    def numerics_of(self, model: dict[str, Any], tower: dict[str, Any]) -> Numerics:
        act, norm = tower.get("act_kwargs") or {}, tower.get("norm_kwargs") or {}
        unknown = [*(act.keys() - {"approximate"}), *(norm.keys() - {"eps"})]
        eps, approximate = norm.get("eps", 1e-5), act.get("approximate", "none")
        if unknown or not isinstance(eps, float | int) or approximate not in ("none", "tanh"):
            raise CheckpointError(f"{CONFIG}: act_kwargs {act} or norm_kwargs {norm} is not supported")
        gelu = "quick" if model.get("quick_gelu") else "tanh" if approximate == "tanh" else "erf"
        return NUMERICS.replace(gelu=gelu, norm_eps=float(eps))

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        return read_preprocess_cfg(checkpoint, config)


class OpenClipTimm(Timm):
    """A timm model inside open_clip (SigLIP, EVA-02, PE); a linear projection is the pre-logits layer."""

    name = "open_clip"
    suffixes = ()
    table = TABLES["open_clip_timm"]

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """A name outside `visual.trunk` is the text tower's, which is put under `text.`."""
        named = {}
        for name, tensor in super().to_table_names(tensors).items():
            is_outside = name in tensors or f"module.{name}" in tensors
            is_text = is_outside and not name.startswith(("visual.", "text.", "logit_"))
            named[f"text.{name}" if is_text else name] = tensor
        return named

    def config(self, checkpoint: Checkpoint) -> TimmConfig:
        tower = config_section(checkpoint, "model_cfg", "vision_cfg")
        if "timm_model_name" not in tower:
            raise CheckpointError(f"open_clip weights without {CONFIG}, which states the architecture")
        pool = tower.get("timm_pool", "avg")
        return TimmConfig.parse({"architecture": tower["timm_model_name"], "global_pool": pool})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        size = config_section(checkpoint, "model_cfg", "vision_cfg").get("image_size")
        settings = facts.settings | {"projection": "visual.head.proj.weight" in tensors}
        return replace(facts, settings=settings, image_size=as_size(size) if isinstance(size, int | list) else None)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        return read_preprocess_cfg(checkpoint, config)

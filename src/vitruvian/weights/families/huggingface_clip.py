"""CLIP's and SigLIP's image towers in transformers, alone or next to the text tower."""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import CLIP_MEAN, CLIP_STD, ModelMeta, Numerics, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, check_settings, find_obstacles
from vitruvian.weights.families.huggingface import NAMES, HuggingFace, read_int, read_labels, stated_classes
from vitruvian.weights.families.tables import TABLES, Tensors
from vitruvian.weights.families.timm_layout import as_kernel, as_matrix

POSITION_ARRAY = "embeddings.position_embedding.weight"
CLIP, METACLIP = "clip_vision_model", "metaclip_2_vision_model"
SIGLIP = ("siglip_vision_model", "siglip2_vision_model")
UNREAD = "unread."  # prefix for arrays that models for image classification store but do not use


class HuggingFaceTower(HuggingFace):
    """The image towers of `clip`, `metaclip_2`, `siglip` and `siglip2`; CLIP's projection is the pre-logits layer."""

    model_types: ClassVar = {
        CLIP: "CLIPVision",
        METACLIP: "MetaClip2Vision",
        SIGLIP[0]: "SiglipVision",
        SIGLIP[1]: "Siglip2Vision",
    }
    norm_eps = 1e-5
    table = TABLES["huggingface_clip"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Split the query from key and value in SigLIP's pooling; reshape SigLIP 2's patch embedding, a matrix.

        A classifier reads the mean of the patches: in SigLIP after the last norm, in CLIP before it.
        """
        state = dict(tensors)
        if "classifier.weight" in state:
            unread = ("head.",) if self.kind_of(checkpoint) in SIGLIP else ("head.", "post_layernorm.")
            state = {f"{UNREAD}{name}" if name.startswith(unread) else name: state[name] for name in state}
        for kind in ("weight", "bias"):
            joined = state.pop(f"head.attention.in_proj_{kind}", None)
            if joined is not None:
                width = len(joined) // 3
                state[f"head.attention.query.{kind}"] = joined[:width]
                state[f"head.attention.key_value.{kind}"] = joined[width:]
        channels = read_int(self.config_of(checkpoint), "num_channels", 3) or 3
        state[self.table.anchor] = as_kernel(state[self.table.anchor], channels)
        return state

    def kind_of(self, checkpoint: Checkpoint) -> Any:
        """The model type; if not stated, CLIP has a class token, and SigLIP 2 a matrix as patch embedding."""
        settings = self.config_of(checkpoint)
        if "model_type" in settings:
            return settings["model_type"]
        if any(name.endswith("embeddings.class_embedding") for name in checkpoint.tensors):
            return CLIP
        patch = (tensor for name, tensor in checkpoint.tensors.items() if name.endswith(self.table.anchor))
        return SIGLIP[any(tensor.dim() == 2 for tensor in patch)]

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        kind, has_classifier = self.kind_of(checkpoint), "classifier.weight" in tensors
        pool = "map" if "head.probe" in tensors else "mean" if has_classifier or kind in SIGLIP else "token"
        settings = {"pool": pool, "projection": "visual_projection.weight" in tensors}
        settings["final_norm"] = not has_classifier or kind in SIGLIP
        shared = checkpoint.settings.get("config.json", {})  # of both towers
        stated = facts.stated | stated_classes(shared, tensors)
        if settings["projection"]:
            stated = stated | {"representation_size": read_int(shared, "projection_dim")}
        count, positions = read_int(self.config_of(checkpoint), "num_patches"), tensors.get(POSITION_ARRAY)
        if positions is not None and positions.dim() == 2:
            check_settings({"num_patches": count}, {"num_patches": len(positions)})
        return replace(facts, settings=settings, stated=stated, labels=read_labels(shared))

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        is_siglip = settings.get("model_type") in SIGLIP
        activation, eps = ("gelu_pytorch_tanh", 1e-6) if is_siglip else ("quick_gelu", 1e-5)
        return super().numerics_of({"hidden_act": activation, "layer_norm_eps": eps} | settings)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        preprocess = super().stated_preprocess(checkpoint, config)
        side = preprocess.patch_size if preprocess else None
        if side not in (None, config.patch_size):
            reason = f"preprocessor_config.json says patch_size={side}, the arrays have {config.patch_size}"
            raise CheckpointError(reason)
        return preprocess

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        preprocess, kind = Preprocess(image_size=config.image_size), self.kind_of(checkpoint)
        if kind == SIGLIP[1]:
            return naflex_preprocess(preprocess, config)
        if kind == SIGLIP[0]:
            return preprocess.replace(interpolation="bicubic")
        return preprocess.replace(fit="crop", interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD, floor_crop=True)

    def model_type(self, config: ViTConfig) -> str:
        """SigLIP 2 with NaFlex resamples positions differently; SigLIP 2 of one size is written as a SigLIP."""
        if config.pool != "map":
            return METACLIP if self.kind == METACLIP else CLIP
        is_naflex = config.numerics.position_resize == "bilinear_antialias" and config.grid[0] == config.grid[1]
        return SIGLIP[is_naflex]

    def obstacles(self, config: ViTConfig) -> list[str]:
        if config.pool == "map":
            return find_obstacles(config, "siglip")
        return find_obstacles(config, "clip", projection=bool(config.representation_size))

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        state = dict(tensors)
        if self.model_type(config) == SIGLIP[1]:
            state[self.table.anchor] = as_matrix(state[self.table.anchor])
        for kind in ("weight", "bias"):
            if f"head.attention.query.{kind}" in state:
                parts = [state.pop(f"head.attention.{part}.{kind}") for part in ("query", "key_value")]
                state[f"head.attention.in_proj_{kind}"] = torch.cat(parts)
        return {name if name.startswith("visual_p") else f"vision_model.{name}": t for name, t in state.items()}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        if self.model_type(config) == SIGLIP[1]:
            del settings["image_size"]
            settings["num_patches"] = config.grid[0] * config.grid[1]
        return settings | ({"projection_dim": config.representation_size} if config.representation_size else {})

    def json_files(self, config: ViTConfig, meta: ModelMeta) -> dict[str, Any]:
        """Name the model type's own image processor, if it preprocesses like the general one."""
        processor = self.processor_preprocess(config, meta.preprocess)
        files = super().json_files(config, meta.replace(preprocess=processor))
        written = files.get("preprocessor_config.json")
        general, specific = NAMES["processors"].get(self.model_type(config), ("", ""))
        if written is not None and written["image_processor_type"] == general:
            written["image_processor_type"] = specific
        return files

    def reader_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        return super().reader_preprocess(config, self.processor_preprocess(config, preprocess))

    def processor_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        """The preprocessing of the model type's processor: SigLIP 2's keeps the aspect ratio of each image."""
        if self.model_type(config) != SIGLIP[1] or preprocess.fit == "naflex":
            return preprocess
        return naflex_preprocess(preprocess.replace(scaled_size=None), config)


def naflex_preprocess(preprocess: Preprocess, config: ViTConfig) -> Preprocess:
    """Keep the aspect ratio of each image, with as many patches as the model has positions."""
    patches = config.grid[0] * config.grid[1]
    return preprocess.replace(fit="naflex", patch_size=config.patch_size, max_num_patches=patches)

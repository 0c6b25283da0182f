"""CLIP's and SigLIP's image towers as Hugging Face transformers keeps them: alone, or beside the text tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import CLIP_MEAN, CLIP_STD, ModelConfig, Numerics, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.family import Facts, kind_obstacles
from vitruvian.weights.families.huggingface import HuggingFace, stated_classes
from vitruvian.weights.families.huggingface_json import labels_of, number
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import STACKED, TOKEN, Row, Table, Tensors, pair
from vitruvian.weights.families.timm_pieces import as_kernel, as_matrix
from vitruvian.weights.files import Checkpoint

LAYER = "encoder.layers.{i}"
POSITIONS = "embeddings.position_embedding.weight"
SIGLIP = ("siglip_vision_model", "siglip2_vision_model")
UNREAD = "unread."
"""Precedes the names of arrays that the models for image classification have and do not use."""


class HuggingFaceTower(HuggingFace):
    """model_type `clip_vision_model` and `siglip_vision_model`; CLIP's projection is the pre-logits layer."""

    name = "huggingface"
    model_types = ("clip_vision_model", *SIGLIP)
    norm_eps = 1e-5
    anchor = "embeddings.patch_embedding.weight"
    prefixes = ("vision_model.", "", "vision_model.vision_model.")
    ignored: ClassVar[dict[str, str]] = {
        "text_model.": "text tower",
        "text_projection.": "text tower",
        "logit_scale": "temperature of the image-text loss",
        "logit_bias": "bias of the image-text loss",
        "embeddings.position_ids": "numbers of the positions",
        UNREAD: "not read by its classifier",
    }
    table = Table(
        rows=(
            *pair("embed.patch", "embeddings.patch_embedding"),
            Row("embed.cls_token", ("embeddings.class_embedding",), TOKEN),
            Row(FLAT, (POSITIONS,), TOKEN),
            *pair("embed.norm", "pre_layrnorm"),
            *pair("blocks.{i}.norm1", f"{LAYER}.layer_norm1"),
            *pair("blocks.{i}.attn.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"), kind=STACKED),
            *pair("blocks.{i}.attn.proj", f"{LAYER}.self_attn.out_proj"),
            *pair("blocks.{i}.norm2", f"{LAYER}.layer_norm2"),
            *pair("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
            *pair("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.fc2"),
            *pair("norm", "post_layernorm"),
            Row("pre_logits.weight", ("visual_projection.weight",)),
            *pair("head", "classifier"),
            Row("attn_pool.probe", ("head.probe",)),
            *pair("attn_pool.q", "head.attention.query"),
            *pair("attn_pool.kv", "head.attention.key_value"),
            *pair("attn_pool.proj", "head.attention.out_proj"),
            *pair("attn_pool.norm", "head.layernorm"),
            *pair("attn_pool.mlp.fc1", "head.mlp.fc1"),
            *pair("attn_pool.mlp.fc2", "head.mlp.fc2"),
        ),
        block=r"encoder\.layers\.(\d+)\.",
    )

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Query apart from key and value in SigLIP's pooling; SigLIP 2 keeps the patch embedding as a matrix.

        A classifier reads the mean of the patches: in SigLIP behind the last norm, in CLIP before it.
        """
        found = dict(tensors)
        if "classifier.weight" in found:
            unread = ("head.",) if self.kind_of(checkpoint) in SIGLIP else ("head.", "post_layernorm.")
            found = {f"{UNREAD}{name}" if name.startswith(unread) else name: found[name] for name in found}
        for kind in ("weight", "bias"):
            joined = found.pop(f"head.attention.in_proj_{kind}", None)
            if joined is not None:
                width = len(joined) // 3
                found[f"head.attention.query.{kind}"], found[f"head.attention.key_value.{kind}"] = (
                    joined[:width],
                    joined[width:],
                )
        channels = number(self.config_of(checkpoint), "num_channels", 3) or 3
        found[self.anchor] = as_kernel(found[self.anchor], channels)
        return found

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        settings = super().config_of(checkpoint)
        tower = settings.get("vision_config")
        if tower is None:
            return settings
        if not isinstance(tower, dict):
            raise CheckpointError("config.json: vision_config is not an object")
        kind = settings.get("model_type")
        return {"model_type": f"{kind}_vision_model"} | tower if isinstance(kind, str) else tower

    def kind_of(self, checkpoint: Checkpoint) -> str:
        """The model type; where no file states it, CLIP has a class token, and SigLIP 2 a matrix for its patches."""
        stated = self.config_of(checkpoint).get("model_type")
        if isinstance(stated, str):
            return stated
        if any(name.endswith("embeddings.class_embedding") for name in checkpoint.tensors):
            return "clip_vision_model"
        patch = (tensor for name, tensor in checkpoint.tensors.items() if name.endswith(self.anchor))
        return SIGLIP[any(tensor.dim() == 2 for tensor in patch)]

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        kind, classifies = self.kind_of(checkpoint), "classifier.weight" in tensors
        pool = "map" if "head.probe" in tensors else "mean" if classifies or kind in SIGLIP else "token"
        settings = {"pool": pool, "projection": "visual_projection.weight" in tensors}
        settings["final_norm"] = not classifies or kind in SIGLIP
        whole = checkpoint.settings.get("config.json", {})  # what the towers share stands beside their settings
        stated = facts.stated | stated_classes(whole, tensors)
        if settings["projection"]:
            stated = stated | {"representation_size": number(whole, "projection_dim")}
        self.check_patches(checkpoint, tensors)
        numerics = self.numerics_of({"model_type": kind} | self.config_of(checkpoint))
        if kind == SIGLIP[1]:
            numerics = numerics.replace(position_resize="bilinear_antialias")
        return replace(facts, settings=settings, stated=stated, numerics=numerics, labels=labels_of(whole))

    def check_patches(self, checkpoint: Checkpoint, tensors: Tensors) -> None:
        """SigLIP 2 states the number of its positions."""
        count, positions = number(self.config_of(checkpoint), "num_patches"), tensors.get(POSITIONS)
        if count is not None and positions is not None and positions.dim() == 2 and len(positions) != count:
            raise CheckpointError(f"the settings say num_patches={count}, the arrays have {len(positions)}")

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        siglip = settings.get("model_type") in SIGLIP
        usual = {
            "hidden_act": "gelu_pytorch_tanh" if siglip else "quick_gelu",
            "layer_norm_eps": 1e-6 if siglip else 1e-5,
        }
        return super().numerics_of(usual | settings)

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        view = super().stated_view(checkpoint, config)
        if view is not None and isinstance(config, ViTConfig) and view.patch_size not in (None, config.patch_size):
            raise CheckpointError(
                f"preprocessor_config.json says patch_size={view.patch_size}, the arrays have {config.patch_size}"
            )
        return view

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        size = config.image_size
        kind = self.kind_of(checkpoint)
        if kind == SIGLIP[1]:
            return naflex_view(Preprocess(image_size=size), config)
        if kind == SIGLIP[0]:
            return Preprocess(image_size=size, interpolation="bicubic")
        view = Preprocess(image_size=size, fit="crop", interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD)
        return view.replace(floor_crop=True)

    def model_type(self, config: ViTConfig) -> str:
        """SigLIP 2 of any size (NaFlex) resamples positions in its own way; of one size, it is a SigLIP."""
        if config.pool != "map":
            return "clip_vision_model"
        flexible = config.numerics.position_resize == "bilinear_antialias" and config.grid[0] == config.grid[1]
        return SIGLIP[flexible]

    def architecture(self, config: ViTConfig) -> str:
        if config.pool == "map":
            return {SIGLIP[0]: "SiglipVisionModel", SIGLIP[1]: "Siglip2VisionModel"}[self.model_type(config)]
        return "CLIPVisionModelWithProjection" if config.representation_size else "CLIPVisionModel"

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        if isinstance(config, ViTConfig) and config.grid[0] != config.grid[1]:
            yield "CLIP and SigLIP of transformers have positions of a square grid alone"
        if isinstance(config, ViTConfig) and config.pool == "map":
            yield from kind_obstacles(config, "SigLIP of transformers", pool="map", cls_token=False, num_classes=0)
            return
        clip: dict[str, Any] = {"pre_norm": True, "patch_bias": False, "num_classes": 0}
        if isinstance(config, ViTConfig) and config.representation_size:
            clip["projection"] = True
        yield from kind_obstacles(config, "CLIP of transformers", free=("representation_size",), **clip)

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        found = dict(tensors)
        if self.model_type(config) == SIGLIP[1]:
            found[self.anchor] = as_matrix(found[self.anchor])
        for kind in ("weight", "bias"):
            query = found.pop(f"head.attention.query.{kind}", None)
            if query is not None:
                joined = torch.cat([query, found.pop(f"head.attention.key_value.{kind}")])
                found[f"head.attention.in_proj_{kind}"] = joined
        return {name if name.startswith("visual_p") else f"vision_model.{name}": t for name, t in found.items()}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels) | {"intermediate_size": config.mlp_dim}
        if self.model_type(config) == SIGLIP[1]:
            del settings["image_size"]
            settings["num_patches"] = config.grid[0] * config.grid[1]
        return settings | ({"projection_dim": config.representation_size} if config.representation_size else {})

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        own = super().family_numerics(config)
        assert isinstance(own, ViTConfig)
        if isinstance(config, ViTConfig) and self.model_type(config) == SIGLIP[1]:
            own = own.replace(numerics=own.numerics.replace(position_resize="bilinear_antialias"))
        return own

    def stated_files(self, config: ModelConfig, labels: tuple[str, ...] | None, view: Preprocess) -> dict[str, Any]:
        """With the image processor of the model's own kind, where it does what the view says."""
        assert isinstance(config, ViTConfig)
        files = super().stated_files(config, labels, self.processed(config, view))
        written = files.get("preprocessor_config.json")
        asked, own = OWN_PROCESSORS.get(self.model_type(config), ("", ""))
        if written is not None and written["image_processor_type"] == asked:
            written["image_processor_type"] = own
        return files

    def assumed_view(self, config: ModelConfig, view: Preprocess) -> Preprocess:
        return super().assumed_view(config, self.processed(config, view))

    def processed(self, config: ModelConfig, view: Preprocess) -> Preprocess:
        """What the processor of the model's kind makes of a view: SigLIP 2's keeps each image's shape."""
        assert isinstance(config, ViTConfig)
        other = self.model_type(config) == SIGLIP[1] and view.fit != "naflex"
        return naflex_view(view.replace(scaled_size=None), config) if other else view


def naflex_view(view: Preprocess, config: ModelConfig) -> Preprocess:
    """The view of images that keep their shape, with as many patches as the model has positions."""
    assert isinstance(config, ViTConfig)
    return view.replace(fit="naflex", patch_size=config.patch_size, max_num_patches=config.grid[0] * config.grid[1])


OWN_PROCESSORS = {
    "clip_vision_model": ("BitImageProcessor", "CLIPImageProcessor"),
    SIGLIP[0]: ("ViTImageProcessor", "SiglipImageProcessor"),
}
"""By model type: the processor that a view asks for, and the one of the same meaning that people expect there."""

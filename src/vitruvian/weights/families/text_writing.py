"""A text tower beside the image tower that is written: CLIP, SigLIP or SigLIP 2 as transformers keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitruvian.config import ModelConfig, ViTConfig
from vitruvian.errors import ConversionError
from vitruvian.model.text import TextConfig, TextTower
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.huggingface_json import WRITTEN_ACTIVATIONS
from vitruvian.weights.families.huggingface_towers import HuggingFaceTower
from vitruvian.weights.families.rules import Tensors
from vitruvian.weights.families.text import HuggingFaceText
from vitruvian.weights.tokenizer import TOKENIZER_FILES

CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextWeights:
    """A text tower, and how its embeddings are compared with those of images."""

    tower: TextTower
    cleaning: dict[str, Any]
    """What its tokenizer has to do beside the vocabulary."""
    scale: float
    """Logarithm of the factor of the cosine."""
    bias: float | None
    """None for CLIP."""
    folder: Path
    """Where its tokenizer's files are."""


def write_text(member: Family, config: ModelConfig, stated: dict[str, Any], text: TextWeights) -> Tensors:
    """The text tower's arrays; what `config.json` of the image tower states becomes that of both."""
    reasons = list(text_obstacles(member, config, text.tower.config))
    if reasons:
        raise ConversionError(f"the text tower cannot be written: {'; '.join(reasons)}")
    kind = kind_of(member, config)
    stated["config.json"] = joined_config(kind, stated["config.json"], text.tower.config)
    return text_tensors(kind, text)


def kind_of(member: Family, config: ModelConfig) -> str:
    """clip, siglip or siglip2; empty for other models."""
    if not isinstance(member, HuggingFaceTower) or not isinstance(config, ViTConfig):
        return ""
    return member.model_type(config).removesuffix("_vision_model")


def tokenizer_files(text: TextWeights | None) -> list[Path]:
    return [] if text is None else [text.folder / name for name in TOKENIZER_FILES if (text.folder / name).is_file()]


def text_obstacles(member: Family, image: ModelConfig, config: TextConfig) -> Iterator[str]:
    """Why a text tower cannot stand beside the image tower; nothing if it can."""
    kind = kind_of(member, image)
    if not kind or not isinstance(image, ViTConfig):
        yield "the image tower is neither CLIP's nor SigLIP's"
        return
    clip = kind == "clip"
    shared = (image.representation_size if clip else image.width) == config.embedding_width
    checks = {
        f"embeddings of {config.embedding_width} numbers, the image tower of another length": not shared,
        "LayerScale": config.layer_scale,
        f"causal={config.causal}": config.causal != clip,
        f"pool={config.pool!r}": config.pool not in (("argmax", "eos") if clip else ("last",)),
        "a projection with a bias" if clip else "a projection without a bias": config.projection_bias == clip,
    }
    yield from (
        f"{CLASSES[kind]} of transformers cannot have it with {what}" for what, is_so in checks.items() if is_so
    )


def text_tensors(kind: str, text: TextWeights) -> Tensors:
    """The tower's arrays, the scale and the bias under transformers' names."""
    state = {name: tensor.detach().cpu().float() for name, tensor in text.tower.state_dict().items()}
    projection = {name: state.pop(f"projection.{name}") for name in ("weight", "bias") if f"projection.{name}" in state}
    named = HuggingFaceText.table.write(state, text.tower.config.blocks)
    found = {f"text_model.{name}": tensor for name, tensor in named.items()}
    head = "text_projection" if kind == "clip" else "text_model.head"
    found |= {f"{head}.{name}": tensor for name, tensor in projection.items()}
    scale = torch.tensor(text.scale)
    if kind == "clip":
        return found | {"logit_scale": scale}
    return found | {"logit_scale": scale[None], "logit_bias": torch.tensor([text.bias or 0.0])}


def joined_config(kind: str, vision: dict[str, Any], config: TextConfig) -> dict[str, Any]:
    """`config.json` of the two-tower model."""
    inner = {name: value for name, value in vision.items() if name not in ("architectures", "dtype")}
    text = {
        "model_type": f"{kind}_text_model",
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "hidden_act": WRITTEN_ACTIVATIONS[config.numerics.gelu],
        "layer_norm_eps": config.numerics.norm_eps,
    }
    whole: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind, "dtype": "float32"}
    if kind == "clip":
        text |= {"projection_dim": config.embedding_width, "eos_token_id": config.eos if config.pool == "eos" else 2}
        whole["projection_dim"] = config.embedding_width
    else:
        text["projection_size"] = config.embedding_width
    return whole | {"vision_config": inner, "text_config": text}

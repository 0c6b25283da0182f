"""Text towers of CLIP and SigLIP: read from transformers, open_clip and big_vision, written for transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitruvian.config import GOOGLE_NUMERICS, ModelConfig, Numerics, ViTConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.model.text_tower import TextConfig, TextPool, TextTower
from vitruvian.text import brief
from vitruvian.weights.checkpoint_files import Checkpoint, read_checkpoint
from vitruvian.weights.description import is_native
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.google import BigVision, heads_in, layer, norm, unstack
from vitruvian.weights.families.huggingface import WRITTEN_ACTIVATIONS, read_int
from vitruvian.weights.families.huggingface_clip import HuggingFaceTower
from vitruvian.weights.families.openclip import CONFIG, UNSUPPORTED, OpenClip, OpenClipTimm, config_section
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import DENSE, SAME, ArrayLayout, Row, Table, Tensors, pair
from vitruvian.weights.parse import count_blocks, shape_of
from vitruvian.weights.tokenizer import TOKENIZER_FILES

FIRST = ArrayLayout(None, lambda parts: parts[0].view(parts[0].shape[-2:]), lambda x, n, heads: [x])
"""Positions (N, D) or (1, N, D)."""


def block_rows(table: Table) -> tuple[Row, ...]:
    """The rows of the encoder's blocks, which have the same names in both towers."""
    return tuple(row for row in table.rows if row.native.startswith("blocks."))


class TextFamily(ABC):
    """How one family stores a text tower, and what its settings state."""

    table: ClassVar[Table]
    scale: ClassVar[str] = "logit_scale"
    bias: ClassVar[str] = "logit_bias"

    @abstractmethod
    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        """The text tower's arrays under the names of the table; empty if the file has none."""

    @abstractmethod
    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        """Settings of TextConfig that the arrays do not determine: heads, causal, pool, numerics, perhaps depth."""

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The family's settings of TokenizerRules."""
        return {}

    def config(self, checkpoint: Checkpoint, tensors: Tensors, native: Tensors) -> TextConfig:
        facts = self.facts(checkpoint, tensors)
        tokens, positions = shape_of(native, "tokens.weight"), shape_of(native, "pos_embed")
        projection, mlp = shape_of(native, "projection.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
        if len(tokens) != 2 or len(positions) != 2 or len(mlp) != 2:
            raise CheckpointError("the text tower's embeddings or blocks are not matrices")
        return TextConfig(
            vocabulary=tokens[0],
            context_length=positions[0],
            depth=count_blocks(native, facts.pop("depth", None)),
            width=tokens[1],
            mlp_dim=mlp[0],
            embedding_width=projection[0] if projection else 0,
            projection_bias="projection.bias" in native,
            layer_scale="blocks.0.ls1" in native,
            **facts,
        )


class HuggingFaceText(TextFamily):
    """`text_config` of model_type clip, siglip and siglip2."""

    table = Table(
        rows=(
            Row("tokens.weight", ("embeddings.token_embedding.weight",)),
            Row("pos_embed", ("embeddings.position_embedding.weight",)),
            *block_rows(HuggingFaceTower.table),
            *pair("norm", "final_layer_norm"),
            Row("projection.weight", ("text_projection.weight",)),
            *pair("projection", "head"),
        ),
        block=HuggingFaceTower.table.block,
    )

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        tower = {}
        for name, tensor in checkpoint.tensors.items():
            inner = name.removeprefix("text_model.").removeprefix("text_model.")
            if inner != name or name.startswith("text_projection."):
                tower[inner] = tensor
        tower.pop("embeddings.position_ids", None)
        return tower

    def settings(self, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        settings = checkpoint.settings.get("config.json", {})
        kind, tower = settings.get("model_type"), settings.get("text_config")
        if kind not in ("clip", "siglip", "siglip2") or not isinstance(tower, dict | None):
            raise CheckpointError(
                f"the text tower needs config.json of model_type clip, siglip or siglip2, not {kind!r}"
            )
        return kind, tower or {}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        kind, tower = self.settings(checkpoint)
        numerics = HuggingFaceTower().numerics_of({"model_type": f"{kind}_vision_model"} | tower)
        stated = tower | {"model_type": kind}  # not empty, so that defaults apply
        clip, eos = kind == "clip", tower.get("eos_token_id", 49_407)
        if not isinstance(eos, int):
            raise CheckpointError(f"config.json: eos_token_id={eos!r} is not one token")
        pool: TextPool = "last" if not clip else "argmax" if eos == 2 else "eos"  # 2 in older files, a known mistake
        return {
            "num_heads": read_int(stated, "num_attention_heads", 8 if clip else 12),
            "depth": read_int(stated, "num_hidden_layers", 12),
            "causal": clip,
            "pool": pool,
            "eos": eos,
            "numerics": numerics,
        }

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        kind, _ = self.settings(checkpoint)
        return {"clean": "siglip" if kind == "siglip" else "none", "lowercase": kind == "siglip2", "masks": True}


class OpenClipText(TextFamily):
    """`text_cfg`: arrays at the top level, or under `text.` next to a timm model."""

    table = Table(
        rows=(
            Row("tokens.weight", ("token_embedding.weight",)),
            Row("pos_embed", ("positional_embedding",)),
            *block_rows(OpenClip.table),
            *pair("norm", "ln_final"),
            Row("projection.weight", ("text_projection",), DENSE),
            *pair("projection", "text_projection"),
        ),
        block=OpenClip.table.block,
    )
    pools: ClassVar[dict[Any, TextPool]] = {"argmax": "argmax", "eos": "eos", "last": "last", "first": "first"}

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        plain = {name.removeprefix("module."): tensor for name, tensor in checkpoint.tensors.items()}
        others = ("visual.", "logit_", "attn_mask")
        return {name.removeprefix("text."): t for name, t in plain.items() if not name.startswith(others)}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        model, tower = config_section(checkpoint, "model_cfg"), config_section(checkpoint, "model_cfg", "text_cfg")
        if not tower:
            raise CheckpointError(f"the text tower needs {CONFIG} with text_cfg, which states its heads")
        for part in (*UNSUPPORTED, "embed_cls", "hf_model_name", "tokenizer_mode"):
            if tower.get(part):
                raise CheckpointError(f"{CONFIG}: text_cfg {part} is not supported")
        pool = tower.get("pool_type", "argmax")
        if pool not in self.pools:
            raise CheckpointError(f"{CONFIG}: pool_type {pool!r} of text_cfg is not one of {', '.join(self.pools)}")
        return {
            "num_heads": read_int(tower, "heads", 8),
            "depth": read_int(tower, "layers", 12),
            "causal": not tower.get("no_causal_mask"),
            "pool": self.pools[pool],
            "eos": tower.get("eos_id", 2),
            "numerics": OpenClip().numerics_of(model, tower),
        }

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tower = config_section(checkpoint, "model_cfg", "text_cfg")
        options = tower.get("tokenizer_kwargs") or {}
        clean = options.get("clean", "whitespace" if tower.get("hf_tokenizer_name") else "lower")
        if clean not in ("whitespace", "lower", "canonicalize") or options.keys() - {"clean"}:
            raise CheckpointError(f"{CONFIG}: tokenizer_kwargs {options} are not supported")
        return {"clean": clean}


class BigVisionText(TextFamily):
    """SigLIP's `txt/`; the arrays determine the heads."""

    table = Table(
        rows=(
            Row("tokens.weight", ("Embed_0/embedding",)),
            Row("pos_embed", ("pos_embedding",), FIRST),
            *block_rows(BigVision.table),
            *norm("norm", "Transformer/encoder_norm", SAME),
            *layer("projection", "head"),
        ),
        block=BigVision.table.block,
    )
    scale, bias = "params/t", "params/b"
    numerics: ClassVar[Numerics] = GOOGLE_NUMERICS

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        prefix, tensors = "params/txt/", checkpoint.tensors
        inner = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        return unstack({name.replace("Encoder_0/", "Transformer/"): tensor for name, tensor in inner.items()})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        return {"num_heads": heads_in(tensors), "causal": False, "pool": "last", "numerics": self.numerics}

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {"clean": "siglip"}


TEXT_FAMILIES: dict[type, TextFamily] = {
    HuggingFaceTower: HuggingFaceText(),
    OpenClip: OpenClipText(),
    OpenClipTimm: OpenClipText(),
    BigVision: BigVisionText(),
}
"""By the family of the image tower."""


def scalar(tensor: Tensor | None, name: str) -> float | None:
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise CheckpointError(f"{name!r} has shape {tuple(tensor.shape)}, not a single number")
    return float(tensor)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextWeights:
    """A text tower, and how its embeddings are compared with those of images."""

    tower: TextTower
    cleaning: dict[str, Any]
    """Settings of TokenizerRules."""
    scale: float
    """Logarithm of the factor on the cosine similarity."""
    bias: float | None
    """None for CLIP."""
    folder: Path
    """Directory of the tokenizer's files."""


def read_text_tower(path: Path) -> TextWeights | None:
    """Read the text tower of a checkpoint, without its tokenizer; None if it has none."""
    checkpoint = read_checkpoint(path)
    family = TEXT_FAMILIES.get(type(recognize(checkpoint))) if not is_native(checkpoint) else None
    tensors = family.tensors(checkpoint) if family else {}
    if family is None or not tensors:
        return None
    tower, cleaning = text_tower(family, checkpoint, tensors)
    scale = scalar(checkpoint.tensors.get(family.scale), family.scale)
    if scale is None:
        raise CheckpointError(f"{family.scale!r}, the scale of the logits, is missing")
    bias = scalar(checkpoint.tensors.get(family.bias), family.bias)
    folder = path if path.is_dir() else path.parent
    return TextWeights(tower=tower, cleaning=cleaning, scale=scale, bias=bias, folder=folder)


def text_tower(family: TextFamily, checkpoint: Checkpoint, tensors: Tensors) -> tuple[TextTower, dict[str, Any]]:
    """Build the tower with every array accounted for; returns it with the settings of its tokenizer."""
    reading = family.table.read(tensors)
    config = family.config(checkpoint, tensors, reading.native)
    with torch.device("meta"):
        tower = TextTower(config)
    expected = tower.state_dict()
    missing = family.table.foreign_names((name for name in expected if name not in reading.native), config.blocks)
    surplus = [*(name for name in reading.native if name not in expected), *reading.unused]
    if missing or surplus:
        raise CheckpointError(
            f"names do not fit a text tower of this shape: {len(missing)} not found: {brief(missing)}; "
            f"{len(surplus)} not used: {brief(surplus)}"
        )
    for name, tensor in reading.native.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
            raise CheckpointError(f"the text tower's {name!r} has shape {shapes}")
    tower.load_state_dict({name: tensor.contiguous() for name, tensor in reading.native.items()}, assign=True)
    return tower.eval(), family.cleaning(checkpoint)


CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}


def write_text(member: Family, config: ModelConfig, stated: dict[str, Any], text: TextWeights) -> Tensors:
    """The text tower's arrays; changes `config.json` in `stated` from the image tower's to that of both."""
    reasons = list(text_obstacles(member, config, text.tower.config))
    if reasons:
        raise ConversionError(f"the text tower cannot be written: {'; '.join(reasons)}")
    kind = tower_kind(member, config)
    stated["config.json"] = two_tower_config(kind, stated["config.json"], text.tower.config)
    return text_tensors(kind, text)


def tower_kind(member: Family, config: ModelConfig) -> str:
    """`clip`, `siglip` or `siglip2`; empty for other models."""
    if not isinstance(member, HuggingFaceTower) or not isinstance(config, ViTConfig):
        return ""
    return member.model_type(config).removesuffix("_vision_model")


def tokenizer_files(text: TextWeights | None) -> list[Path]:
    return [] if text is None else [text.folder / name for name in TOKENIZER_FILES if (text.folder / name).is_file()]


def text_obstacles(member: Family, image: ModelConfig, config: TextConfig) -> Iterator[str]:
    """Reasons why the text tower cannot be written with this image tower; none if it can."""
    kind = tower_kind(member, image)
    if not kind or not isinstance(image, ViTConfig):
        yield "the image tower is neither CLIP's nor SigLIP's"
        return
    clip = kind == "clip"
    is_shared = (image.representation_size if clip else image.width) == config.embedding_width
    checks = {
        f"embeddings of width {config.embedding_width}, unlike the image tower's": not is_shared,
        "LayerScale": config.layer_scale,
        f"causal={config.causal}": config.causal != clip,
        f"pool={config.pool!r}": config.pool not in (("argmax", "eos") if clip else ("last",)),
        "a projection with a bias" if clip else "a projection without a bias": config.projection_bias == clip,
    }
    yield from (
        f"{CLASSES[kind]} of transformers does not support {what}" for what, is_true in checks.items() if is_true
    )


def text_tensors(kind: str, text: TextWeights) -> Tensors:
    """The tower's arrays, the scale and the bias under transformers' names."""
    state = {name: tensor.detach().cpu().float() for name, tensor in text.tower.state_dict().items()}
    projection = {name: state.pop(f"projection.{name}") for name in ("weight", "bias") if f"projection.{name}" in state}
    named = HuggingFaceText.table.write(state, text.tower.config.blocks)
    tensors = {f"text_model.{name}": tensor for name, tensor in named.items()}
    head = "text_projection" if kind == "clip" else "text_model.head"
    tensors |= {f"{head}.{name}": tensor for name, tensor in projection.items()}
    scale = torch.tensor(text.scale)
    if kind == "clip":
        return tensors | {"logit_scale": scale}
    return tensors | {"logit_scale": scale[None], "logit_bias": torch.tensor([text.bias or 0.0])}


def two_tower_config(kind: str, vision: dict[str, Any], config: TextConfig) -> dict[str, Any]:
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
    joined: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind, "dtype": "float32"}
    if kind == "clip":
        text |= {"projection_dim": config.embedding_width, "eos_token_id": config.eos if config.pool == "eos" else 2}
        joined["projection_dim"] = config.embedding_width
    else:
        text["projection_size"] = config.embedding_width
    return joined | {"vision_config": inner, "text_config": text}

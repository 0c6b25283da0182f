"""Text towers inside the files of CLIP, SigLIP and SigLIP 2, as transformers, open_clip and big_vision keep them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from vitruvian.config import GOOGLE_NUMERICS, Numerics
from vitruvian.errors import CheckpointError
from vitruvian.model.text import TextConfig, TextPool
from vitruvian.weights.families.google import BigVision, heads_in, layer, norm, unstack
from vitruvian.weights.families.huggingface_json import number
from vitruvian.weights.families.huggingface_towers import HuggingFaceTower
from vitruvian.weights.families.openclip import CONFIG, OTHER_PARTS, OpenClip, OpenClipTimm, part_of
from vitruvian.weights.families.rules import DENSE, SAME, Kind, Row, Table, Tensors, pair
from vitruvian.weights.files import Checkpoint
from vitruvian.weights.infer import count_blocks, shape_of

FIRST = Kind(None, lambda parts: parts[0].view(parts[0].shape[-2:]), lambda x, n, heads: [x])
"""Positions (N, D) or (1, N, D)."""


def blocks_of(table: Table) -> tuple[Row, ...]:
    """The rows of the encoder's blocks, which both towers call the same."""
    return tuple(row for row in table.rows if row.native.startswith("blocks."))


class TextFamily(ABC):
    """Where one family keeps a text tower, and what its settings say of it."""

    table: ClassVar[Table]
    scale: ClassVar[str] = "logit_scale"
    bias: ClassVar[str] = "logit_bias"

    @abstractmethod
    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        """The text tower's arrays under the names of the table; empty where the file has none."""

    @abstractmethod
    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        """Settings of TextConfig that the arrays do not tell: heads, causal, pool, numerics; perhaps layers."""

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings of TokenizerRules that are the family's own."""
        return {}

    def config(self, checkpoint: Checkpoint, tensors: Tensors, native: Tensors) -> TextConfig:
        facts = self.facts(checkpoint, tensors)
        words, places = shape_of(native, "tokens.weight"), shape_of(native, "pos_embed")
        projection, mlp = shape_of(native, "projection.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
        if len(words) != 2 or len(places) != 2 or len(mlp) != 2:
            raise CheckpointError("the text tower's embeddings or blocks are not matrices")
        return TextConfig(
            vocabulary=words[0],
            context_length=places[0],
            depth=count_blocks(native, facts.pop("depth", None)),
            width=words[1],
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
            *blocks_of(HuggingFaceTower.table),
            *pair("norm", "final_layer_norm"),
            Row("projection.weight", ("text_projection.weight",)),
            *pair("projection", "head"),
        ),
        block=HuggingFaceTower.table.block,
    )

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        found = {}
        for name, tensor in checkpoint.tensors.items():
            inner = name.removeprefix("text_model.").removeprefix("text_model.")
            if inner != name or name.startswith("text_projection."):
                found[inner] = tensor
        found.pop("embeddings.position_ids", None)
        return found

    def settings(self, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        whole = checkpoint.settings.get("config.json", {})
        kind, tower = whole.get("model_type"), whole.get("text_config")
        if kind not in ("clip", "siglip", "siglip2") or not isinstance(tower, dict | None):
            raise CheckpointError(
                f"the text tower needs config.json of model_type clip, siglip or siglip2, not {kind!r}"
            )
        return kind, tower or {}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> dict[str, Any]:
        kind, tower = self.settings(checkpoint)
        numerics = HuggingFaceTower().numerics_of({"model_type": f"{kind}_vision_model"} | tower)
        stated = tower | {"model_type": kind}  # never empty, so that defaults count
        clip, eos = kind == "clip", tower.get("eos_token_id", 49_407)
        if not isinstance(eos, int):
            raise CheckpointError(f"config.json: eos_token_id={eos!r} is not one token")
        pool: TextPool = "last" if not clip else "argmax" if eos == 2 else "eos"  # 2 in files before it was corrected
        return {
            "num_heads": number(stated, "num_attention_heads", 8 if clip else 12),
            "depth": number(stated, "num_hidden_layers", 12),
            "causal": clip,
            "pool": pool,
            "eos": eos,
            "numerics": numerics,
        }

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        kind, _ = self.settings(checkpoint)
        return {"clean": "siglip" if kind == "siglip" else "none", "lowercase": kind == "siglip2", "masks": True}


class OpenClipText(TextFamily):
    """`text_cfg`: at the top level, or under `text.` beside a tower of timm's."""

    table = Table(
        rows=(
            Row("tokens.weight", ("token_embedding.weight",)),
            Row("pos_embed", ("positional_embedding",)),
            *blocks_of(OpenClip.table),
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
        model, tower = part_of(checkpoint, "model_cfg"), part_of(checkpoint, "model_cfg", "text_cfg")
        if not tower:
            raise CheckpointError(f"the text tower needs {CONFIG} with text_cfg, which states its heads")
        for part in (*OTHER_PARTS, "embed_cls", "hf_model_name", "tokenizer_mode"):
            if tower.get(part):
                raise CheckpointError(f"{CONFIG}: text_cfg has {part}, a part that this text tower has not")
        pool = tower.get("pool_type", "argmax")
        if pool not in self.pools:
            raise CheckpointError(f"{CONFIG}: pool_type {pool!r} of texts is not one of {', '.join(self.pools)}")
        return {
            "num_heads": number(tower, "heads", 8),
            "depth": number(tower, "layers", 12),
            "causal": not tower.get("no_causal_mask"),
            "pool": self.pools[pool],
            "eos": tower.get("eos_id", 2),
            "numerics": OpenClip().numerics_of(model, tower),
        }

    def cleaning(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tower = part_of(checkpoint, "model_cfg", "text_cfg")
        options = tower.get("tokenizer_kwargs") or {}
        clean = options.get("clean", "whitespace" if tower.get("hf_tokenizer_name") else "lower")
        if clean not in ("whitespace", "lower", "canonicalize") or options.keys() - {"clean"}:
            raise CheckpointError(f"{CONFIG}: tokenizer_kwargs {options} are not known")
        return {"clean": clean}


class BigVisionText(TextFamily):
    """SigLIP's `txt/`: heads come from the arrays."""

    table = Table(
        rows=(
            Row("tokens.weight", ("Embed_0/embedding",)),
            Row("pos_embed", ("pos_embedding",), FIRST),
            *blocks_of(BigVision.table),
            *norm("norm", "Transformer/encoder_norm", SAME),
            *layer("projection", "head"),
        ),
        block=BigVision.table.block,
    )
    scale, bias = "params/t", "params/b"
    numerics: ClassVar[Numerics] = GOOGLE_NUMERICS

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        beginning = "params/txt/"
        inner = {
            name.removeprefix(beginning): t for name, t in checkpoint.tensors.items() if name.startswith(beginning)
        }
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

"""Text towers of CLIP, SigLIP and LiT: read from transformers, open_clip and big_vision, written for transformers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch

from vitruvian.config import NUMERICS, ModelConfig, ViTConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.model.text_tower import TextConfig, TextPool, TextTower
from vitruvian.weights.checkpoint_files import TOKENIZER_FILES, Checkpoint, is_native, read_checkpoint
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.google import BigVision, Lit, heads_in, unstack
from vitruvian.weights.families.huggingface import HuggingFaceTower, encoder_json, read_int
from vitruvian.weights.families.openclip import CONFIG, UNSUPPORTED, OpenClip, OpenClipTimm, config_section
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import TABLES, Table, Tensors
from vitruvian.weights.parse import check_names, count_blocks, shape_of


class HuggingFaceText:
    """`text_config` of model_type clip, siglip and siglip2, and the interface of the other families."""

    table: ClassVar[Table] = TABLES["huggingface_text"]
    scale: ClassVar[str] = "logit_scale"
    bias: ClassVar[str] = "logit_bias"

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        """The text tower's arrays under the names of the table; empty if the file has none."""
        tower = {}
        for name, tensor in checkpoint.tensors.items():
            inner = name.removeprefix("text_model.").removeprefix("text_model.")
            if (inner != name or name.startswith("text_projection.")) and inner != "embeddings.position_ids":
                tower[inner] = tensor
        return tower

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings of TextConfig that the arrays do not determine, and those of the tokenizer."""
        settings = checkpoint.settings.get("config.json", {})
        kind, tower = settings.get("model_type"), settings.get("text_config")
        if kind not in ("clip", "metaclip_2", "siglip", "siglip2") or not isinstance(tower, dict | None):
            reason = f"the text tower needs config.json of model_type clip, metaclip_2, siglip or siglip2, not {kind!r}"
            raise CheckpointError(reason)
        stated = (tower or {}) | {"model_type": kind}  # not empty, so that defaults apply
        clip, eos = kind in CLIP_KINDS, stated.get("eos_token_id", 49_407)
        if not isinstance(eos, int):
            raise CheckpointError(f"config.json: eos_token_id={eos!r} is not one token")
        # in older files of CLIP, 2 is a known mistake
        pool: TextPool = "last" if not clip else "argmax" if eos == 2 and kind == "clip" else "eos"
        cleaning = {"clean": "siglip" if kind == "siglip" else "none", "lowercase": kind == "siglip2", "masks": True}
        return {
            "num_heads": read_int(stated, "num_attention_heads", 8 if clip else 12),
            "depth": read_int(stated, "num_hidden_layers", 12),
            "causal": clip,
            "pool": pool,
            "eos": eos,
            "numerics": HuggingFaceTower().numerics_of({"model_type": f"{kind}_vision_model"} | (tower or {})),
        }, cleaning


class OpenClipText(HuggingFaceText):
    """`text_cfg`: arrays at the top level, or under `text.` next to a timm model."""

    table = TABLES["open_clip_text"]

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        plain = {name.removeprefix("module."): tensor for name, tensor in checkpoint.tensors.items()}
        others = ("visual.", "logit_", "attn_mask")
        return {name.removeprefix("text."): t for name, t in plain.items() if not name.startswith(others)}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        model, tower = config_section(checkpoint, "model_cfg"), config_section(checkpoint, "model_cfg", "text_cfg")
        if not tower:
            raise CheckpointError(f"the text tower needs {CONFIG} with text_cfg, which states its heads")
        for part in (*UNSUPPORTED, "embed_cls", "hf_model_name", "tokenizer_mode"):
            if tower.get(part):
                raise CheckpointError(f"{CONFIG}: text_cfg {part} is not supported")
        pool = tower.get("pool_type", "argmax")
        if pool not in get_args(TextPool):
            names = ", ".join(get_args(TextPool))
            raise CheckpointError(f"{CONFIG}: pool_type {pool!r} of text_cfg is not one of {names}")
        options = tower.get("tokenizer_kwargs") or {}
        clean = options.get("clean", "whitespace" if tower.get("hf_tokenizer_name") else "lower")
        if clean not in ("whitespace", "lower", "canonicalize") or options.keys() - {"clean"}:
            raise CheckpointError(f"{CONFIG}: tokenizer_kwargs {options} are not supported")
        return {
            "num_heads": read_int(tower, "heads", 8),
            "depth": read_int(tower, "layers", 12),
            "causal": not tower.get("no_causal_mask"),
            "pool": pool,
            "eos": tower.get("eos_id", 2),
            "numerics": OpenClip().numerics_of(model, tower),
        }, {"clean": clean}


class BigVisionText(HuggingFaceText):
    """SigLIP's `txt/`; the arrays determine the heads."""

    table = TABLES["big_vision_text"]
    scale, bias = "params/t", "params/b"

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        prefix, tensors = "params/txt/", checkpoint.tensors
        inner = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        return unstack({name.replace("Encoder_0/", "Transformer/"): tensor for name, tensor in inner.items()})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        settings = {"num_heads": heads_in(tensors), "causal": False, "pool": "last", "numerics": NUMERICS["google"]}
        return settings, {"clean": "siglip"}


BERT_LAYER = "encoder_block/layer_sequence/layers_0"
LIT_TOKENS = 16  # tokens per text in LiT's release, of 512 positions of BERT
LIT_HEAD_WIDTH = 64  # of both sizes of BERT


class LitText(BigVisionText):
    """LiT's `txt/`: a BERT in flaxformer's names. Its text is the first of `[CLS]` and up to 15 word pieces."""

    table = TABLES["lit_text"]

    def tensors(self, checkpoint: Checkpoint) -> Tensors:
        names = {name: name.removeprefix("params/") for name in checkpoint.tensors}
        tower = {
            inner.removeprefix("txt/").removeprefix("BertEncoder_0/"): checkpoint.tensors[name]
            for name, inner in names.items()
            if inner.startswith("txt/")
        }
        segments, positions = (
            tower.get(f"embedder/embedders_{kind}_ids/embedding") for kind in ("segment", "position")
        )
        if segments is not None and positions is not None and segments.dim() == positions.dim() == 2:
            del tower["embedder/embedders_segment_ids/embedding"]  # every token is in segment 0
            tower["embedder/embedders_position_ids/embedding"] = positions[:LIT_TOKENS] + segments[0]
        return tower

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        query = tensors.get(f"{BERT_LAYER}/attention_block/attention_layer/query/kernel", torch.empty(1, 1))
        heads = query.shape[1] if query.dim() == 3 else max(1, query.shape[-1] // LIT_HEAD_WIDTH)
        numerics = NUMERICS["google"].replace(norm_eps=1e-12)
        return {"num_heads": heads, "causal": False, "pool": "first", "post_norm": True, "numerics": numerics}, {}


TEXT_FAMILIES: dict[type, HuggingFaceText] = {
    Lit: LitText(),
    HuggingFaceTower: HuggingFaceText(),
    OpenClip: OpenClipText(),
    OpenClipTimm: OpenClipText(),
    BigVision: BigVisionText(),
}
"""By the family of the image tower."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextWeights:
    """A text tower, and how its embeddings are compared with those of images."""

    tower: TextTower
    cleaning: dict[str, Any]  # settings of the tokenizer that depend on the family
    scale: float  # logarithm of the factor on the cosine similarity
    bias: float | None  # None for CLIP
    folder: Path  # directory of the tokenizer's files


def read_text_tower(path: Path) -> TextWeights | None:
    """Read the text tower of a checkpoint, without its tokenizer; None if it has none."""
    checkpoint = read_checkpoint(path)
    family = TEXT_FAMILIES.get(type(recognize(checkpoint))) if not is_native(checkpoint) else None
    tensors = family.tensors(checkpoint) if family else {}
    if family is None or not tensors:
        return None
    tower, cleaning = text_tower(family, checkpoint, tensors)
    scalars = {name: x for name, x in checkpoint.tensors.items() if name in (family.scale, family.bias)}
    if isinstance(family, LitText) and "t" in checkpoint.tensors:
        scalars[family.scale] = checkpoint.tensors["t"]
    for name, tensor in scalars.items():
        if tensor.numel() != 1:
            raise CheckpointError(f"{name!r} has shape {tuple(tensor.shape)}, not a single number")
    if family.scale not in scalars:
        raise CheckpointError(f"{family.scale!r}, the scale of the logits, is missing")
    scale, bias = float(scalars[family.scale]), float(scalars[family.bias]) if family.bias in scalars else None
    folder = path if path.is_dir() else path.parent
    return TextWeights(tower=tower, cleaning=cleaning, scale=scale, bias=bias, folder=folder)


def text_tower(family: HuggingFaceText, checkpoint: Checkpoint, tensors: Tensors) -> tuple[TextTower, dict[str, Any]]:
    """Build the tower with every array accounted for; returns it with the settings of its tokenizer."""
    native, unused = family.table.read(tensors)
    facts, cleaning = family.facts(checkpoint, tensors)
    tokens, positions = shape_of(native, "tokens.weight"), shape_of(native, "pos_embed")
    projection, mlp = shape_of(native, "projection.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
    if len(tokens) != 2 or len(positions) != 2 or len(mlp) != 2:
        raise CheckpointError("the text tower's embeddings or blocks are not matrices")
    config = TextConfig(
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
    with torch.device("meta"):
        tower = TextTower(config)

    def foreign(names: Iterable[str]) -> list[str]:
        return family.table.foreign_names(names, config.blocks)

    check_names(tower.state_dict(), native, "text tower", foreign, unused=unused)
    tower.load_state_dict({name: tensor.contiguous() for name, tensor in native.items()}, assign=True)
    return tower.eval(), cleaning


CLIP_KINDS = ("clip", "metaclip_2")
CLASSES = {"clip": "CLIPModel", "metaclip_2": "MetaClip2Model", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}


def write_text(member: Family[Any], config: ModelConfig, stated: dict[str, Any], text: TextWeights) -> Tensors:
    """The text tower's arrays, the scale and the bias under transformers' names.

    Changes `config.json` in `stated` from that of the image tower to that of both.
    """
    tower = text.tower.config
    reasons = list(text_obstacles(member, config, tower))
    if reasons:
        raise ConversionError(f"the text tower cannot be written: {'; '.join(reasons)}")
    kind = tower_kind(member, config)
    shared: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind, "dtype": "float32"}
    vision = {name: x for name, x in stated["config.json"].items() if name not in ("architectures", "dtype")}
    settings = {"vocab_size": tower.vocabulary, "max_position_embeddings": tower.context_length, **encoder_json(tower)}
    scale, head = torch.tensor(text.scale), "text_model.head"
    if kind in CLIP_KINDS:
        settings |= {"projection_dim": tower.embedding_width, "eos_token_id": tower.eos if tower.pool == "eos" else 2}
        shared["projection_dim"] = tower.embedding_width
        others, head = {"logit_scale": scale}, "text_projection"
    else:
        settings["projection_size"] = tower.embedding_width
        others = {"logit_scale": scale[None], "logit_bias": torch.tensor([text.bias or 0.0])}
    towers = {"vision_config": vision, "text_config": {"model_type": f"{kind}_text_model"} | settings}
    stated["config.json"] = shared | towers
    state = {name: tensor.detach().cpu().float() for name, tensor in text.tower.state_dict().items()}
    projection = {name: state.pop(name) for name in ("projection.weight", "projection.bias") if name in state}
    named = HuggingFaceText.table.write(state, tower.blocks)
    tensors = {f"text_model.{name}": tensor for name, tensor in named.items()}
    return tensors | {name.replace("projection", head): tensor for name, tensor in projection.items()} | others


def tower_kind(member: Family[Any], config: ModelConfig) -> str:
    """`clip`, `metaclip_2`, `siglip` or `siglip2`; empty for other models."""
    if not isinstance(member, HuggingFaceTower) or not isinstance(config, ViTConfig):
        return ""
    return member.model_type(config).removesuffix("_vision_model")


def tokenizer_files(text: TextWeights | None) -> list[Path]:
    return [] if text is None else [text.folder / name for name in TOKENIZER_FILES if (text.folder / name).is_file()]


def text_obstacles(member: Family[Any], image: ModelConfig, config: TextConfig) -> Iterator[str]:
    """Reasons why the text tower cannot be written with this image tower; none if it can."""
    kind = tower_kind(member, image)
    if not kind or not isinstance(image, ViTConfig):
        yield "the image tower is neither CLIP's nor SigLIP's"
        return
    clip = kind in CLIP_KINDS
    is_shared = (image.representation_size if clip else image.width) == config.embedding_width
    checks = {
        f"embeddings of width {config.embedding_width}, unlike the image tower's": not is_shared,
        "LayerScale": config.layer_scale,
        f"causal={config.causal}": config.causal != clip,
        "an end-of-text token of number 2": kind == "clip" and config.pool == "eos" and config.eos == 2,
        f"pool={config.pool!r}": config.pool not in (("argmax", "eos")[kind != "clip" :] if clip else ("last",)),
        "a projection with a bias" if clip else "a projection without a bias": config.projection_bias == clip,
    }
    for what, is_true in checks.items():
        if is_true:
            yield f"{CLASSES[kind]} of transformers does not support {what}"

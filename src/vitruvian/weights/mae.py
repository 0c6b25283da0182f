"""MAE's decoder beside its encoder, as transformers keeps them (`ViTMAEForPreTraining`)."""

from __future__ import annotations

from pathlib import Path

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.mae import MaskedAutoencoder
from vitruvian.model.vit import ViT
from vitruvian.weights import files
from vitruvian.weights.families.huggingface import read_bool, read_int
from vitruvian.weights.families.tables import STACKED, Row, Table, Tensors, pair, rename
from vitruvian.weights.infer import count_blocks, shape_of
from vitruvian.weights.load import load, locate

BLOCK = "blocks.{i}"
TABLE = Table(
    rows=(
        *pair("embed", "embed"),
        Row("mask_token", ("mask_token",)),
        Row("pos_embed", ("pos_embed",)),
        *pair("blocks.{i}.norm1", f"{BLOCK}.layernorm_before"),
        *pair(
            "blocks.{i}.attn.qkv",
            *(f"{BLOCK}.attention.attention.{part}" for part in ("query", "key", "value")),
            layout=STACKED,
        ),
        *pair("blocks.{i}.attn.proj", f"{BLOCK}.attention.output.dense"),
        *pair("blocks.{i}.norm2", f"{BLOCK}.layernorm_after"),
        *pair("blocks.{i}.mlp.fc1", f"{BLOCK}.intermediate.dense"),
        *pair("blocks.{i}.mlp.fc2", f"{BLOCK}.output.dense"),
        *pair("norm", "norm"),
        *pair("pixels", "pred"),
    ),
    block=r"blocks\.(\d+)\.",
)
NAMES = ((r"^decoder_(layers|encoder\.layer)\.", "blocks."), (r"^decoder_", ""))
"""transformers 5 writes `decoder_encoder.layer`, others `decoder_layers`."""


def load_autoencoder(source: str | Path) -> MaskedAutoencoder:
    """MAE with its decoder, in evaluation mode, from a folder of transformers or a published name."""
    path = locate(source)
    encoder, checkpoint = load(source), files.read(path)
    inner = {name.removeprefix("decoder."): t for name, t in checkpoint.tensors.items() if name.startswith("decoder.")}
    settings = checkpoint.settings.get("config.json", {})
    if not inner or settings.get("model_type") != "vit_mae" or not isinstance(encoder, ViT):
        raise CheckpointError("no decoder of MAE (a transformers folder of ViTMAEForPreTraining)", where=path)
    try:
        reading = TABLE.read(rename(inner, NAMES))
        model = MaskedAutoencoder(
            encoder,
            decoder_settings(
                encoder.config, reading.native, num_heads=read_int(settings, "decoder_num_attention_heads", 16)
            ),
            normalized_patches=bool(read_bool(settings, "norm_pix_loss")),
        )
        own = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        problems = model.load_state_dict(own | reading.native, strict=False, assign=True)
    except (ConfigError, RuntimeError) as error:
        raise CheckpointError(f"the decoder cannot be read: {error}", where=path) from error
    if reading.unused or problems.missing_keys or problems.unexpected_keys:
        raise CheckpointError(
            f"names of the decoder do not fit: missing {problems.missing_keys}, "
            f"not used {[*reading.unused, *problems.unexpected_keys]}",
            where=path,
        )
    return model.eval()


def decoder_settings(encoder: ViTConfig, native: Tensors, *, num_heads: int | None) -> ViTConfig:
    embed, fc1 = shape_of(native, "embed.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
    if len(embed) != 2 or len(fc1) != 2:
        raise CheckpointError("its first layer or its MLP is missing")
    return ViTConfig(
        depth=count_blocks(native, None),
        width=embed[0],
        mlp_dim=fc1[0],
        num_heads=num_heads or 16,
        qkv_bias="blocks.0.attn.qkv.bias" in native,
        pos_embed="none",
        numerics=encoder.numerics,
    )

"""MAE with its decoder, from transformers (`ViTMAEForPreTraining`)."""

from __future__ import annotations

from pathlib import Path

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.mae import MaskedAutoencoder
from vitruvian.model.vit import ViT
from vitruvian.weights.checkpoint_files import read_checkpoint
from vitruvian.weights.families.huggingface import read_bool, read_int
from vitruvian.weights.families.huggingface_vit import vit_block_rows
from vitruvian.weights.families.tables import Row, Table, Tensors, pairs, rename
from vitruvian.weights.load import load, locate
from vitruvian.weights.parse import count_blocks, shape_of

TABLE = Table(
    rows=(
        *pairs({"embed": "embed", "norm": "norm", "pixels": "pred"}),
        Row("mask_token", ("mask_token",)),
        Row("pos_embed", ("pos_embed",)),
        *vit_block_rows("blocks.{i}"),
    ),
    block=r"blocks\.(\d+)\.",
)
NAMES = ((r"^decoder_(layers|encoder\.layer)\.", "blocks."), (r"^decoder_", ""))
"""transformers 5 writes `decoder_encoder.layer`, others `decoder_layers`."""


def load_autoencoder(source: str | Path) -> MaskedAutoencoder:
    """Load MAE with its decoder, in evaluation mode.

    Args:
        source: A folder of transformers or a published name.

    Raises:
        CheckpointError: The weights have no decoder, or it cannot be read.
    """
    path = locate(source)
    encoder, checkpoint = load(source), read_checkpoint(path)
    inner = {name.removeprefix("decoder."): t for name, t in checkpoint.tensors.items() if name.startswith("decoder.")}
    settings = checkpoint.settings.get("config.json", {})
    if not inner or settings.get("model_type") != "vit_mae" or not isinstance(encoder, ViT):
        raise CheckpointError("has no MAE decoder (expected a transformers folder of ViTMAEForPreTraining)", where=path)
    try:
        reading = TABLE.read(rename(inner, NAMES))
        num_heads = read_int(settings, "decoder_num_attention_heads", 16)
        decoder = decoder_settings(encoder.config, reading.native, num_heads=num_heads or 16)
        model = MaskedAutoencoder(encoder, decoder, normalized_patches=bool(read_bool(settings, "norm_pix_loss")))
        state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        problems = model.load_state_dict(state | reading.native, strict=False, assign=True)
    except (ConfigError, RuntimeError) as error:
        raise CheckpointError(f"the decoder cannot be read: {error}", where=path) from error
    if reading.unused or problems.missing_keys or problems.unexpected_keys:
        raise CheckpointError(
            f"names of the decoder do not fit: missing {problems.missing_keys}, "
            f"not used {[*reading.unused, *problems.unexpected_keys]}",
            where=path,
        )
    return model.eval()


def decoder_settings(encoder: ViTConfig, native: Tensors, *, num_heads: int) -> ViTConfig:
    embed, fc1 = shape_of(native, "embed.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
    if len(embed) != 2 or len(fc1) != 2:
        raise CheckpointError("the decoder's first layer or MLP is missing")
    return ViTConfig(
        depth=count_blocks(native, None),
        width=embed[0],
        mlp_dim=fc1[0],
        num_heads=num_heads,
        qkv_bias="blocks.0.attn.qkv.bias" in native,
        pos_embed="none",
        numerics=encoder.numerics,
    )

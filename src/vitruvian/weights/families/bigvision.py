"""big_vision (`.npz`): token, mean or attention pooling, learned or sin-cos positions, blocks apart or stacked."""

from __future__ import annotations

import re

from vitruvian.config import GOOGLE_NUMERICS, ModelConfig, Preprocess
from vitruvian.weights.families.family import Facts, Family, scaled_crop
from vitruvian.weights.families.google import (
    IGNORED,
    SHARED_ROWS,
    attention,
    attention_out,
    block_rows,
    heads_in,
    layer,
    norm,
)
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import Row, Table, Tensors
from vitruvian.weights.files import Checkpoint

POOL_ATTENTION = "MAPHead_0/MultiHeadDotProductAttention_0"

OLD_NAMES = (
    (r"Transformer/pos_embedding", r"pos_embedding"),
    # Attention pooling stood at the top level while ViT-G was developed.
    (r"(probe|(?:MlpBlock_0|MultiHeadDotProductAttention_0|LayerNorm_0)/.*)", r"MAPHead_0/\1"),
)


class BigVision(Family):
    """`.npz` with the paper release's numerics; a position row for the class token is added to it."""

    name = "big_vision"
    numerics = GOOGLE_NUMERICS
    anchor = "embedding/kernel"
    prefixes = ("", "opt/target/", "params/img/", "params/")
    ignored = IGNORED
    table = Table(
        rows=(
            *SHARED_ROWS,
            Row(FLAT, ("pos_embedding",)),
            *block_rows("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
            Row("attn_pool.probe", ("MAPHead_0/probe",)),
            *attention("attn_pool.query", POOL_ATTENTION, ("query",)),
            *attention("attn_pool.key_value", POOL_ATTENTION, ("key", "value")),
            *attention_out("attn_pool.out", POOL_ATTENTION),
            *norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
            *layer("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
            *layer("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
        ),
        block=r"Transformer/encoderblock_(\d+)/",
    )

    def to_table_names(self, tensors: Tensors) -> Tensors:
        renamed = {}
        for name, tensor in unstack(super().to_table_names(tensors)).items():
            for old, new in OLD_NAMES:
                if re.fullmatch(old, name):
                    name = re.sub(old, new, name)
                    break
            renamed[name] = tensor
        return renamed

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        return Facts(numerics=self.numerics, heads=heads_in(tensors), fixed_positions=True)

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        size = config.image_size
        return Preprocess(image_size=size, fit="crop", scaled_size=scaled_crop(size, 256, 224), interpolation="area")


def unstack(tensors: Tensors) -> Tensors:
    """Blocks that `scan` stacked on axis 0 under `encoderblock/`, one by one."""
    stacked = "Transformer/encoderblock/"
    apart: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(stacked) or not tensor.dim():
            apart[name] = tensor
            continue
        for i, part in enumerate(tensor):
            apart[f"Transformer/encoderblock_{i}/{name.removeprefix(stacked)}"] = part
    return apart

"""timm's names: one row for each of our parameters."""

from __future__ import annotations

from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import Row, pair

UNIT, NATIVE_UNIT = "patch_embed.backbone.stages.{s}.blocks.{u}", "embed.stem.stages.{s}.{u}"

BLOCK_ROWS = (
    *pair("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *pair("blocks.{i}.attn.qkv", "blocks.{i}.attn.qkv"),
    *pair("blocks.{i}.attn.q_norm", "blocks.{i}.attn.q_norm"),
    *pair("blocks.{i}.attn.k_norm", "blocks.{i}.attn.k_norm"),
    *pair("blocks.{i}.attn.norm", "blocks.{i}.attn.norm"),
    Row("blocks.{i}.attn.position.table", ("blocks.{i}.attn.relative_position_bias_table",)),
    Row("blocks.{i}.attn.position.frequencies", ("blocks.{i}.attn.rope_freqs",)),
    Row("blocks.{i}.attn.subtracted", ("blocks.{i}.attn.subtracted",)),
    Row("blocks.{i}.attn.head_norm.weight", ("blocks.{i}.attn.sub_norm.weight",)),
    *pair("blocks.{i}.attn.proj", "blocks.{i}.attn.proj"),
    Row("blocks.{i}.ls1", ("blocks.{i}.ls1.gamma",)),
    *pair("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *pair("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    *pair("blocks.{i}.mlp.norm", "blocks.{i}.mlp.norm"),
    *pair("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    Row("blocks.{i}.ls2", ("blocks.{i}.ls2.gamma",)),
)

TOKEN_ROWS = (
    *pair("embed.patch", "patch_embed.proj"),
    *pair("embed.patch_norm", "patch_embed.norm"),
    *pair("embed.norm", "norm_pre"),
    Row("embed.cls_token", ("cls_token",)),
    Row("embed.dist_token", ("dist_token",)),
    Row("embed.reg_tokens", ("reg_token",)),
    Row(FLAT, ("pos_embed",)),
    *pair("norm", "norm"),
)

FACTOR_ROWS = Row("embed.row_pos_embed", ("pos_embed_y",)), Row("embed.col_pos_embed", ("pos_embed_x",))

STEM_ROWS = (
    Row("embed.stem.root.weight", ("patch_embed.backbone.stem.conv.weight",)),
    *pair("embed.stem.root_norm", "patch_embed.backbone.stem.norm"),
    *(Row(f"{NATIVE_UNIT}.conv{n}.weight", (f"{UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
    *(row for n in (1, 2, 3) for row in pair(f"{NATIVE_UNIT}.norm{n}", f"{UNIT}.norm{n}")),
    Row(f"{NATIVE_UNIT}.shortcut.weight", (f"{UNIT}.downsample.conv.weight",)),
    *pair(f"{NATIVE_UNIT}.shortcut_norm", f"{UNIT}.downsample.norm"),
)


def batch_norm(native: str, foreign: str) -> tuple[Row, ...]:
    kinds = ("weight", "bias", "running_mean", "running_var")
    return tuple(Row(f"{native}.{kind}", (f"{foreign}.{kind}",)) for kind in kinds)


RESNET_D_UNIT = "patch_embed.backbone.stages.{s}.units.{u}"
BATCH_STEM_ROWS = (
    *(Row(f"embed.stem.root.{n}.conv.weight", (f"patch_embed.root.{n}.conv.weight",)) for n in range(3)),
    *(row for n in range(3) for row in batch_norm(f"embed.stem.root.{n}.norm", f"patch_embed.root.{n}.norm")),
    *(Row(f"{NATIVE_UNIT}.part{n}.conv.weight", (f"{RESNET_D_UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
    *(row for n in (1, 2, 3) for row in batch_norm(f"{NATIVE_UNIT}.part{n}.norm", f"{RESNET_D_UNIT}.bn{n}")),
    Row(f"{NATIVE_UNIT}.shortcut.conv.weight", (f"{RESNET_D_UNIT}.downsample.1.weight",)),
    *batch_norm(f"{NATIVE_UNIT}.shortcut.norm", f"{RESNET_D_UNIT}.downsample.2"),
)

# Names of the stems with BatchNorm in their files, and those of the table.
BATCH_STEM_NAMES = (
    *((rf"^patch_embed\.backbone\.layer{n + 1}\.", f"patch_embed.backbone.stages.{n}.units.") for n in range(8)),
    *((rf"^patch_embed\.backbone\.conv1\.{3 * n}\.", f"patch_embed.root.{n}.conv.") for n in range(3)),
    *((rf"^patch_embed\.backbone\.conv1\.{3 * n + 1}\.", f"patch_embed.root.{n}.norm.") for n in range(2)),
    (r"^patch_embed\.backbone\.bn1\.", "patch_embed.root.2.norm."),
    *((rf"^patch_embed\.backbone\.{n}\.conv\.", f"patch_embed.root.{n}.conv.") for n in range(2)),
    *((rf"^patch_embed\.backbone\.{n}\.bn\.", f"patch_embed.root.{n}.norm.") for n in range(2)),
    (r"^patch_embed\.backbone\.2\.conv\.", "patch_embed.proj."),
)

POOL_ROWS = (
    Row("attn_pool.probe", ("attn_pool.latent",)),
    *pair("attn_pool.q", "attn_pool.q"),
    *pair("attn_pool.kv", "attn_pool.kv"),
    *pair("attn_pool.proj", "attn_pool.proj"),
    *pair("attn_pool.norm", "attn_pool.norm"),
    *pair("attn_pool.mlp.fc1", "attn_pool.mlp.fc1"),
    *pair("attn_pool.mlp.fc2", "attn_pool.mlp.fc2"),
)

"""Google's `.npz` files: the paper's release with its hybrids, MLP-Mixers, big_vision, and BiT ResNets."""

import re
from typing import ClassVar

from vitruvian.config import NUMERICS, Preprocess, ResNetConfig, ViTConfig
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import ConfigT, Facts, Family, scaled_size
from vitruvian.weights.families.tables import TABLES, Tensors, rename

# The release numbers modules in one sequence; later code counts each kind of module separately.
LATER_NAMES = (
    ("/MultiHeadDotProductAttention_0/", "/MultiHeadDotProductAttention_1/"),
    ("/LayerNorm_1/", "/LayerNorm_2/"),
    ("/MlpBlock_0/", "/MlpBlock_3/"),
)


class Npz(Family[ConfigT]):
    """Base of the releases of the paper, of MLP-Mixer and of BiT: images are squashed by TensorFlow's resize."""

    numerics = NUMERICS["google"]
    suffixes = (".npz",)
    preprocess: ClassVar = {"antialias": False}


class Google(Npz[ViTConfig]):
    """The paper's release: tanh GELU, eps 1e-6, positions resampled with aligned corners."""

    name = "google"
    table = TABLES["google"]

    def to_table_names(self, tensors: Tensors) -> Tensors:
        tensors = super().to_table_names(tensors)
        later = any("/MultiHeadDotProductAttention_0/" in name for name in tensors)
        return rename(tensors, LATER_NAMES) if later else tensors

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        return Facts(numerics=self.numerics, num_heads=heads_in(tensors))


def heads_in(tensors: Tensors) -> int | None:
    """The number of heads, an axis of Flax's query kernels (D, H, d)."""
    pattern = re.compile(r"Transformer/encoderblock_\d+/MultiHeadDotProductAttention_\d/query/kernel")
    return next((t.shape[1] for name, t in tensors.items() if pattern.fullmatch(name) and t.dim() == 3), None)


class Lit(Google):
    """LiT: a ViT beside a BERT (`text_towers.LitText`); a head is the projection to the embeddings of both."""

    table = TABLES["lit"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and any("txt/BertEncoder_0/" in name for name in checkpoint.tensors)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        return rename(super().to_table_names(tensors), [(r"^head/", "pre_logits/")])

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        has_head = "pre_logits/kernel" in tensors
        settings = {"projection": has_head, "projection_bias": has_head}
        return Facts(numerics=self.numerics, num_heads=heads_in(tensors), settings=settings)


class GoogleMixer(Google):
    """The release's MLP-Mixers. The file states no positions: its MLPs over the patches fit one image size."""

    table = TABLES["google_mixer"]

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        return Facts(numerics=self.numerics, num_heads=1)


class BigVision(Family[ViTConfig]):
    """big_vision: the numerics of the paper's release; a position for the class token is added to the token."""

    name = "big_vision"
    numerics = NUMERICS["google"]
    table = TABLES["big_vision"]

    def to_table_names(self, tensors: Tensors) -> Tensors:
        return unstack(super().to_table_names(tensors))

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        kernel, positions = tensors[self.table.anchor], tensors.get("pos_embedding")
        patches = (kernel.shape[0], positions.shape[-2]) if positions is not None and positions.dim() > 1 else None
        size = TRIMMED_SIGLIP.get(patches) if patches and has_text(checkpoint) else None
        return Facts(numerics=self.numerics, num_heads=heads_in(tensors), fixed_positions=True, image_size=size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        size = config.image_size
        if has_text(checkpoint):  # SigLIP: `resize(N)|value_range(-1, 1)`
            return Preprocess(image_size=size, antialias=False)
        return Preprocess(image_size=size, fit="crop", scaled_size=scaled_size(size), interpolation="area")


TRIMMED_SIGLIP = {(14, 27 * 27): (384, 384)}
"""Image size by patch size and number of patches: So400m/14 gets 384 pixels, of which it drops the last 6."""


def has_text(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("params/txt/") for name in checkpoint.tensors)


def unstack(tensors: Tensors) -> Tensors:
    """Split blocks that Flax's `scan` stacked on axis 0 under `encoderblock/`."""
    stacked = "Transformer/encoderblock/"
    blocks: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(stacked) or not tensor.dim():
            blocks[name] = tensor
            continue
        for i, part in enumerate(tensor):
            blocks[f"Transformer/encoderblock_{i}/{name.removeprefix(stacked)}"] = part
    return blocks


class Bit(Npz[ResNetConfig]):
    """BiT's release: pre-activation ResNets; images are squashed, as in BiT's fine-tuning."""

    name = "bit"
    table = TABLES["bit"]

    def prefix(self, tensors: Tensors) -> str | None:
        return super().prefix(rename(tensors, self.table.renames))

    def from_table_names(self, tensors: Tensors, config: ResNetConfig) -> Tensors:
        return {f"resnet/{name}": tensor for name, tensor in tensors.items()}

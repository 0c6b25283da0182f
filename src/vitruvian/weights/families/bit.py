"""BiT ResNets, the paper's baseline: Google's Big Transfer release (`.npz`), and the same under timm's names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vitruvian.config import GOOGLE_NUMERICS, TIMM_NUMERICS, ModelConfig, Preprocess, ResNetConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.family import Facts, Family
from vitruvian.weights.families.rules import CONV, POINTWISE, VECTOR, Kind, Row, Table, Tensors, pair, rename
from vitruvian.weights.families.timm_variants import HARMLESS, arguments_of
from vitruvian.weights.families.timm_view import crop_view, published, published_labels, published_size, published_view
from vitruvian.weights.files import Checkpoint

UNIT = "block{S}/unit{U:02d}"
STAGE, TIMM_UNIT = "stages.{s}.{u}", "stages.{s}.blocks.{u}"
KERNEL = Kind(4, lambda parts: parts[0][:, :, 0, 0], lambda x, n, heads: [x[:, :, None, None]])
"""A dense layer as a 1x1 convolution in PyTorch's layout."""
TIMM_ARGUMENTS = frozenset({"num_classes", "in_chans"})
"""What `model_args` may state of timm's BiT ResNets, and their arrays tell; other arguments make another network."""
LETTERS = ((1, "a"), (2, "b"), (3, "c"))


def norm(native: str, foreign: str) -> tuple[Row, Row]:
    return Row(f"{native}.weight", (f"{foreign}/gamma",), VECTOR), Row(f"{native}.bias", (f"{foreign}/beta",), VECTOR)


class Bit(Family):
    """Pre-activation ResNets; the evaluation view squashes, as BiT's fine-tuning does."""

    name = "bit"
    numerics = GOOGLE_NUMERICS
    anchor = "root_block/standardized_conv2d/kernel"
    prefixes = ("resnet/", "")
    renames = ((r"standardized_conv2d_\d+/", "standardized_conv2d/"),)  # some files number the convolutions
    suffixes = (".npz",)
    table = Table(
        rows=(
            Row("root.weight", ("root_block/standardized_conv2d/kernel",), CONV),
            *(
                Row(f"stages.{{s}}.{{u}}.conv{n}.weight", (f"{UNIT}/{letter}/standardized_conv2d/kernel",), CONV)
                for n, letter in LETTERS
            ),
            *(
                row
                for n, letter in LETTERS
                for row in norm(f"stages.{{s}}.{{u}}.norm{n}", f"{UNIT}/{letter}/group_norm")
            ),
            Row("stages.{s}.{u}.shortcut.weight", (f"{UNIT}/a/proj/standardized_conv2d/kernel",), CONV),
            *norm("norm", "group_norm"),
            Row("head.weight", ("head/conv2d/kernel",), POINTWISE),
            Row("head.bias", ("head/conv2d/bias",)),
        ),
        unit=r"block(\d+)/unit(\d+)/",
        first_unit=1,
    )

    def prefix(self, tensors: Tensors) -> str | None:
        return super().prefix(rename(tensors, self.renames))

    def usual_view(self, checkpoint: object, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, antialias=False)

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        if not isinstance(config, ResNetConfig):
            yield "bit holds ResNets, this is a Vision Transformer"

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        return {f"resnet/{name}": tensor for name, tensor in tensors.items()}


class TimmBit(Family):
    """timm's `resnetv2_*_bit`: other names, and kernels standardized with another epsilon."""

    name = "timm"
    numerics = TIMM_NUMERICS
    anchor = "stem.conv.weight"
    prefixes = ("", "module.", "model.")
    suffixes = (".safetensors", ".pth", ".pt", ".bin")
    table = Table(
        rows=(
            Row("root.weight", ("stem.conv.weight",)),
            *(Row(f"{STAGE}.conv{n}.weight", (f"{TIMM_UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
            *(row for n in (1, 2, 3) for row in pair(f"{STAGE}.norm{n}", f"{TIMM_UNIT}.norm{n}")),
            Row(f"{STAGE}.shortcut.weight", (f"{TIMM_UNIT}.downsample.conv.weight",)),
            *pair("norm", "norm"),
            Row("head.weight", ("head.fc.weight",), KERNEL),
            Row("head.bias", ("head.fc.bias",)),
        ),
        unit=r"stages\.(\d+)\.blocks\.(\d+)\.",
    )

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = checkpoint.settings.get("config.json", {})
        architecture = config.get("architecture", "resnetv2_bit")
        if not re.fullmatch(r"resnetv2_\w*bit", str(architecture).split(".")[0]):
            raise CheckpointError(f"config.json: {architecture!r} is not one of timm's resnetv2_*_bit")
        for name, value in ({"global_pool": config.get("global_pool") or "avg"} | arguments_of(config)).items():
            if not (HARMLESS.fullmatch(name) or name in TIMM_ARGUMENTS or (name, value) == ("global_pool", "avg")):
                raise CheckpointError(f"config.json: {name}={value!r} is not known here for a BiT ResNet")
        size = published_size(published(checkpoint))
        return Facts(
            numerics=self.numerics,
            settings={"style": "timm_bit"},
            image_size=size and size[1],
            labels=published_labels(checkpoint),
        )

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        cfg = published(checkpoint)
        return published_view(cfg, config.image_size) if cfg else None

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return crop_view(config.image_size, 0.875).replace(interpolation="bilinear")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        if not isinstance(config, ResNetConfig):
            yield "these names hold ResNets, this is a Vision Transformer"

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        return config.replace(style="timm_bit")

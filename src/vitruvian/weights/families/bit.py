"""BiT ResNets (`.npz`), the paper's baseline: Google's Big Transfer release."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vitruvian.config import GOOGLE_NUMERICS, ModelConfig, Preprocess, ResNetConfig
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.rules import CONV, POINTWISE, VECTOR, Row, Table, Tensors

UNIT = "block{S}/unit{U:02d}"
LETTERS = ((1, "a"), (2, "b"), (3, "c"))


def norm(native: str, foreign: str) -> tuple[Row, Row]:
    return Row(f"{native}.weight", (f"{foreign}/gamma",), VECTOR), Row(f"{native}.bias", (f"{foreign}/beta",), VECTOR)


class Bit(Family):
    """Pre-activation ResNets; the evaluation view squashes, as BiT's fine-tuning does."""

    name = "bit"
    numerics = GOOGLE_NUMERICS
    anchor = "root_block/standardized_conv2d/kernel"
    prefixes = ("resnet/", "")
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
        return super().prefix({without_counter(name): tensor for name, tensor in tensors.items()})

    def to_table_names(self, tensors: Tensors) -> Tensors:
        return super().to_table_names({without_counter(name): tensor for name, tensor in tensors.items()})

    def usual_view(self, checkpoint: object, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, antialias=False)

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        if not isinstance(config, ResNetConfig):
            yield "bit holds ResNets, this is a Vision Transformer"

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        return {f"resnet/{name}": tensor for name, tensor in tensors.items()}


def without_counter(name: str) -> str:
    """Some files number the convolutions: `standardized_conv2d_7/`."""
    return re.sub(r"standardized_conv2d_\d+/", "standardized_conv2d/", name)

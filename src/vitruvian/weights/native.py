"""The native folder: `config.json` (a model's description) and `model.safetensors`, replaced as one.

The safetensors header carries the description too. `config.json` holds the header's fingerprint: while
they agree, `config.json` counts, so that people can edit labels; where they do not, a save was
interrupted between the two files, and the header belongs to the weights.
"""

from __future__ import annotations

from vitruvian.errors import CheckpointError
from vitruvian.weights.description import Description, fingerprint
from vitruvian.weights.files import Checkpoint

ANCHORS = ("embed.patch.weight", "root.weight")
"""What every native ViT, and every native ResNet, has."""


def claims(checkpoint: Checkpoint) -> bool:
    return checkpoint.format == "safetensors" and any(name in checkpoint.tensors for name in ANCHORS)


def describe(checkpoint: Checkpoint) -> Description:
    """The description that belongs to the weights."""
    config, header = checkpoint.settings.get("config.json"), checkpoint.carried
    if config is None and header is None:
        raise CheckpointError(
            "native weights without their description; keep config.json in the same folder as model.safetensors"
        )
    if config is None or (header is not None and config.get("header") != fingerprint(header)):
        return Description.from_json(header, "the header of model.safetensors")
    return Description.from_json(config, "config.json")

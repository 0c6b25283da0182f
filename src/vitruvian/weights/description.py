"""The description of a model besides its tensors, as JSON: in native folders, and embedded in files of other families.

A native folder has `config.json` and `model.safetensors`, whose header contains the description too. `config.json` has
the header's fingerprint: while they agree, `config.json` is used, so that users can edit labels; otherwise a save was
interrupted between the two files, and the header belongs to the weights.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any, Self

from vitruvian.config import MODEL_KINDS, ModelConfig, ModelMeta
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.build import Model
from vitruvian.weights.checkpoint_files import Checkpoint

FORMAT = 1
"""Version of the JSON; later ones are refused."""
ANCHORS = ("embed.patch.weight", "root.weight")
"""Arrays of every native ViT, and of every native ResNet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Saved architecture and metadata of a model."""

    config: ModelConfig
    meta: ModelMeta

    @classmethod
    def of(cls, model: Model) -> Self:
        return cls(config=model.config, meta=model.meta)

    def to_json(self) -> dict[str, Any]:
        kind = next(kind for kind, config in MODEL_KINDS.items() if isinstance(self.config, config))
        return {"format": FORMAT, "kind": kind, "architecture": self.config.to_json(), **self.meta.to_json()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Parse the output of `to_json`; an error names `where`."""
        if not isinstance(data, dict) or not isinstance(data.get("architecture"), dict):
            raise CheckpointError("not a description of a model: 'architecture' is missing", where=where)
        version, kind = data.get("format"), data.get("kind")
        if not isinstance(version, int) or version > FORMAT:
            reason = f"format {version!r} is not known, this version reads up to {FORMAT}"
            raise CheckpointError(reason, where=where, hint="upgrade vitruvian")
        if not isinstance(kind, str) or kind not in MODEL_KINDS:
            raise CheckpointError(f"kind {kind!r} is not one of {', '.join(MODEL_KINDS)}", where=where)
        saved = {field.name for field in fields(ModelMeta)} - {"source"}
        try:
            config: ModelConfig = MODEL_KINDS[kind].from_json(data["architecture"])
            meta = ModelMeta.from_json({name: value for name, value in data.items() if name in saved})
        except ConfigError as error:
            raise error.replace(CheckpointError, where=where) from error
        return cls(config=config, meta=meta)


def is_native(checkpoint: Checkpoint) -> bool:
    return checkpoint.format != "npz" and any(name in checkpoint.tensors for name in ANCHORS)


def describe_native(checkpoint: Checkpoint) -> Description | None:
    """The description of native weights, or None."""
    config, header = checkpoint.settings.get("config.json"), checkpoint.embedded
    if config is None and header is None:
        return None
    if config is None or (header is not None and config.get("header") != fingerprint(header)):
        return Description.from_json(header, "the header of model.safetensors")
    return Description.from_json(config, "config.json")


def fingerprint(data: Any) -> str:
    """SHA-256 of a JSON value, independent of spacing and the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

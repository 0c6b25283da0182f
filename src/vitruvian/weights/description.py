"""What a model carries beside its tensors, as JSON: the same text in native folders and inside foreign files.

A native folder has `config.json` and `model.safetensors`, whose header carries the description too. `config.json`
holds the header's fingerprint: while they agree, `config.json` counts, so that people can edit labels; where they do
not, a save was interrupted between the two files, and the header belongs to the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from vitruvian.config import (
    MODEL_KINDS,
    CascadeConfig,
    ModelConfig,
    Preprocess,
    ResNetConfig,
    ScoreFunction,
    ThresholdOn,
)
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.build import Model
from vitruvian.settings import Range, Settings, Share, check_choice, validate
from vitruvian.weights.files import Checkpoint

S = TypeVar("S", bound=Settings)

FORMAT = 1
"""Version of the JSON; a reader refuses a later one."""
ANCHORS = ("embed.patch.weight", "root.weight")
"""What every native ViT, and every native ResNet, has."""
THRESHOLDS: dict[str, Any] = {"probability": Share, "energy": Annotated[float, Range(-1e6, 1e6)]}
"""The values that a threshold on each can have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Architecture (with its numerics), evaluation view, labels and history of one model."""

    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    origin: str = ""
    temperature: float = 1.0
    """Logits are divided by it before they become probabilities."""
    score_function: ScoreFunction = "softmax"
    threshold: float = 0.0
    """Images that have less show none of the classes."""
    threshold_on: ThresholdOn = "probability"
    cascade: CascadeConfig | None = None
    """A cheaper pass that is made first."""
    known_as: str = ""
    """What its family called it: `timm:vit_base_patch16_224`, `huggingface:vit_msn`."""

    @classmethod
    def of(cls, model: Model) -> Description:
        return cls(
            config=model.config,
            preprocess=model.preprocess,
            labels=model.labels,
            origin=model.origin,
            temperature=model.temperature,
            score_function=model.score_function,
            threshold=model.threshold,
            threshold_on=model.threshold_on,
            cascade=model.cascade,
            known_as=model.known_as,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": "resnet" if isinstance(self.config, ResNetConfig) else "vit",
            "architecture": self.config.to_json(),
            "preprocess": self.preprocess.to_json(),
            "labels": None if self.labels is None else list(self.labels),
            "origin": self.origin,
            "temperature": self.temperature,
            "score_function": self.score_function,
            "threshold": self.threshold,
            "threshold_on": self.threshold_on,
            **({} if self.cascade is None else {"cascade": self.cascade.to_json()}),
            **({"known_as": self.known_as} if self.known_as else {}),
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Description:
        """The description written by `to_json`; `where` begins the text of an error."""
        if not isinstance(data, dict) or not isinstance(data.get("architecture"), dict):
            raise CheckpointError("not a description of a model: 'architecture' is missing", where=where)
        version = data.get("format")
        if not isinstance(version, int) or version > FORMAT:
            raise CheckpointError(
                f"format {version!r} is not known, this version reads up to {FORMAT}; upgrade vitruvian", where=where
            )
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in MODEL_KINDS:
            raise CheckpointError(f"kind {kind!r} is not one of {', '.join(MODEL_KINDS)}", where=where)
        try:
            config: ModelConfig = MODEL_KINDS[kind].from_json(data["architecture"])
            preprocess = Preprocess.from_json(data.get("preprocess") or {})
            temperature = float(data.get("temperature", 1.0))  # files of earlier versions have none
            score_function = data.get("score_function", "softmax")
            check_choice("score_function", score_function, get_args(ScoreFunction))
            threshold_on = data.get("threshold_on", "probability")
            check_choice("threshold_on", threshold_on, get_args(ThresholdOn))
            threshold = validate("threshold", THRESHOLDS[threshold_on], data.get("threshold", 0.0))
            cascade = validate("cascade", CascadeConfig | None, data.get("cascade"))
        except ConfigError as error:
            raise error.replace(CheckpointError, where=where) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(str(error), where=where) from error
        labels = data.get("labels")
        if labels is not None and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
            raise CheckpointError("'labels' is not a list of names", where=where)
        if not 0 < temperature < float("inf"):
            raise CheckpointError(f"temperature={temperature} is not a positive number", where=where)
        return cls(
            config=config,
            preprocess=preprocess,
            labels=None if labels is None else tuple(labels),
            origin=str(data.get("origin") or ""),
            temperature=temperature,
            score_function=score_function,
            threshold=threshold,
            threshold_on=threshold_on,
            cascade=cascade,
            known_as=str(data.get("known_as") or ""),
        )


def is_native(checkpoint: Checkpoint) -> bool:
    return checkpoint.format != "npz" and any(name in checkpoint.tensors for name in ANCHORS)


def describe_native(checkpoint: Checkpoint) -> Description | None:
    """The description that belongs to native weights; None if they have none."""
    config, header = checkpoint.settings.get("config.json"), checkpoint.carried
    if config is None and header is None:
        return None
    if config is None or (header is not None and config.get("header") != fingerprint(header)):
        return Description.from_json(header, "the header of model.safetensors")
    return Description.from_json(config, "config.json")


def fingerprint(data: Any) -> str:
    """SHA-256 of a JSON value, whatever its spacing and the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

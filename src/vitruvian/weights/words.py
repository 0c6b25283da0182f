"""Words instead of classes: the text tower of CLIP or SigLIP, and heads made of its embeddings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.catalog import imagenet_classes
from vitruvian.config import ScoreFunction, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, argument
from vitruvian.files import read_text
from vitruvian.model.build import Model, empty
from vitruvian.model.text_tower import TextTower
from vitruvian.text import brief
from vitruvian.weights import files
from vitruvian.weights.description import is_native
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import Tensors
from vitruvian.weights.families.text_towers import TEXT_FAMILIES, TextFamily, TextWeights, scalar
from vitruvian.weights.load import is_inside, locate
from vitruvian.weights.tokenizer import Tokenizer, TokenizerRules

# T texts, L labels, E width of the embeddings that both towers share

TEXTS = 64
"""Texts that the tower embeds at a time."""
MAX_WORDS = 100_000
"""Labels of one head."""
AS_IT_IS = "{}"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextEncoder:
    """A text tower with its tokenizer, and how its embeddings are compared with those of images."""

    tower: TextTower
    tokenizer: Tokenizer
    scale: float
    """Of the logits: they are scale * cosine + bias."""
    bias: float | None
    """None for CLIP; a number for SigLIP, whose logits become probabilities one by one."""

    @property
    def score_function(self) -> ScoreFunction:
        return "softmax" if self.bias is None else "sigmoid"

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeddings (T, E) of unit length."""
        if isinstance(texts, str):
            raise ConfigError("expected a list of texts, not one: embed_texts(model, ['a cat'])")
        if not texts:
            return torch.zeros(0, self.tower.config.embedding_width or self.tower.config.width)
        parts = []
        with torch.inference_mode():
            for start in range(0, len(texts), TEXTS):
                parts.append(F.normalize(self.tower(*self.tokenizer(texts[start : start + TEXTS])), dim=-1))
        return torch.cat(parts).clone()

    def embed_labels(self, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
        """One embedding for each label (L, E): the mean over the templates, of unit length again."""
        texts = [template.replace("{}", label) for label in labels for template in templates]
        return F.normalize(self.embed(texts).view(len(labels), len(templates), -1).mean(dim=1), dim=-1)


def load_text(source: str | Path) -> TextEncoder:
    """The text tower of a CLIP or SigLIP folder or published name; a CheckpointError where there is none."""
    path = locate(source)
    try:
        found = read_text_tower(path)
        if found is None:
            raise CheckpointError(
                "has no text tower to answer in words; give a CLIP or SigLIP with both towers, or a model with a head"
            )
        tower = found.tower
        rules = TokenizerRules(
            context_length=tower.config.context_length,
            vocabulary=tower.config.vocabulary,
            full=not tower.config.causal,
            **found.cleaning,
        )
        scale = float(torch.tensor(found.scale).exp())
        return TextEncoder(tower=tower, tokenizer=Tokenizer(found.folder, rules), scale=scale, bias=found.bias)
    except (CheckpointError, ConfigError) as error:
        raise error.replace(CheckpointError, where=None if is_inside(path, error.where) else path) from error


def read_text_tower(path: Path) -> TextWeights | None:
    """The text tower inside weights, without its tokenizer; None where there is none."""
    checkpoint = files.read(path)
    family = TEXT_FAMILIES.get(type(recognize(checkpoint))) if not is_native(checkpoint) else None
    tensors = family.tensors(checkpoint) if family else {}
    if family is None or not tensors:
        return None
    tower, cleaning = text_tower(family, checkpoint, tensors)
    scale = scalar(checkpoint.tensors.get(family.scale), family.scale)
    if scale is None:
        raise CheckpointError(f"{family.scale!r} is missing, by which image and text are compared")
    bias = scalar(checkpoint.tensors.get(family.bias), family.bias)
    folder = path if path.is_dir() else path.parent
    return TextWeights(tower=tower, cleaning=cleaning, scale=scale, bias=bias, folder=folder)


def text_tower(family: TextFamily, checkpoint: files.Checkpoint, tensors: Tensors) -> tuple[TextTower, dict[str, Any]]:
    """The tower with its weights, every array accounted for, and what its tokenizer has to do."""
    reading = family.table.read(tensors)
    config = family.config(checkpoint, tensors, reading.native)
    with torch.device("meta"):
        tower = TextTower(config)
    expected = tower.state_dict()
    missing = family.table.foreign_names((name for name in expected if name not in reading.native), config.blocks)
    surplus = [*(name for name in reading.native if name not in expected), *reading.unused]
    if missing or surplus:
        raise CheckpointError(
            f"names do not fit a text tower of this shape: {len(missing)} not found: {brief(missing)}; "
            f"{len(surplus)} not used: {brief(surplus)}"
        )
    for name, tensor in reading.native.items():
        if tensor.shape != expected[name].shape:
            wanted = tuple(expected[name].shape)
            raise CheckpointError(f"the text tower's {name!r} has shape {tuple(tensor.shape)}, wanted {wanted}")
    tower.load_state_dict({name: tensor.contiguous() for name, tensor in reading.native.items()}, assign=True)
    return tower.eval(), family.cleaning(checkpoint)


_encoders: WeakKeyDictionary[Model, TextEncoder] = WeakKeyDictionary()


def text_of(model: Model | str | Path) -> TextEncoder:
    """The text tower beside an image tower: of the weights, or of those that a model was loaded from."""
    if isinstance(model, str | Path):
        return load_text(model)
    if model not in _encoders:
        if not model.meta.source:
            raise CheckpointError("this model was not loaded from weights, so it has no text tower")
        _encoders[model] = load_text(model.meta.source)
    return _encoders[model]


def embed_texts(model: Model | str | Path, texts: Sequence[str]) -> Tensor:
    """Embeddings (T, E) of unit length, by the text tower of the weights that `model` names or was loaded from."""
    return text_of(model).embed(list(texts) if not isinstance(texts, str) else texts)


def with_words(model: Model, labels: Iterable[str], template: str | None = None) -> Model:
    """The image tower with a head that answers in these words: an ordinary classifier, which needs no text tower."""
    return with_head(model, text_of(model), tuple(labels), template)


def with_head(model: Model, text: TextEncoder, labels: tuple[str, ...], template: str | None) -> Model:
    check_words(labels)
    config = model.config
    embeddings = text.embed_labels([spelled(label) for label in labels], templates_of(template))
    if not isinstance(config, ViTConfig) or config.feature_width != embeddings.shape[1]:
        raise ConfigError(
            f"the model's features have {config.feature_width} numbers, its texts {embeddings.shape[1]}; "
            f"load it without {argument('num_classes')} or {argument('head')}"
        )
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    state["head.weight"] = embeddings * text.scale
    state["head.bias"] = torch.full((len(labels),), text.bias or 0.0)
    new = empty(config.replace(num_classes=len(labels), unit_features=True))
    new.load_state_dict(state, assign=True)
    origin = f"{model.meta.origin}; head of {len(labels)} words" + (f" in {template!r}" if template else "")
    new.meta = model.meta.for_new_head(labels).replace(score_function=text.score_function, origin=origin)
    return new.eval()


def spelled(label: str) -> str:
    """A class's name as words: ImageNet's ids by their names, underscores as spaces."""
    return imagenet_classes().get(label, label).replace("_", " ")


def check_words(labels: Sequence[str]) -> None:
    if not labels or not all(label.strip() for label in labels):
        raise ConfigError(
            f"{argument('labels')} has no words" if not labels else f"{argument('labels')} has an empty word"
        )
    if len(labels) > MAX_WORDS:
        raise ConfigError(f"{argument('labels')} has {len(labels):,} words, more than {MAX_WORDS:,}")
    twice = [label for label, times in Counter(labels).items() if times > 1]
    if twice:
        raise ConfigError(f"{argument('labels')} has {twice[0]!r} twice")


def read_words(text: str) -> tuple[str, ...]:
    """Words from a file, one a line, or from the text itself, separated by commas."""
    path = Path(text).expanduser()
    listed = "," not in text and (path.suffix == ".txt" or path.is_file())
    parts = read_text(path, raises=ConfigError).splitlines() if listed else text.split(",")
    words = tuple(part.strip() for part in parts if part.strip())
    check_words(words)
    return words


@cache
def published_templates() -> dict[str, list[str]]:
    """Sets of prompts by name: CLIP's 80 for ImageNet, and the 7 of them that do nearly as well."""
    path = Path(__file__).parents[1] / "templates.json"
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def templates_of(template: str | None) -> list[str]:
    """A published set by its name, or one template with {} where the label stands; without, the label alone."""
    if template is None:
        return [AS_IT_IS]
    if "{}" in template:
        return [template]
    if template not in published_templates():
        raise UnknownNameError(
            "template", template, published_templates(), see="(or your own, with {} where the label stands)"
        )
    return published_templates()[template]

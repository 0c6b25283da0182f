"""Zero-shot classification: the text tower of CLIP or SigLIP, and heads made of its embeddings."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.catalog import imagenet_classes
from vitruvian.config import ScoreFunction, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, argument, parsing
from vitruvian.files import read_text
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import plain_state
from vitruvian.model.text_tower import TextTower
from vitruvian.weights.families.text_towers import read_text_tower
from vitruvian.weights.load import assemble, is_inside, locate
from vitruvian.weights.tokenizer import Tokenizer

# T texts, L labels, E width of the embeddings that both towers share

TEXT_BATCH_SIZE = 64
MAX_LABELS = 100_000  # for one head


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextEncoder:
    """A text tower with its tokenizer, and the logits' scale and bias."""

    tower: TextTower
    tokenizer: Tokenizer
    scale: float  # logits are scale * cosine similarity + bias
    bias: float | None  # None for CLIP; a number for SigLIP, whose probabilities are sigmoids

    @property
    def score_function(self) -> ScoreFunction:
        return "softmax" if self.bias is None else "sigmoid"

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Normalized embeddings (T, E)."""
        if isinstance(texts, str):
            raise ConfigError("expected a list of texts, got a string", hint="embed_texts(model, ['a cat'])")
        if not texts:
            return torch.zeros(0, self.tower.config.embedding_width or self.tower.config.width)
        parts = []
        with torch.inference_mode():
            for start in range(0, len(texts), TEXT_BATCH_SIZE):
                batch = self.tokenizer(texts[start : start + TEXT_BATCH_SIZE])
                parts.append(F.normalize(self.tower(*batch), dim=-1))
        return torch.cat(parts).clone()


def load_text(source: str | Path) -> TextEncoder:
    """Load the text tower of a CLIP or SigLIP folder or published name; raises CheckpointError if it has none."""
    path = locate(source)
    try:
        with parsing(path, CheckpointError):
            text = read_text_tower(path)
            if text is None:
                raise CheckpointError("has no text tower", hint="use a CLIP or SigLIP with both towers")
            tokenizer = Tokenizer(text.folder, text.tower.config, **text.cleaning)
            scale = float(torch.tensor(text.scale).exp())
            return TextEncoder(tower=text.tower, tokenizer=tokenizer, scale=scale, bias=text.bias)
    except (CheckpointError, ConfigError) as error:
        raise error.replace(CheckpointError, where=None if is_inside(path, error.where) else path) from error


_encoders: WeakKeyDictionary[Model, TextEncoder] = WeakKeyDictionary()


def text_encoder(model: Model | str | Path) -> TextEncoder:
    """The text encoder of weights, or of those that a model was loaded from."""
    if isinstance(model, str | Path):
        return load_text(model)
    if model not in _encoders:
        if not model.meta.source:
            raise CheckpointError("this model was not loaded from weights, so it has no text tower")
        _encoders[model] = load_text(model.meta.source)
    return _encoders[model]


def embed_texts(model: Model | str | Path, texts: Sequence[str]) -> Tensor:
    """Embed texts with the text tower of a CLIP or SigLIP.

    Args:
        model: Weights with both towers, or a model loaded from them.
        texts: A list of texts.

    Returns:
        Normalized embeddings (texts, width).
    """
    return text_encoder(model).embed(list(texts) if not isinstance(texts, str) else texts)


def with_words(model: Model, labels: Iterable[str], template: str | None = None) -> Model:
    """Give an image tower a zero-shot head for these labels: an ordinary classifier, which needs no text tower.

    Args:
        model: The image tower of a CLIP or SigLIP, loaded with `load`.
        labels: Class names.
        template: A prompt with {} for the label, or the name of a published set ("imagenet", "imagenet-7").

    Raises:
        CheckpointError: The weights have no text tower.
        ConfigError: The labels or the template are invalid, or the model has another head.
    """
    labels, text, config = tuple(labels), text_encoder(model), model.config
    check_labels(labels)
    # a prompt has a label as words: the names of ImageNet ids, spaces for underscores
    names = [imagenet_classes().get(label, label).replace("_", " ") for label in labels]
    templates = find_templates(template)
    prompts = [prompt.replace("{}", name) for name in names for prompt in templates]
    # one embedding per label (L, E): the mean over the templates, normalized again
    embeddings = F.normalize(text.embed(prompts).view(len(names), len(templates), -1).mean(dim=1), dim=-1)
    if not isinstance(config, ViTConfig) or config.feature_width != embeddings.shape[1]:
        reason = f"the model's features have width {config.feature_width}, its text embeddings {embeddings.shape[1]}"
        raise ConfigError(reason, hint=f"load it without {argument('num_classes')} or {argument('head')}")
    state = {name: tensor for name, tensor in plain_state(model).items() if not name.startswith("head.")}
    state["head.weight"] = embeddings * text.scale
    state["head.bias"] = torch.full((len(labels),), text.bias or 0.0)
    origin = f"{model.meta.origin}; zero-shot head of {len(labels)} labels" + (f" in {template!r}" if template else "")
    meta = model.meta.for_new_head(labels).replace(score_function=text.score_function, origin=origin)
    return assemble(empty(config.replace(num_classes=len(labels), unit_features=True)), state, meta)


def check_labels(labels: Sequence[str]) -> None:
    if not labels:
        raise ConfigError(f"{argument('labels')} is empty")
    if not all(label.strip() for label in labels):
        raise ConfigError(f"{argument('labels')} has an empty label")
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"{argument('labels')} has {len(labels):,} labels, more than {MAX_LABELS:,}")
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        raise ConfigError(f"{argument('labels')} has {repeated[0]!r} twice")


def parse_labels(text: str) -> tuple[str, ...]:
    """Labels from a text file, one per line, or from the text itself, separated by commas."""
    path = Path(text).expanduser()
    is_file = "," not in text and (path.suffix == ".txt" or path.is_file())
    parts = read_text(path, raises=ConfigError).splitlines() if is_file else text.split(",")
    labels = tuple(part.strip() for part in parts if part.strip())
    check_labels(labels)
    return labels


@cache
def published_templates() -> dict[str, list[str]]:
    """Sets of prompts by name: CLIP's 80 for ImageNet, and 7 of them that are nearly as good."""
    path = Path(__file__).parents[1] / "templates.json"
    templates: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return templates


def find_templates(template: str | None) -> list[str]:
    """A published set by name, one template with {} for the label, or by default the label itself."""
    if template is None:
        return ["{}"]
    if "{}" in template:
        return [template]
    if template not in published_templates():
        raise UnknownNameError("template", template, published_templates(), see="(or a prompt with {} for the label)")
    return published_templates()[template]

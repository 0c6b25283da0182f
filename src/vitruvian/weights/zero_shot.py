"""Zero-shot classification: tokenizers, the text tower of CLIP or SigLIP, and heads made of its embeddings."""

import html
import json
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.cache import cache_folder
from vitruvian.catalog import imagenet_classes
from vitruvian.config import ScoreFunction, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, FileError, UnknownNameError, argument, parsing, require
from vitruvian.files import file_stamp, read_object, read_text, short_hash, write_json
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import plain_state
from vitruvian.model.text_tower import TextConfig, TextTower
from vitruvian.settings import check_choice, validate
from vitruvian.text import describe_error, printable
from vitruvian.weights.families.text_towers import read_text_tower
from vitruvian.weights.load import assemble, is_inside, locate

# T texts, B texts of a batch, N tokens, L labels, E width of the embeddings that both towers share

TEXT_BATCH_SIZE = 64
MAX_LABELS = 100_000  # for one head
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""CLIP's words, each of which byte-pair encoding splits separately."""
CRASH_TEST = """
import sys
from contextlib import suppress
from tokenizers import Tokenizer
with suppress(ImportError):  # Windows
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.enable_truncation(16)
tokenizer.enable_padding(length=16)
texts = ["", "a", "A photo of a cat, 123.", "\u00fc\u00df \u65e5\u672c \U0001f600\u0301", "<|endoftext|> " * 40]
for text in texts:
    tokenizer.encode_batch([text])
"""
"""Reads a tokenizer and uses it on texts of several kinds, within 4 GiB."""
PUNCTUATION = str.maketrans("", "", string.punctuation)


def basic(text: str) -> str:
    """open_clip's basic cleaning: repair quotes, letters and encodings with ftfy, and replace HTML entities."""
    repaired = text if text.isascii() else require("ftfy", "text").fix_text(text)
    return html.unescape(html.unescape(repaired)).strip()


def single_spaces(text: str) -> str:
    return " ".join(text.split())


CLEANING: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "whitespace": lambda text: single_spaces(basic(text)),
    "lower": lambda text: single_spaces(basic(text)).lower(),
    "canonicalize": lambda text: single_spaces(basic(text).replace("_", " ").translate(PUNCTUATION).lower()),
    "siglip": lambda text: single_spaces(text.lower().translate(PUNCTUATION)),
}
"""open_clip's cleaning functions by its names; `siglip` is that of SigLIP's tokenizer in transformers."""

UNCLEANED_CLASSES = {"Siglip2Tokenizer": True, "GemmaTokenizer": False}
"""Tokenizers of transformers without cleaning, which pad on the left by default; and whether they lowercase."""


class Tokenizer:
    """The tokenizer of a folder, for a text tower.

    Args:
        folder: Contains some of TOKENIZER_FILES.
        tower: Settings of the text tower.
        clean: One of CLEANING.
        lowercase: Whether texts are converted to lower case, besides the cleaning.
        masks: Return a mask of the padding, unless the folder's settings say otherwise.
    """

    def __init__(
        self, folder: Path, tower: TextConfig, *, clean: str = "none", lowercase: bool = False, masks: bool = False
    ) -> None:
        files = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
        settings: dict[str, Any] = {}
        for file in files:
            settings |= read_object(file, raises=CheckpointError) if file.is_file() else {}
        kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if clean == "siglip" and kind in UNCLEANED_CLASSES:  # SigLIP 2 of one size is a SigLIP by its settings
            clean, lowercase = "none", UNCLEANED_CLASSES[kind]
        self.vocabulary = tower.vocabulary
        self.clean = CLEANING[clean]
        self.tokenizer = read_tokenizer(folder)
        names = settings.get("model_input_names") or ["attention_mask"] if settings else []
        self.masks = masks and "attention_mask" in validate("model_input_names", tuple[str, ...], names)
        # tokens that the settings name are special, so that they are never split or merged in a text
        tokens = {token_text(settings.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
        tokens -= {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        special = sorted(token for token in tokens if token and self.tokenizer.token_to_id(token) is not None)
        self.tokenizer.add_special_tokens(special)
        if lowercase:
            normalizers = require("tokenizers", "text").normalizers
            parts = [normalizers.Lowercase(), self.tokenizer.normalizer]
            self.tokenizer.normalizer = normalizers.Sequence([part for part in parts if part is not None])
        padding = self.tokenizer.padding or {}
        token = token_text(settings.get("pad_token")) or padding.get("pad_token") or ""
        pad_id = self.tokenizer.token_to_id(token)
        default_side = "left" if kind in UNCLEANED_CLASSES else padding.get("direction", "right")
        side = settings.get("padding_side") or default_side
        truncation_side = settings.get("truncation_side") or (self.tokenizer.truncation or {}).get("direction", "right")
        for name, value in (("padding_side", side), ("truncation_side", truncation_side)):
            check_choice(name, value, ("left", "right"))
        if token and pad_id is None:
            raise CheckpointError(f"the tokenizer's pad_token {token!r} is not in its vocabulary", where=folder)
        length = None if tower.causal else tower.context_length  # causal towers: the longest text of the batch
        self.tokenizer.enable_padding(direction=side, pad_id=pad_id or 0, pad_token=token, length=length)
        self.tokenizer.enable_truncation(tower.context_length, direction=truncation_side)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Token ids (B, N), and a mask of the tokens that are not padding (B, N) if the tower needs one."""
        for text in texts:
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConfigError(f"the text {printable(text)[:60]!r} is not Unicode")
        try:
            encodings = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, which is not an Exception
                raise
            raise CheckpointError(f"the tokenizer cannot encode these texts: {describe_error(error)}") from error
        tokens = torch.tensor([encoding.ids for encoding in encodings])
        highest = int(tokens.max())
        if highest >= self.vocabulary:
            reason = f"the tokenizer returned token {highest}, but the text tower has {self.vocabulary} tokens; the"
            raise CheckpointError(f"{reason} tokenizer belongs to another model")
        return tokens, torch.tensor([encoding.attention_mask for encoding in encodings]) if self.masks else None


def read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a folder: its `tokenizer.json`, CLIP's vocabulary and merges, or BERT's word pieces."""
    library = require("tokenizers", "text")
    try:
        if (folder / "tokenizer.json").is_file():
            check_tokenizer(folder / "tokenizer.json")
            return library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            vocabulary = read_object(folder / "vocab.json", raises=CheckpointError)
            lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
            merges = [line for line in lines if line and not line.startswith("#version")]
            return clip_tokenizer(vocabulary, merges)
        if (folder / "vocab.txt").is_file():  # BERT's, one word piece per line
            return bert_tokenizer((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    except CheckpointError:
        raise
    except Exception as error:  # the library raises Exception itself
        reason = f"the tokenizer cannot be read: {single_spaces(str(error))[:200]}"
        raise CheckpointError(reason, where=folder) from error
    reason = "no tokenizer: texts need tokenizer.json, vocab.json with merges.txt, or vocab.txt (BERT)"
    raise CheckpointError(reason, where=folder)


def check_tokenizer(path: Path) -> None:
    """Raise CheckpointError if the library cannot read or use this file.

    Some files make it panic or abort the process, so each file is tried once, in a separate process.
    """
    read_object(path, raises=CheckpointError)
    file = cache_folder() / "tokenizers" / f"{short_hash([str(path.resolve()), file_stamp(path)])}.tried.json"
    if file.is_file():
        return
    command = [sys.executable, "-c", CRASH_TEST, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError("the tokenizer takes too long to read", where=path) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("note: ")]
        reason = lines[-1] if lines and done.returncode > 0 else f"the library ended with code {done.returncode}"
        raise CheckpointError(f"the tokenizer cannot be read: {printable(reason)[:200]}", where=path)
    with suppress(FileError):
        write_json(file, {})


def bert_tokenizer(pieces: list[str]) -> Any:
    """BERT's word pieces in lower case after `[CLS]`, as in LiT: no separator at the end."""
    library = require("tokenizers", "text")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if not {"[CLS]", "[UNK]"} <= vocabulary.keys():
        raise CheckpointError("vocab.txt lacks [CLS] or [UNK]")
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    first = [("[CLS]", vocabulary["[CLS]"])]
    tokenizer.post_processor = library.processors.TemplateProcessing(single="[CLS] $0", special_tokens=first)
    return tokenizer


def clip_tokenizer(vocabulary: dict[str, int], merges: list[str]) -> Any:
    """Byte-pair encoding of words in lower case, between a start and an end token."""
    library = require("tokenizers", "text")
    start, end = marks = "<|startoftext|>", "<|endoftext|>"
    if start not in vocabulary or end not in vocabulary:
        raise CheckpointError(f"the vocabulary lacks {start} or {end}")
    pairs = [tuple(merge.split()) for merge in merges]
    bpe = library.models.BPE(vocabulary, pairs, end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token=end)
    tokenizer = library.Tokenizer(bpe)
    tokenizer.add_special_tokens(list(marks))
    normalizers, splits = library.normalizers, library.pre_tokenizers
    whitespace = normalizers.Replace(library.Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), whitespace, normalizers.Lowercase()])
    words = library.Regex("|".join([*map(re.escape, marks), WORDS]))
    bytewise = splits.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = splits.Sequence([splits.Split(words, "removed", invert=True), bytewise])
    ends = (end, vocabulary[end]), (start, vocabulary[start])
    tokenizer.post_processor = library.processors.RobertaProcessing(*ends, False, False)
    return tokenizer


def token_text(token: Any) -> str:
    """The text of a token in tokenizer_config.json, which may be inside an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


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

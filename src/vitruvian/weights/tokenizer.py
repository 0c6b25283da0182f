"""Tokenizers of text towers: cleaning, vocabulary, truncation and padding as in training."""

from __future__ import annotations

import gzip
import html
import importlib
import importlib.util
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.errors import CheckpointError, ConfigError, require
from vitruvian.files import read_object
from vitruvian.settings import check_choice, validate
from vitruvian.text import printable

# B texts, N tokens

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "bpe_simple_vocab_16e6.txt.gz",
)
"""Files of a tokenizer that a folder may contain."""
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""CLIP's words, each of which byte-pair encoding splits separately."""
OPENAI_MERGES = 49_152 - 256 - 2
"""Lines that CLIP uses of its vocabulary file."""
MAX_VOCABULARY_BYTES = 2**24
STRAIGHT_QUOTES = {ord(curly): straight for curlies, straight in (("‘’‛", "'"), ("“”‟", '"')) for curly in curlies}
LIGATURES = "ĲĳŉǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬆ"
WIDE = [chr(code) for code in (0x3000, *range(0xFF01, 0xFFF0))]
PLAIN_LETTERS = {ord(letter): unicodedata.normalize("NFKC", letter) for letter in (*LIGATURES, *WIDE)}
PUNCTUATION = str.maketrans("", "", string.punctuation)


def basic(text: str) -> str:
    """open_clip's basic cleaning: repair Unicode and replace HTML entities."""
    return html.unescape(html.unescape(repair_unicode(text))).strip()


def repair_unicode(text: str) -> str:
    """Straight quotes and composed letters of one width; with ftfy installed, also text in a wrong encoding."""
    if text.isascii():
        return text
    if importlib.util.find_spec("ftfy") is not None:
        repaired: str = importlib.import_module("ftfy").fix_text(text)
        return repaired
    return unicodedata.normalize("NFC", text.translate(STRAIGHT_QUOTES | PLAIN_LETTERS))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRules:
    """A text tower's requirements for its tokenizer, besides the vocabulary."""

    context_length: int
    vocabulary: int
    full: bool
    """Pad every text to the context length, instead of to the longest of the batch."""
    clean: str = "none"
    """One of CLEANING."""
    lowercase: bool = False
    masks: bool = False
    """Return a mask of the padding, unless the folder's settings say otherwise."""


class Tokenizer:
    """The tokenizer of a folder, with the rules of its text tower."""

    def __init__(self, folder: Path, rules: TokenizerRules) -> None:
        settings = optional_object(folder / "special_tokens_map.json") | optional_object(
            folder / "tokenizer_config.json"
        )
        kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if rules.clean == "siglip" and kind in UNCLEANED_CLASSES:  # SigLIP 2 of one size is a SigLIP by its settings
            rules = replace(rules, clean="none", lowercase=UNCLEANED_CLASSES[kind])
        self.rules = rules
        self.clean = CLEANING[rules.clean]
        self.tokenizer = read_tokenizer(folder, lowercase=rules.clean != "whitespace")
        names = settings.get("model_input_names") or ["attention_mask"] if settings else []
        self.masks = rules.masks and "attention_mask" in validate("model_input_names", tuple[str, ...], names)
        add_special_tokens(self.tokenizer, settings)
        if rules.lowercase:
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
        if token and pad_id is None and not is_openai(folder):
            raise CheckpointError(f"the tokenizer's pad_token {token!r} is not in its vocabulary", where=folder)
        self.tokenizer.enable_padding(
            direction=side,
            pad_id=pad_id or 0,
            pad_token=token,
            length=rules.context_length if rules.full else None,
        )
        self.tokenizer.enable_truncation(rules.context_length, direction=truncation_side)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Token ids (B, N), and a mask of the tokens that are not padding (B, N) if the tower needs one."""
        for text in texts:
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConfigError(f"the text {printable(text)[:60]!r} is not Unicode")
        encodings = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        tokens = torch.tensor([encoding.ids for encoding in encodings])
        highest = int(tokens.max())
        if highest >= self.rules.vocabulary:
            raise CheckpointError(
                f"the tokenizer returned token {highest}, but the text tower has {self.rules.vocabulary} tokens; the "
                "tokenizer belongs to another model"
            )
        return tokens, torch.tensor([encoding.attention_mask for encoding in encodings]) if self.masks else None


def add_special_tokens(tokenizer: Any, settings: dict[str, Any]) -> None:
    """Make the tokens that the settings name special, so that they are never split or merged in a text."""
    tokens = {token_text(settings.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(
        sorted(token for token in tokens - known if token and tokenizer.token_to_id(token) is not None)
    )


def is_openai(folder: Path) -> bool:
    """Whether the vocabulary is CLIP's original file, whose special tokens have other names."""
    return not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def read_tokenizer(folder: Path, *, lowercase: bool = True) -> Any:
    """Read the tokenizer of a folder: its `tokenizer.json`, or CLIP's with its vocabulary and merges.

    `lowercase` applies to CLIP's original vocabulary file, where open_clip may leave it to the cleaning of the text.
    """
    library = require("tokenizers", "text")
    try:
        if (folder / "tokenizer.json").is_file():
            return library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            vocabulary = read_object(folder / "vocab.json", raises=CheckpointError)
            lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
            merges = [line for line in lines if line and not line.startswith("#version")]
            return clip_tokenizer(vocabulary, merges, ("<|startoftext|>", "<|endoftext|>"))
        if (folder / TOKENIZER_FILES[-1]).is_file():
            return openai_tokenizer(folder / TOKENIZER_FILES[-1], lowercase=lowercase)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(
            f"the tokenizer cannot be read: {single_spaces(str(error))[:200]}", where=folder
        ) from error
    raise CheckpointError(
        f"no tokenizer: texts need tokenizer.json, vocab.json with merges.txt, or {TOKENIZER_FILES[-1]}", where=folder
    )


def openai_tokenizer(path: Path, *, lowercase: bool = True) -> Any:
    """Read CLIP's original vocabulary file: one merge per line, each of which makes a token."""
    with gzip.open(path) as file:
        lines = file.read(MAX_VOCABULARY_BYTES).decode().split("\n")[1 : OPENAI_MERGES + 1]
    merges = [line for line in lines if line]
    letters = byte_letters()
    marks = ("<start_of_text>", "<end_of_text>")
    tokens = [*letters, *(f"{x}</w>" for x in letters), *(merge.replace(" ", "") for merge in merges), *marks]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return clip_tokenizer(vocabulary, merges, marks, lowercase=lowercase)


def clip_tokenizer(
    vocabulary: dict[str, int], merges: list[str], marks: tuple[str, str], *, lowercase: bool = True
) -> Any:
    """Byte-pair encoding of words, by default in lower case, between a start and an end token."""
    library = require("tokenizers", "text")
    start, end = marks
    if start not in vocabulary or end not in vocabulary:
        raise CheckpointError(f"the vocabulary lacks {start} or {end}")
    pairs = [tuple(merge.split()) for merge in merges]
    bpe = library.models.BPE(vocabulary, pairs, end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token=end)
    tokenizer = library.Tokenizer(bpe)
    tokenizer.add_special_tokens(list(marks))
    normalizers, splits = library.normalizers, library.pre_tokenizers
    whitespace = normalizers.Replace(library.Regex(r"\s+"), " ")
    letters = [normalizers.Lowercase()] if lowercase else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), whitespace, *letters])
    words = library.Regex("|".join([*map(re.escape, marks), WORDS if lowercase else f"(?i:{WORDS})"]))
    bytewise = splits.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = splits.Sequence([splits.Split(words, "removed", invert=True), bytewise])
    tokenizer.post_processor = library.processors.RobertaProcessing(
        (end, vocabulary[end]), (start, vocabulary[start]), False, False
    )
    return tokenizer


def byte_letters() -> list[str]:
    """A visible character for each byte, in the order of CLIP's vocabulary."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = range(256, 512 - len(visible))
    return [chr(code) for code in (*visible, *hidden)]


def optional_object(path: Path) -> dict[str, Any]:
    return read_object(path, raises=CheckpointError) if path.is_file() else {}


def token_text(token: Any) -> str:
    """The text of a token in tokenizer_config.json, which may be inside an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")

"""Texts to token numbers as a text tower was trained with them: cleaning, vocabulary, truncation and padding."""

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
"""What a folder may have for its tokenizer."""
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""CLIP's pieces of a text, each of which byte-pair encoding splits by itself."""
OPENAI_MERGES = 49_152 - 256 - 2
"""That CLIP uses of the lines in its own vocabulary file."""
MAX_VOCABULARY_BYTES = 2**24
STRAIGHT_QUOTES = {ord(curly): straight for curlies, straight in (("‘’‛", "'"), ("“”‟", '"')) for curly in curlies}
LIGATURES = "ĲĳŉǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬆ"
WIDE = [chr(code) for code in (0x3000, *range(0xFF01, 0xFFF0))]
PLAIN_LETTERS = {ord(letter): unicodedata.normalize("NFKC", letter) for letter in (*LIGATURES, *WIDE)}
PUNCTUATION = str.maketrans("", "", string.punctuation)


def basic(text: str) -> str:
    """Repaired Unicode and no HTML entities, as open_clip cleans every text."""
    return html.unescape(html.unescape(repaired(text))).strip()


def repaired(text: str) -> str:
    """Straight quotes, composed letters of one width; where ftfy is installed also what a wrong encoding broke."""
    if text.isascii():
        return text
    if importlib.util.find_spec("ftfy") is not None:
        found: str = importlib.import_module("ftfy").fix_text(text)
        return found
    return unicodedata.normalize("NFC", text.translate(STRAIGHT_QUOTES | PLAIN_LETTERS))


def spaced(text: str) -> str:
    return " ".join(text.split())


CLEANING: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "whitespace": lambda text: spaced(basic(text)),
    "lower": lambda text: spaced(basic(text)).lower(),
    "canonicalize": lambda text: spaced(basic(text).replace("_", " ").translate(PUNCTUATION).lower()),
    "siglip": lambda text: spaced(text.lower().translate(PUNCTUATION)),
}
"""open_clip's ways by its own names; `siglip` is that of SigLIP's tokenizer in transformers."""


OTHER_CLASSES = {"Siglip2Tokenizer": True, "GemmaTokenizer": False}
"""Tokenizers of transformers that clean nothing and pad on the left unless told; whether they lowercase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRules:
    """What a text tower asks of its tokenizer beside the vocabulary."""

    context_length: int
    vocabulary: int
    full: bool
    """Every text is padded to the context length; else to the longest of the batch."""
    clean: str = "none"
    """One of CLEANING."""
    lowercase: bool = False
    masks: bool = False
    """No token attends to padding, where the folder's own settings do not say otherwise."""


class Tokenizer:
    """A folder's tokenizer with the rules of its text tower."""

    def __init__(self, folder: Path, rules: TokenizerRules) -> None:
        settings = optional_object(folder / "special_tokens_map.json") | optional_object(
            folder / "tokenizer_config.json"
        )
        kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if rules.clean == "siglip" and kind in OTHER_CLASSES:  # SigLIP 2 of one size calls itself SigLIP
            rules = replace(rules, clean="none", lowercase=OTHER_CLASSES[kind])
        self.rules = rules
        self.clean = CLEANING[rules.clean]
        self.tokenizer = read_tokenizer(folder, lowercase=rules.clean != "whitespace")
        names = settings.get("model_input_names") or ["attention_mask"] if settings else []
        self.masks = rules.masks and "attention_mask" in validate("model_input_names", tuple[str, ...], names)
        add_marks(self.tokenizer, settings)
        if rules.lowercase:
            normalizers = require("tokenizers", "text").normalizers
            parts = [normalizers.Lowercase(), self.tokenizer.normalizer]
            self.tokenizer.normalizer = normalizers.Sequence([part for part in parts if part is not None])
        padding = self.tokenizer.padding or {}
        token = text_of(settings.get("pad_token")) or padding.get("pad_token") or ""
        number = self.tokenizer.token_to_id(token)
        usual = "left" if kind in OTHER_CLASSES else padding.get("direction", "right")
        side = settings.get("padding_side") or usual
        cut = settings.get("truncation_side") or (self.tokenizer.truncation or {}).get("direction", "right")
        for name, value in (("padding_side", side), ("truncation_side", cut)):
            check_choice(name, value, ("left", "right"))
        if token and number is None and not is_openais(folder):
            raise CheckpointError(
                f"pad_token {token!r} of the tokenizer's settings is not one of its tokens", where=folder
            )
        self.tokenizer.enable_padding(
            direction=side,
            pad_id=0 if number is None else number,
            pad_token=token,
            length=rules.context_length if rules.full else None,
        )
        self.tokenizer.enable_truncation(rules.context_length, direction=cut)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Token numbers (B, N), and where the tower wants it, which of them are not padding (B, N)."""
        for text in texts:
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConfigError(f"the text {printable(text)[:60]!r} is not Unicode")
        found = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        tokens = torch.tensor([text.ids for text in found])
        highest = int(tokens.max())
        if highest >= self.rules.vocabulary:
            raise CheckpointError(
                f"the tokenizer gives token {highest}, the text tower knows {self.rules.vocabulary}; "
                "the tokenizer's files are those of another model"
            )
        return tokens, torch.tensor([text.attention_mask for text in found]) if self.masks else None


def add_marks(tokenizer: Any, settings: dict[str, Any]) -> None:
    """Words of the vocabulary that the settings make marks, and so stand for themselves anywhere in a text."""
    marks = {text_of(settings.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(
        sorted(mark for mark in marks - there if mark and tokenizer.token_to_id(mark) is not None)
    )


def is_openais(folder: Path) -> bool:
    """Whether the tokens are those of CLIP's own vocabulary file, whose marks have other names."""
    return not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def read_tokenizer(folder: Path, *, lowercase: bool = True) -> Any:
    """The tokenizer of a folder: its own description, or CLIP's with its vocabulary and merges.

    `lowercase` is for CLIP's own vocabulary file, where open_clip leaves letters to the cleaning of the text.
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
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"its tokenizer cannot be read: {spaced(str(error))[:200]}", where=folder) from error
    raise CheckpointError(
        "texts need the model's tokenizer beside its weights: tokenizer.json, "
        f"vocab.json with merges.txt, or {TOKENIZER_FILES[-1]}",
        where=folder,
    )


def openai_tokenizer(path: Path, *, lowercase: bool = True) -> Any:
    """CLIP's own vocabulary file: a line for each merge, which makes its token."""
    with gzip.open(path) as file:
        lines = file.read(MAX_VOCABULARY_BYTES).decode().split("\n")[1 : OPENAI_MERGES + 1]
    merges = [line for line in lines if line]
    letters = byte_letters()
    marks = ("<start_of_text>", "<end_of_text>")
    tokens = [*letters, *(f"{x}</w>" for x in letters), *(merge.replace(" ", "") for merge in merges), *marks]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return clip_tokenizer(vocabulary, merges, marks, lowercase=lowercase)


def clip_tokenizer(
    vocabulary: dict[str, int], merges: list[str], marks: tuple[str, str], *, lowercase: bool = True
) -> Any:
    """Byte-pair encoding of words, usually in lower case, between the two marks."""
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
    """A visible letter for each byte, in the order of CLIP's vocabulary."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [256 + place for place in range(256 - len(visible))]
    return [chr(code) for code in (*visible, *hidden)]


def optional_object(path: Path) -> dict[str, Any]:
    return read_object(path, raises=CheckpointError) if path.is_file() else {}


def text_of(token: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")

"""Weights from one family to another, with a certificate that both give the same answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.errors import ConversionError, argument
from vitruvian.files import atomic_path, json_bytes, write_json
from vitruvian.model.build import Model
from vitruvian.settings import Seed, Size, validate
from vitruvian.text import plural
from vitruvian.weights.adapt import Changes
from vitruvian.weights.families.registry import check_writer, writer
from vitruvian.weights.families.text_towers import TextWeights, text_obstacles, tokenizer_files
from vitruvian.weights.load import check_finite, load, locate, open_model, published_name, with_config
from vitruvian.weights.parse import LoadHints
from vitruvian.weights.save import check_destination, write
from vitruvian.weights.store import digests

TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
"""Largest difference allowed, times the largest answer where that is above 1: float32 sums in another order, and
weights rounded to the 11 bits of float16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Proof that converted weights, read back from the disk, answer like their source."""

    source: str
    source_family: str
    destination: str
    destination_family: str
    largest_difference: float
    """Between source and re-read destination, over the whole batch."""
    largest_answer: float
    """Largest absolute value among the source's answers."""
    compared: Literal["logits", "features"]
    """Features where there is no head, or a head of zeros that would hide every difference."""
    readers_difference: float
    """The same for a reader that runs the destination with its family's own numerics."""
    texts_difference: float | None
    """Between embeddings of random tokens by both text towers; None where no text tower was written."""
    notes: tuple[str, ...]
    """What such a reader does differently, in words."""
    batch_shape: tuple[int, ...]
    seed: int
    source_sha256: dict[str, str]
    destination_sha256: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """What `certificate.json` holds."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.source_family} -> {self.destination_family}: largest difference {self.largest_difference:.2g} "
            f"among {self.compared} up to {self.largest_answer:.3g} (batch {'x'.join(map(str, self.batch_shape))}, "
            f"seed {self.seed})",
        ]
        if self.texts_difference is not None:
            lines.append(
                f"text tower: largest difference {self.texts_difference:.2g} among embeddings of random tokens"
            )
        if self.readers_difference > max(self.largest_difference, TOLERANCE * max(1.0, self.largest_answer)):
            reader = f"a {self.destination_family} reader with its own numerics"
            lines.append(f"{reader} differs by up to {self.readers_difference:.2g}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def check_other(destination: Path, source: Path) -> None:
    """Refuse to write over the weights that are read."""
    if destination.exists() and destination.samefile(source):
        raise ConversionError(f"{destination}: is the source itself, choose another destination")


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str = "native",
    labels: Sequence[str] | None = None,
    template: str | None = None,
    num_heads: int | None = None,
    image_size: int | Size | None = None,
    num_classes: int | None = None,
    patch_size: int | None = None,
    grid: Size | None = None,
    family: str | None = None,
    half: bool = False,
    config: str | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """Write `source` as another family and prove it: re-read, compared on a random batch, certified.

    The options are those of `load`, and `half` of `save`. The certificate is also written: as `certificate.json` into a
    folder, or beside a file as `FILE.certificate.json`. When the re-read weights differ, nothing is
    left behind, and what was at `destination` stays. `progress` is told each step.
    """
    check_writer(to)
    validate("seed", Seed, seed)
    tell = progress or (lambda step: None)
    target, path = Path(destination).expanduser(), locate(source)
    check_other(target, path)
    tell(f"reading {path}")
    changes = Changes(image_size=image_size, patch_size=patch_size, num_classes=num_classes)
    name = published_name(source)
    hints = LoadHints(num_heads=num_heads, grid=grid, image_size=changes.size, family=family, config=config, name=name)
    model, source_family = open_model(path, hints, changes)
    if labels is not None:
        from vitruvian.weights.words import with_words

        tell(f"embedding {plural(len(labels), 'word')}")
        model = with_words(model, labels, template)
    elif template is not None:
        raise ConversionError(f"{argument('template')} is for {argument('labels')}, which are missing")
    check_finite(model, path, raises=ConversionError)
    source_sha256 = digests(path)
    with atomic_path(check_destination(target, to)) as new:
        tell(f"writing {to} weights")
        text, left_out = text_to_write(model, new, to)
        notes = [*write(model, new, to, half=half, text=text), *left_out]
        tell("comparing source and result")
        certificate = Certificate(
            source=str(source),
            source_family=source_family,
            destination=str(target),
            destination_family=to,
            **compare(model, load(new), family=to, path=new, seed=seed),
            texts_difference=None if text is None else compare_texts(text, new, seed=seed),
            notes=(*notes, *(["matrices were rounded to float16"] if half else [])),
            seed=seed,
            source_sha256=source_sha256,
            destination_sha256=digests(new),
        )
        check(certificate, HALF_TOLERANCE if half else TOLERANCE)
        as_folder = new.is_dir()
        if as_folder:
            (new / "certificate.json").write_bytes(json_bytes(certificate.to_json()))
    if not as_folder:
        write_json(target.with_name(f"{target.name}.certificate.json"), certificate.to_json())
    return certificate


def compare(model: Model, reread: Model, *, family: str, path: Path, seed: int) -> dict[str, Any]:
    """The certificate's numbers: both models, and the family's own numerics, on one random batch."""
    shape = (2, model.config.in_channels, *model.config.image_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    blank = model.head is None or not model.head.weight.any()
    training = model.training
    with torch.no_grad():
        wanted = answers(model.eval(), pixels, blank=blank)
        found = answers(reread, pixels, blank=blank)
        own_config = reread.config
        if family != "native":
            own_config = writer(family, reread, path).reader_config(own_config)
        own = found if own_config == reread.config else answers(with_config(reread, own_config), pixels, blank=blank)
    model.train(training)
    return {
        "largest_difference": float((wanted - found).abs().max()),
        "largest_answer": float(wanted.abs().max()),
        "readers_difference": float((wanted - own).abs().max()),
        "compared": "features" if blank else "logits",
        "batch_shape": shape,
    }


def text_to_write(model: Model, path: Path, family: str) -> tuple[TextWeights | None, list[str]]:
    """The text tower beside the source's image tower; or, where it cannot be written, a note that says why."""
    if family != "huggingface" or model.head is not None or not model.meta.source:
        return None, []
    from vitruvian.weights.words import read_text_tower

    text = read_text_tower(Path(model.meta.source))
    if text is None:
        return None, []
    reasons = list(text_obstacles(writer(family, model, path), model.config, text.tower.config))
    if reasons:
        return None, [f"the text tower was left out: {'; '.join(reasons)}"]
    note = "the source has no files of a tokenizer, which other readers need for texts"
    return text, [] if tokenizer_files(text) else [note]


def compare_texts(text: TextWeights, path: Path, *, seed: int) -> float:
    """The largest difference of embeddings of unit length, of random tokens by the tower and the one read back."""
    from vitruvian.weights.words import read_text_tower

    again = read_text_tower(path)
    config = text.tower.config
    if again is None or (again.scale, again.bias) != (text.scale, text.bias):
        return float("inf")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (2, config.context_length), generator=generator)
    tokens[:, -1] = min(config.eos, config.vocabulary - 1)
    with torch.no_grad():
        pair = [F.normalize(tower(tokens), dim=-1) for tower in (text.tower, again.tower)]
    return float((pair[0] - pair[1]).abs().max())


def answers(model: Model, pixels: Tensor, *, blank: bool) -> Tensor:
    return model.features(pixels) if blank else model(pixels)


def check(certificate: Certificate, tolerance: float) -> None:
    allowed = tolerance * max(1.0, certificate.largest_answer)
    if certificate.texts_difference is not None and not certificate.texts_difference <= tolerance:
        raise ConversionError(
            f"{certificate.destination}: not written, the re-read text tower differs by "
            f"{certificate.texts_difference:.2g} where {tolerance:.2g} is allowed; please report this"
        )
    if not certificate.largest_difference <= allowed:  # also refuses NaN
        raise ConversionError(
            f"{certificate.destination}: not written, the re-read {certificate.destination_family} weights differ by "
            f"{certificate.largest_difference:.2g} where {allowed:.2g} is allowed; please report this"
        )

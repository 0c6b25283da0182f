"""Weights from one family to another, with a certificate that both give the same answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvian.errors import ConversionError
from vitruvian.files import json_bytes, staged, write_json
from vitruvian.model.build import Model
from vitruvian.settings import Seed, Size, typed
from vitruvian.text import counted
from vitruvian.weights.adapt import Changes
from vitruvian.weights.families.registry import check_writer, writer
from vitruvian.weights.load import check_finite, load, locate, open_model, published_name, with_config
from vitruvian.weights.parse import LoadHints
from vitruvian.weights.save import check_destination, digests, write

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
        if self.readers_difference > max(self.largest_difference, TOLERANCE * max(1.0, self.largest_answer)):
            reader = f"a {self.destination_family} reader with its own numerics"
            lines.append(f"{reader} differs by up to {self.readers_difference:.2g}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str = "native",
    labels: Sequence[str] | None = None,
    template: str | None = None,
    heads: int | None = None,
    image_size: int | Size | None = None,
    classes: int | None = None,
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
    typed("seed", Seed, seed)
    tell = progress or (lambda step: None)
    target, path = Path(destination).expanduser(), locate(source)
    if target.exists() and target.samefile(path):
        raise ConversionError(f"{target}: is the source itself, choose another destination")
    tell(f"reading {path}")
    changes = Changes(image_size=image_size, patch_size=patch_size, classes=classes)
    name = published_name(source)
    hints = LoadHints(heads=heads, grid=grid, image_size=changes.size, family=family, config=config, name=name)
    model, source_family = open_model(path, hints, changes)
    if labels is not None:
        from vitruvian.weights.words import with_words

        tell(f"embedding {counted(len(labels), 'word')}")
        model = with_words(model, labels, template)
    elif template is not None:
        raise ConversionError("template= is for labels=, which are missing")
    check_finite(model, path, raises=ConversionError)
    source_sha256 = digests(path)
    with staged(check_destination(target, to, model.config)) as new:
        tell(f"writing {to} weights")
        notes = write(model, new, to, half=half)
        tell("comparing source and result")
        certificate = Certificate(
            source=str(source),
            source_family=source_family,
            destination=str(target),
            destination_family=to,
            **compare(model, load(new), family=to, seed=seed),
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


def compare(model: Model, reread: Model, *, family: str, seed: int) -> dict[str, Any]:
    """The certificate's numbers: both models, and the family's own numerics, on one random batch."""
    shape = (2, model.config.channels, *model.config.image_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    blank = model.head is None or not model.head.weight.any()
    training = model.training
    with torch.no_grad():
        wanted = answers(model.eval(), pixels, blank=blank)
        found = answers(reread, pixels, blank=blank)
        own_config = (
            reread.config if family == "native" else writer(family, reread.config).family_numerics(reread.config)
        )
        own = found if own_config == reread.config else answers(with_config(reread, own_config), pixels, blank=blank)
    model.train(training)
    return {
        "largest_difference": float((wanted - found).abs().max()),
        "largest_answer": float(wanted.abs().max()),
        "readers_difference": float((wanted - own).abs().max()),
        "compared": "features" if blank else "logits",
        "batch_shape": shape,
    }


def answers(model: Model, pixels: Tensor, *, blank: bool) -> Tensor:
    return model.features(pixels) if blank else model(pixels)


def check(certificate: Certificate, tolerance: float) -> None:
    allowed = tolerance * max(1.0, certificate.largest_answer)
    if not certificate.largest_difference <= allowed:  # also refuses NaN
        raise ConversionError(
            f"{certificate.destination}: not written, the re-read {certificate.destination_family} weights differ by "
            f"{certificate.largest_difference:.2g} where {allowed:.2g} is allowed; please report this"
        )

"""What the doctor says: findings with their examples, the whole diagnosis, and its lines for a terminal."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vitruvian.data.doctor.scan import Places, Scan
from vitruvian.text import plural, printable

Level = Literal["hurts", "look", "fine"]
"""Training would suffer; worth a look; nothing to do."""

EXACT = "exact copy"
NEAR = "nearly the same"

EXAMPLES = 12
"""Examples of each finding that are shown; the count tells of all."""
REVIEWED = 200
"""Examples kept of findings about labels, which `--review` shows one by one."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where an image is found again."""

    split: str
    index: int
    key: str
    label: str


@dataclass(frozen=True, slots=True)
class Example:
    """Images that show a finding, and what to see there."""

    note: str
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Its short name, such as `leak`; the same in every report."""
    level: Level
    text: str
    """One sentence with the numbers."""
    count: int = 0
    advice: str = ""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings about one dataset."""

    data: str
    splits: dict[str, int]
    """Images in each split, readable or not."""
    classes: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether training can do its best with these images."""
        return not self.at("hurts")

    def at(self, level: Level) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == level)

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as one JSON object; `docs/doctor.md` explains its fields."""
        return {**dataclasses.asdict(self), "healthy": self.healthy, "images": sum(self.splits.values())}


def image(scan: Scan, place: int) -> ImageRef:
    split, source, index = scan.source(place)
    return ImageRef(split, index, source.key(index), source.classes[int(scan.records["label"][place])])


def about(scan: Scan, places: Places, check: str, level: Level, text: str, advice: str) -> Finding:
    """A finding about images; the first few are its examples, each with its size or why it cannot be read."""
    found = []
    for place in places[:EXAMPLES].tolist():
        record = scan.records[place]
        size = f"{record['columns']}x{record['rows']} pixels"
        found.append(Example(scan.reasons.get(place, size), (image(scan, place),)))
    return Finding(check, level, text, len(places), advice, tuple(found))


HEADINGS: dict[Level, str] = {"hurts": "WILL HURT TRAINING", "look": "WORTH A LOOK", "fine": "FINE"}
MARKS: dict[Level, str] = {"hurts": "✗", "look": "!", "fine": "✓"}
SHOWN = 4
"""Examples of a finding in the terminal; the page and the JSON object have more."""
WIDTH = 110


def report(diagnosis: Diagnosis) -> Iterator[tuple[Level | None, str]]:
    """The lines of the report, each with the level of what it tells, for its color."""
    yield None, heading(diagnosis)
    for level, title in HEADINGS.items():
        findings = diagnosis.at(level)
        if findings:
            yield None, ""
            yield level, title
            for finding in findings:
                yield from finding_lines(finding)
    yield None, ""
    yield None, verdict(diagnosis)


def heading(diagnosis: Diagnosis) -> str:
    splits = ", ".join(f"{name} {size:,}" for name, size in diagnosis.splits.items())
    images = plural(sum(diagnosis.splits.values()), "image")
    return printable(
        f"{diagnosis.data}: {images} ({splits}), {plural(diagnosis.classes, 'class')}, "
        f"{diagnosis.bytes / 1e6:,.1f} MB, examined in {diagnosis.seconds:.1f} s"
    )


def finding_lines(finding: Finding) -> Iterator[tuple[Level | None, str]]:
    yield (
        finding.level,
        textwrap.fill(finding.text, WIDTH, initial_indent=f"  {MARKS[finding.level]} ", subsequent_indent="    "),
    )
    if finding.advice:
        yield None, textwrap.fill(finding.advice, WIDTH, initial_indent="    → ", subsequent_indent="      ")
    for example in finding.examples[:SHOWN]:
        yield None, f"      {example_line(example)}"
    more = finding.count - min(len(finding.examples), SHOWN)
    if finding.examples and more > 0:
        yield None, f"      and {more:,} more"


def example_line(example: Example) -> str:
    """Where the images are, and what to see; one line, whatever characters a file's name has."""
    labels = {image.label for image in example.images}
    where = ("  =  " if example.note == EXACT else "  ≈  ").join(
        f"{image.split}: {image.key}" + (f" [{image.label}]" if len(labels) > 1 else "") for image in example.images[:2]
    )
    return printable(f"{where}  ({example.note})" if where else example.note)


def verdict(diagnosis: Diagnosis) -> str:
    hurting, looking = len(diagnosis.at("hurts")), len(diagnosis.at("look"))
    if hurting:
        return f"Training would suffer: {plural(hurting, 'problem')}, and {plural(looking, 'thing')} worth a look."
    if looking:
        return f"Ready for training; {plural(looking, 'thing')} worth a look."
    return "Ready for training."

"""The results of `vit doctor`: findings with examples, the diagnosis, and its lines for a terminal."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vitruvian.data.doctor.scan import Rows, Scan
from vitruvian.text import plural, printable

Level = Literal["problem", "warning", "ok"]

EXACT = "exact copy"
NEAR = "near duplicate"

EXAMPLES = 12
"""Maximum number of examples of a finding; its count includes all."""
REVIEWED = 200
"""Maximum number of examples of findings about labels, which `--review` shows one by one."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """The position of an image in the dataset."""

    split: str
    index: int
    key: str
    label: str


@dataclass(frozen=True, slots=True)
class FindingExample:
    """Images that show a finding, and a note about them."""

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
    examples: tuple[FindingExample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings about one dataset."""

    data: str
    splits: dict[str, int]
    """Number of images per split, readable or not."""
    classes: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there are no problems; warnings are allowed."""
        return not self.at("problem")

    def at(self, level: Level) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == level)

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as one JSON object; `docs/doctor.md` explains its fields."""
        return {**dataclasses.asdict(self), "healthy": self.healthy, "images": sum(self.splits.values())}


def image_ref(scan: Scan, row: int) -> ImageRef:
    split, source, index = scan.source(row)
    return ImageRef(split, index, source.key(index), source.classes[int(scan.records["label"][row])])


def finding_about(scan: Scan, rows: Rows, check: str, level: Level, text: str, advice: str) -> Finding:
    """A finding about images; the first few are its examples, with their size or why they cannot be read."""
    examples = []
    for row in rows[:EXAMPLES].tolist():
        size = f"{scan.records['columns'][row]}x{scan.records['rows'][row]} pixels"
        examples.append(FindingExample(scan.reasons.get(row, size), (image_ref(scan, row),)))
    return Finding(check, level, text, len(rows), advice, tuple(examples))


HEADINGS: dict[Level, str] = {"problem": "PROBLEMS", "warning": "WARNINGS", "ok": "PASSED"}
MARKS: dict[Level, str] = {"problem": "✗", "warning": "!", "ok": "✓"}
SHOWN = 4
"""Examples of a finding in the terminal; the page and the JSON object have more."""
WIDTH = 110


def report(diagnosis: Diagnosis) -> Iterator[tuple[Level | None, str]]:
    """The lines of the report, each with the level that determines its color."""
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
    indent = f"  {MARKS[finding.level]} "
    yield finding.level, textwrap.fill(finding.text, WIDTH, initial_indent=indent, subsequent_indent="    ")
    if finding.advice:
        yield None, textwrap.fill(finding.advice, WIDTH, initial_indent="    → ", subsequent_indent="      ")
    for example in finding.examples[:SHOWN]:
        yield None, f"      {example_line(example)}"
    more = finding.count - min(len(finding.examples), SHOWN)
    if finding.examples and more > 0:
        yield None, f"      and {more:,} more"


def example_line(example: FindingExample) -> str:
    """The images and the note in one line, whatever characters the file names contain."""
    labels = {image.label for image in example.images}
    images = ("  =  " if example.note == EXACT else "  ≈  ").join(
        f"{image.split}: {image.key}" + (f" [{image.label}]" if len(labels) > 1 else "") for image in example.images[:2]
    )
    return printable(f"{images}  ({example.note})" if images else example.note)


def verdict(diagnosis: Diagnosis) -> str:
    problems, warnings = len(diagnosis.at("problem")), len(diagnosis.at("warning"))
    counts = [plural(count, noun) for count, noun in ((problems, "problem"), (warnings, "warning")) if count]
    return f"{'Fix before training' if problems else 'Ready for training'}{': ' * bool(counts)}{' and '.join(counts)}."

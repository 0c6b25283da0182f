"""The diagnosis as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vitruvian.data.decode import printable
from vitruvian.data.doctor.findings import EXACT, Diagnosis, Example, Finding, Level, counted

HEADINGS: dict[Level, str] = {
    "hurts": "WILL HURT TRAINING",
    "look": "WORTH A LOOK",
    "fine": "FINE",
}
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
    images = counted(sum(diagnosis.splits.values()), "image")
    return printable(
        f"{diagnosis.data}: {images} ({splits}), {counted(diagnosis.classes, 'class')}, "
        f"{diagnosis.bytes / 1e6:,.1f} MB, examined in {diagnosis.seconds:.1f} s"
    )


def finding_lines(finding: Finding) -> Iterator[tuple[Level | None, str]]:
    yield finding.level, wrapped(finding.text, f"  {MARKS[finding.level]} ")
    if finding.advice:
        yield None, wrapped(finding.advice, "    → ")
    for example in finding.examples[:SHOWN]:
        yield None, f"      {example_line(example)}"
    more = finding.count - min(len(finding.examples), SHOWN)
    if finding.examples and more > 0:
        yield None, f"      and {more:,} more"


def wrapped(text: str, start: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


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
        return f"Training would suffer: {counted(hurting, 'problem')}, and {counted(looking, 'thing')} worth a look."
    if looking:
        return f"Ready for training; {counted(looking, 'thing')} worth a look."
    return "Ready for training."

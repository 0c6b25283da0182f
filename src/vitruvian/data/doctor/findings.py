"""The results of `vit doctor`: findings with examples, the diagnosis, and its lines for a terminal."""

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vitruvian.data.doctor.scan import Scan
from vitruvian.text import plural, printable

Level = Literal["problem", "warning", "ok", "unchecked"]

COPIES = EXACT, NEAR = "exact copy", "near duplicate"  # notes of examples
EXAMPLES = 12  # maximum number of examples of a finding; its count includes all
REVIEWED = 200  # maximum number of examples of findings about labels, which `--review` shows one by one


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
    right: str = ""  # of copies with different labels: the label that their neighbors agree on

    @property
    def text(self) -> str:
        return f"{self.note}; the neighbors are labeled {self.right}" if self.right else self.note


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str  # its short name, such as `leak`; the same in every report
    level: Level
    text: str  # one sentence with the numbers
    count: int = 0
    advice: str = ""
    examples: tuple[FindingExample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings about one dataset."""

    data: str
    splits: dict[str, int]  # number of images per split, readable or not
    classes: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]
    droppable: dict[str, frozenset[tuple[str, int]]]  # split and index of the images that `--drop` leaves out, by kind

    @property
    def healthy(self) -> bool:
        """Whether there are no problems; warnings are allowed."""
        return not self.at("problem")

    def at(self, level: Level) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == level)

    def heading(self) -> str:
        splits = ", ".join(f"{name} {size:,}" for name, size in self.splits.items())
        images, classes = plural(sum(self.splits.values()), "image"), plural(self.classes, "class")
        size = f"{self.bytes / 1e6:,.1f} MB, examined in {self.seconds:.1f} s"
        return printable(f"{self.data}: {images} ({splits}), {classes}, {size}")

    def verdict(self) -> str:
        problems, warnings = len(self.at("problem")), len(self.at("warning"))
        counts = [plural(count, noun) for count, noun in ((problems, "problem"), (warnings, "warning")) if count]
        start = "Fix before training" if problems else "Ready for training"
        return f"{start}{': ' * bool(counts)}{' and '.join(counts)}."

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as one JSON object; `docs/doctor.md` explains its fields."""
        content = dataclasses.asdict(self) | {"healthy": self.healthy, "images": sum(self.splits.values())}
        return content | {"droppable": {kind: len(images) for kind, images in self.droppable.items()}}


def image_ref(scan: Scan, row: int) -> ImageRef:
    """The position of the image in this row of a scan."""
    split, index = list(scan.splits)[scan.records["split"][row]], int(scan.records["index"][row])
    source = scan.splits[split]
    return ImageRef(split, index, source.key(index), source.label_text(index))


HEADINGS: dict[Level, str] = {"problem": "PROBLEMS", "warning": "WARNINGS", "ok": "PASSED", "unchecked": "NOT CHECKED"}
MARKS: dict[Level, str] = {"problem": "✗", "warning": "!", "ok": "✓", "unchecked": "-"}
SHOWN = 4  # examples of a finding in the terminal; the page and the JSON object have more
WIDTH = 110


def report(diagnosis: Diagnosis) -> Iterator[tuple[Level | None, str]]:
    """The lines of the report, each with the level that determines its color."""
    yield None, diagnosis.heading()
    for level, title in HEADINGS.items():
        if diagnosis.at(level):
            yield None, ""
            yield level, title
        for finding in diagnosis.at(level):
            indent = f"  {MARKS[level]} "
            yield level, textwrap.fill(finding.text, WIDTH, initial_indent=indent, subsequent_indent="    ")
            if finding.advice:
                yield None, textwrap.fill(finding.advice, WIDTH, initial_indent="    → ", subsequent_indent="      ")
            for example in finding.examples[:SHOWN]:  # in one line, whatever characters the file names contain
                several = len({image.label for image in example.images}) > 1
                images = ("  =  " if example.note == EXACT else "  ≈  ").join(
                    f"{image.split}: {image.key}" + (f" [{image.label}]" if several else "")
                    for image in example.images[:2]
                )
                yield None, "      " + printable(f"{images}  ({example.text})" if images else example.note)
            more = finding.count - min(len(finding.examples), SHOWN)
            if finding.examples and more > 0:
                yield None, f"      and {more:,} more"
    yield None, ""
    yield None, diagnosis.verdict()

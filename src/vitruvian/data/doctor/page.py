"""The diagnosis as one HTML file that needs no other, with the images in question side by side."""

from __future__ import annotations

from collections.abc import Iterator

from vitruvian.data.decode import decode
from vitruvian.data.doctor.findings import (
    EXAMPLES,
    HEADINGS,
    MARKS,
    Diagnosis,
    Example,
    Finding,
    ImageRef,
    heading,
    verdict,
)
from vitruvian.data.sources import Dataset, Source
from vitruvian.errors import VitruvianError
from vitruvian.report import html
from vitruvian.report.html import Html, joined, remark, text
from vitruvian.report.images import figure, thumbnail


def page(diagnosis: Diagnosis, data: Dataset) -> str:
    """The report as HTML; images are read again from the dataset."""
    return html.page(f"vit doctor: {diagnosis.data}", sections(diagnosis, data))


def sections(diagnosis: Diagnosis, data: Dataset) -> Iterator[Html]:
    yield html.heading(verdict(diagnosis), heading(diagnosis))
    for level, title in HEADINGS.items():
        findings = diagnosis.at(level)
        if findings:
            shown = (finding_html(finding, data) for finding in findings)
            yield html.section(Html(f'<span class="{level}">{title.capitalize()}</span>'), *shown)


def finding_html(finding: Finding, data: Dataset) -> Html:
    parts = [Html(f'<h3><span class="{finding.level}">{MARKS[finding.level]}</span> {text(finding.text)}</h3>')]
    if finding.advice:
        parts.append(remark(finding.advice))
    if finding.examples:
        shown = joined(example_html(example, data) for example in finding.examples[:EXAMPLES])
        parts.append(Html(f'<div class="examples">\n{shown}\n</div>'))
    hidden = finding.count - min(len(finding.examples), EXAMPLES)
    if finding.examples and hidden > 0:
        parts.append(remark(f"and {hidden:,} more"))
    return joined(parts)


def example_html(example: Example, data: Dataset) -> Html:
    figures = joined(image_html(image, data) for image in example.images)
    return Html(f'<div class="example"><div>{figures}</div>{remark(example.note)}</div>')


def image_html(image: ImageRef, data: Dataset) -> Html:
    caption = Html(f"{text(image.key)}<br>{text(image.split)}, {text(image.label)}")
    return figure(thumbnail_of(data.splits[image.split], image.index), caption)


def thumbnail_of(source: Source, index: int) -> Html:
    """A small version of a sample, or words in its place where it cannot be read any more."""
    try:
        return thumbnail(decode(source.read(index)), source.key(index))
    except (VitruvianError, OSError):
        return Html("no image")

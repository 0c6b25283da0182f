"""The diagnosis as one HTML file that needs no other, with the images in question side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape

from PIL import Image

from vitruvian.data.decode import decode, printable
from vitruvian.data.doctor.findings import Diagnosis, Example, Finding, ImageRef
from vitruvian.data.doctor.report import HEADINGS, MARKS, heading, verdict
from vitruvian.data.sources.base import DataSet

THUMBNAIL_SIDE = 160
QUALITY = 80

STYLE = """
:root { color-scheme: light dark; --line: #8884; --hurts: #c62828; --look: #b26a00; --fine: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --hurts: #ff8a80; --look: #ffb74d; --fine: #81c784; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.5rem 0 0; }
.hurts { color: var(--hurts); } .look { color: var(--look); } .fine { color: var(--fine); }
.advice, .note, figcaption { color: GrayText; font-size: .85rem; }
.examples { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: .5rem; }
.example { border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
.images { display: flex; gap: .5rem; }
figure { margin: 0; width: 160px; } figcaption { overflow-wrap: anywhere; line-height: 1.25; }
img, .missing { display: block; height: 120px; max-width: 160px; object-fit: contain; }
.missing { width: 158px; height: 3rem; line-height: 3rem; text-align: center; border: 1px dashed var(--line); }
""".strip()


def page(diagnosis: Diagnosis, data: DataSet) -> str:
    """The report as HTML; images are read again from the data set."""
    body = "\n".join(sections(diagnosis, data))
    title = escape(f"vit doctor: {printable(diagnosis.data)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def sections(diagnosis: Diagnosis, data: DataSet) -> Iterator[str]:
    yield f"<h1>{text(verdict(diagnosis))}</h1>"
    yield f'<p class="advice">{text(heading(diagnosis))}</p>'
    for level, title in HEADINGS.items():
        findings = diagnosis.at(level)
        if findings:
            yield f'<h2 class="{level}">{title.capitalize()}</h2>'
            for finding in findings:
                yield finding_html(finding, data)


def finding_html(finding: Finding, data: DataSet) -> str:
    lines = [f'<h3><span class="{finding.level}">{MARKS[finding.level]}</span> {text(finding.text)}</h3>']
    if finding.advice:
        lines.append(f'<div class="advice">{text(finding.advice)}</div>')
    if finding.examples:
        lines.append('<div class="examples">')
        lines += [example_html(example, data) for example in finding.examples]
        lines.append("</div>")
    hidden = finding.count - len(finding.examples)
    if finding.examples and hidden > 0:
        lines.append(f'<div class="advice">and {hidden:,} more</div>')
    return "\n".join(lines)


def example_html(example: Example, data: DataSet) -> str:
    figures = "".join(figure(image, data) for image in example.images)
    note = f'<div class="note">{text(example.note)}</div>'
    return f'<div class="example"><div class="images">{figures}</div>{note}</div>'


def figure(image: ImageRef, data: DataSet) -> str:
    caption = f"{text(image.key)}<br>{text(image.split)}, {text(image.label)}"
    return f"<figure>{thumbnail(image, data)}<figcaption>{caption}</figcaption></figure>"


def thumbnail(image: ImageRef, data: DataSet) -> str:
    """The image, small, inside the page; a frame in its place if it cannot be read."""
    try:
        read = data.splits[image.split].read(image.index)
        decoded = decode(read if isinstance(read, bytes) else Image.fromarray(read))
    except Exception:  # the finding already tells why
        return '<div class="missing">no image</div>'
    decoded.thumbnail((2 * THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    decoded.save(buffer, "JPEG", quality=QUALITY)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/jpeg;base64,{encoded}" alt="{text(image.key)}">'


def text(value: str) -> str:
    return escape(printable(value))

"""The HTML pages of `vit doctor`: all findings with their images, and the review of suspicious labels."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from typing import Any

from markupsafe import Markup
from PIL import Image

from vitruvian.data.decode import RawImage
from vitruvian.data.doctor.findings import COPIES, EXAMPLES, HEADINGS, MARKS, REVIEWED, Diagnosis, ImageRef
from vitruvian.data.sources import Dataset, Source
from vitruvian.data.stored import display
from vitruvian.errors import VitruvianError
from vitruvian.report.html import render, script_hash, thumbnail

LABEL_CHECKS = ("conflict", "near-conflict", "label")  # checks that question labels, the most reliable first


def diagnosis_page(diagnosis: Diagnosis, data: Dataset) -> str:
    """All findings as HTML, with thumbnails of the example images."""
    title, levels = f"vit doctor: {diagnosis.data}", [(level, HEADINGS[level], MARKS[level]) for level in HEADINGS]
    return render(
        "doctor.html",
        title=title,
        heading=diagnosis.verdict(),
        subtitle=diagnosis.heading(),
        diagnosis=diagnosis,
        levels=levels,
        shown=EXAMPLES,
        context=partial(image_context, data=data),
    )


def image_context(image: ImageRef, data: Dataset) -> dict[str, Any]:
    thumbnail = thumbnail_of(data.splits[image.split], image.index)
    return {"image": thumbnail, "key": image.key, "split": image.split, "label": image.label}


def thumbnail_of(source: Source, index: int, view: Callable[[RawImage], Image.Image] = display) -> Markup:
    """A thumbnail of a sample, or "no image" if it cannot be read."""
    try:
        return thumbnail(view(source.read(index)), source.key(index))
    except (VitruvianError, OSError):
        return Markup("no image")


def review_page(diagnosis: Diagnosis, data: Dataset) -> str:
    """A page that shows suspicious labels one by one, for the keyboard, and saves the corrections as a file."""
    items, decisions = [], []
    suspicious = list(suspicious_labels(diagnosis))
    positions = {(image.split, image.index): position for position, (image, _, _) in enumerate(suspicious)}
    for image, evidence, note in suspicious:
        copy = positions.get((evidence[0].split, evidence[0].index)) if note.startswith(COPIES) else None
        others = [image_context(contradicting, data) for contradicting in evidence]
        items.append(image_context(image, data) | {"note": note, "evidence": others})
        decision = {"split": image.split, "index": image.index, "key": image.key}
        decisions.append({**decision, "was": image.label, "suggested": evidence[0].label, "copy": copy})
    script = (files("vitruvian") / "data" / "doctor" / "review.js").read_text(encoding="utf-8")
    return render(
        "review.html",
        title=f"vit doctor: labels of {diagnosis.data}",
        heading="Suspicious labels",
        subtitle=f"{len(items):,} of {diagnosis.data}; nothing is changed until you run vit doctor --apply",
        items=items,
        content={"data": diagnosis.data, "classes": list(data.classes), "items": decisions},
        **({"script": Markup(script), "script_hash": script_hash(script)} if items else {}),
    )


def suspicious_labels(diagnosis: Diagnosis) -> Iterator[tuple[ImageRef, tuple[ImageRef, ...], str]]:
    """Images with suspicious labels, each once, with the images that contradict the label and an explanation."""
    listed: set[tuple[str, int]] = set()
    findings = {finding.check: finding for finding in diagnosis.findings}
    for check in LABEL_CHECKS:
        for example in findings[check].examples if check in findings else ():
            first, *others = example.images
            pairs = [(first, tuple(others))]
            if check != "label":  # either label may be wrong, unless the neighbors decide
                pairs.append((others[0], (first,)))
                pairs = [pair for pair in pairs if not example.right or pair[0].label != example.right]
            for image, evidence in pairs:
                if (image.split, image.index) not in listed and len(listed) < REVIEWED:
                    listed.add((image.split, image.index))
                    yield image, evidence, example.text

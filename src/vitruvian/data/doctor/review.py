"""A page to look through the most doubtful labels with the keyboard; it gives the corrections as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files

from vitruvian.data.doctor.findings import REVIEWED, Diagnosis, ImageRef
from vitruvian.data.doctor.page import image_html, thumbnail_of
from vitruvian.data.sources import Dataset
from vitruvian.report import html
from vitruvian.report.html import Html, joined, text

CHECKS = ("conflict", "near-conflict", "label")
"""Findings that doubt labels, the most certain first."""


def doubtful(diagnosis: Diagnosis) -> Iterator[tuple[ImageRef, tuple[ImageRef, ...], str]]:
    """Images whose labels are doubted, each once, with the images that speak against them and what they say."""
    met: set[tuple[str, int]] = set()
    findings = {finding.check: finding for finding in diagnosis.findings}
    for check in CHECKS:
        for example in findings[check].examples if check in findings else ():
            first, *others = example.images
            pairs = [(first, tuple(others))]
            if check != "label":  # either may be wrong
                pairs.append((others[0], (first,)))
            for image, evidence in pairs:
                if (image.split, image.index) not in met and len(met) < REVIEWED:
                    met.add((image.split, image.index))
                    yield image, evidence, example.note


def review(diagnosis: Diagnosis, data: Dataset) -> str:
    """The page: one image at a time, with the images that contradict its label beside it."""
    items, shown = [], []
    for number, (image, evidence, note) in enumerate(doubtful(diagnosis)):
        suggested = evidence[0].label
        items.append(
            {
                "split": image.split,
                "index": image.index,
                "key": image.key,
                "was": image.label,
                "suggested": suggested,
            }
        )
        thumbnail = thumbnail_of(data.splits[image.split], image.index)
        beside = joined(image_html(each, data) for each in evidence)
        shown.append(
            Html(
                f'<article id="item{number}" hidden>\n<div class="doubt"><div class="frame">{thumbnail}</div>\n'
                f"<div><p>{text(image.key)} ({text(image.split)})</p>\n"
                f'<p>labeled <b>{text(image.label)}</b>, perhaps <b class="look">{text(suggested)}</b></p>\n'
                f'<p class="soft small">{text(note)}</p>\n'
                f'<div class="evidence">{beside}</div></div></div>\n</article>'
            )
        )
    content = {"data": diagnosis.data, "classes": list(data.classes), "items": items}
    parts = [
        html.heading("Doubtful labels", f"{len(items):,} of {diagnosis.data}; nothing is changed until `--apply`"),
        *([Html(CONTROLS), *shown] if items else [html.paragraph(NOTHING)]),
        Html(f'<script type="application/json" id="content">{in_script(content)}</script>'),
    ]
    place = files("vitruvian") / "data" / "doctor"
    script = (place / "review.js").read_text(encoding="utf-8") if items else ""
    return html.page(f"vit doctor: labels of {diagnosis.data}", parts, script=script, style=STYLE)


NOTHING = (
    "No label is in doubt. Where edges and colors do not tell the classes apart, a model's features do: "
    "vit embed SRC --out vectors/, then vit doctor SRC --vectors vectors/ --review review.html"
)
CONTROLS = """<div id="bar">
<p><b id="place"></b> <span id="decided" class="soft"></span></p>
<p><button id="keep"><kbd>Enter</kbd> keep</button> <button id="take"><kbd>S</kbd> take the suggestion</button>
<label><kbd>C</kbd> other <select id="other"></select></label> <button id="drop"><kbd>X</kbd> leave out</button>
<button id="undo"><kbd>U</kbd> undo</button> <button id="back"><kbd>←</kbd></button>
<button id="next"><kbd>→</kbd></button> <button id="save"><kbd>D</kbd> download corrections</button></p>
</div>"""
STYLE = """
#bar { position: sticky; top: 0; background: var(--back); padding: .5rem 0; z-index: 1; }
#bar button, #bar select { font: inherit; padding: .3rem .6rem; max-width: 16rem; }
kbd { border: 1px solid var(--line); border-radius: .25rem; padding: 0 .35rem; font-size: .8em; }
.doubt { display: flex; gap: 1.5rem; } .doubt > .frame { width: min(22rem, 45vw); flex: none; }
.doubt p:first-child { margin-top: 0; }
.evidence { display: flex; flex-wrap: wrap; gap: .75rem; } .evidence figure { width: 8.5rem; }
"""


def in_script(content: object) -> str:
    """JSON that no name of a file or class can end early."""
    return json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

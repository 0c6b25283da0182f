"""Every report page in a real browser: no violations of axe-core, light and dark, on a desktop and on a phone."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image

from vitruvian.data.doctor.findings import Diagnosis, Finding, FindingExample, ImageRef
from vitruvian.evaluation.report import confusion_part
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import color_bar
from vitruvian.report.html import embed_image, environment, percent_bar, render, script_hash, thumbnail
from vitruvian.study.advise import HEADINGS, Advice, Option

IMAGE = thumbnail(Image.new("RGB", (90, 60), "orange"), "an orange")
POINTS = [(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]
CHART = Chart(title="Loss", lines=[Line("train", POINTS), Line("validation", POINTS[:2])], x_label="step")
TILES = {"top-1 accuracy": "91.25 ± 10.75 %", "size": "10.5 of 100.4 MB"}
LONG = "a class with quite a long name that does not fit on a phone"
UNREADABLE = {"a/1.jpg": "broken", "a/2.jpg": "empty"}
COUNTS = np.array([[90, 5, 5], [20, 60, 20], [1, 0, 4]])
EXPLAINED = {
    "path": "cat.jpg",
    "error": "",
    "rejected": True,
    "overlays": [{"image": IMAGE, "caption": "rollout"}],
    "predictions": [("cat", percent_bar(91.25)), ("dog", percent_bar(8.0))],
    "deletion": CHART,
}
MAP = Markup((files("vitruvian") / "report" / "templates" / "map.js").read_text(encoding="utf-8"))
FOUND = {"pictures": {"a.jpg": IMAGE, "map of a.jpg": IMAGE}, "score": 0.6, "is_anomalous": True}
SEGMENTED = {"name": "cat.jpg", "pictures": {"mask": IMAGE, "prediction": IMAGE}, "iou": "71.3"}
FAILED = {**EXPLAINED, "path": "broken.jpg", "error": "not an image"}


def measures(confusion):
    mistake = {"image": IMAGE, "prediction": "cat", "percent": 99.0, "label": "dog", "key": "dog/1.jpg"}
    bars = [percent_bar(90.0, (83, 94))] * 3  # recall, precision and F1
    classes = [(LONG, 100, 90, *bars), ("dog", 100, 60, *bars)] * 10
    return render("measures.html", confusion=confusion, matrix=True, mistakes=[mistake] * 3, classes=classes)


def targets():
    mistake = {"image": IMAGE, "name": "age", "text": "30 instead of 60", "key": "a/1.jpg"}
    rows = [("age", 100, "3.5")] * 20
    page = {"noun": "number", "headings": [">images", ">error"], "rows": rows, "mistakes": [mistake] * 3}
    return render("targets.html", charts=[CHART], **page)


def finding(level):
    images = tuple(ImageRef("train", index, f"a/{index}.jpg", "a") for index in range(2))
    examples = (FindingExample("exact copy", images),)
    return Finding("leak", level, f"2 images are a {level}", 4, "delete them", examples)


def vars_of(image):
    return {"image": IMAGE, "key": image.key, "split": image.split, "label": image.label}


OPTION = Option(
    name="linear probe",
    model="W.safetensors",
    top1=90.0,
    interval=(80.0, 95.0),
    is_measured=True,
    basis="50 images",
    minutes=0.5,
    bytes=22_000_000,
    images_per_second=40.0,
    license="apache-2.0",
    command="vit probe photos/ --model W.safetensors --only linear --save model",
)
ADVICE = Advice(
    data="photos/",
    summary="200 images of 3 classes",
    test_is="20% of each class",
    findings=("a class is tiny",),
    options=(OPTION, replace(OPTION, name="fine-tuning", is_measured=False)),
    more_images="twice as many images are expected to give 93%",
    recommended=OPTION,
    reason="it is the quickest",
    notes=["one note"],
    seconds=20.0,
)
MATRIX = confusion_part(COUNTS, ["cat", "dog", LONG])
MANY = confusion_part(np.eye(40, dtype=np.int64) + np.eye(40, k=1, dtype=np.int64), [f"class {i}" for i in range(40)])
PAGES = {
    "advise.html": {
        "advice": ADVICE,
        "titles": HEADINGS,
        "samples": [{"images": [IMAGE] * 3, "label": "cat"}] * 3,
        "doubts": [vars_of(ImageRef("train", 0, "a/0.jpg", "a")) | {"note": "similar to b"}],
    },
    "demo.html": {
        "tile_values": TILES,
        "chart": CHART,
        "digits": [{"image": IMAGE, "caption": "7"}],
        "classes": ["cat", "dog"],
        "photos": [EXPLAINED],
    },
    "doctor.html": {
        "levels": [(name, name, "!") for name in ("problem", "warning", "ok")],
        "diagnosis": SimpleNamespace(at=lambda level: (finding(level),)),
        "shown": 12,
        "context": vars_of,
    },
    "compare.html": {
        "metric": "accuracy, %",
        "tile_values": TILES,
        "pairs": ["a is better than b"],
        "setting_titles": ["setting", "a", "b"],
        "settings": [("lr", 0.1, 0.2)],
        "class_titles": ["class", ">a", ">b"],
        "classes": [(LONG, 90.0, 80.0)] * 20,
        "image_count": 3,
        "images": [{"image": IMAGE, "label": "cat", "predictions": [("a", "cat"), ("b", "dog")], "key": "cat/1.jpg"}],
        "notes": ["one note"],
    },
    "evaluation.html": {
        "tile_values": TILES,
        "unreadable_images": UNREADABLE,
        "excluded": 3,
        "level": 95,
        "accuracies": [("top-1", 91.2, "90 to 92")],
        "bins": 15,
        "reliability": CHART,
        "calibration": [("this model", 1.0, 2.5, 0.3)],
        "no_temperature": "",
        "fitted_on": "100 images",
        "sets": "prediction sets for 90%",
        "slice_titles": ["camera", ">images", ">top-1", "95% interval"],
        "by": "camera",
        "slices": [("A", 100, percent_bar(90.0), "83 to 95")],
        "worst": "worst: camera A",
        "rejection": SimpleNamespace(auroc={"energy": 91.0}, fpr={"energy": 30.0}),
        "corruptions": [("fog", 80.0)],
        "corruption_titles": ["corruption", ">top-1"],
        "corrupted": "corrupted images",
        "measures": measures(MATRIX),
        "notes": ["one note"],
    },
    "explain.html": {
        "count": 3,
        "unreadable": 1,
        "images": [EXPLAINED, FAILED],
        "methods": ("rollout", "pca"),
        "color_bar": embed_image(color_bar(160, 10), "colors from violet to yellow"),
    },
    "figures.html": {
        "figures": [
            {"title": "Filters", "note": "of the first layer", "image": IMAGE, "name": "filters", "unreadable": ["a"]},
            {"title": "Positions", "note": "none", "image": None, "name": "positions", "unreadable": []},
        ]
    },
    "map.html": {
        "content": {
            "keys": ["cat/1.jpg", "dog/1.jpg"],
            "folder": "photos",
            "x": "AAD//w==",
            "y": "AAD//w==",
            "columns": [{"name": "label", "names": ["cat", LONG], "codes": "AAABAA=="}],
        },
        "script": MAP,
        "script_hash": script_hash(MAP),
    },
    "optimize.html": {
        "chosen": "int8",
        "tile_values": TILES,
        "chart": CHART,
        "columns": ["", ">images/s", ">speedup", ">one by one", ">max. points lost", ">top-1", ""],
        "candidates": [("float", 10.0, 1.0, 0.0, 100.0, 90.0, ""), ("int8", 20.0, 2.0, 0.3, 99.0, 89.8, "chosen")],
        "note": "a note",
    },
    "probe.html": {
        "tile_values": TILES,
        "draws": 5,
        "headings": ["probe", "setting", ">mAP, %"],
        "rows": [("linear", "all images", "81.0")],
        "chart": CHART,
        "tried": [("linear", {"1e-3": 81.0})],
        "notes": ["one note"],
        "unreadable_images": UNREADABLE,
    },
    "review.html": {"items": [], "content": {}},
    "anomaly.html": {
        "above": 1,
        "images": "2 images",
        "threshold": 0.5,
        "measured": {"image_auroc": 90.0, "interval": (80.0, 95.0), "pixel_auroc": 95.0, "pro": 80.0},
        "chart": CHART,
        "shown": [FOUND, FOUND | {"is_anomalous": False}],
        "notes": ["one note"],
    },
    "segment.html": {
        "mean": ("mean of the classes", 71.25, (60.0, 80.0)),
        "classes": [(IMAGE, "cat", percent_bar(70.0, (60, 80))), ("", "mean of the classes", percent_bar(71.25))],
        "curve": CHART,
        "images": [SEGMENTED, SEGMENTED | {"name": "dog.jpg"}],
        "notes": ["one note"],
    },
    "similar.html": {
        "queries": [
            {
                "name": "cat.jpg",
                "image": IMAGE,
                "neighbors": [{"image": IMAGE, "similarity": 0.9, "label": "cat", "key": "cat/1.jpg"}],
            }
        ]
    },
    "study.html": {
        "remarks": ["The paper has 64.2%."],
        "headings": ["row", ">images", ">top-1", "state"],
        "rows": [("ViT", 100, "81.0 ± 0.4", "done")],
        "charts": [CHART],
    },
    "sweep.html": {
        "tile_values": TILES,
        "failed": ["dev-lr-1"],
        "titles": ["trial", ">top-1", ""],
        "dev_trials": [("dev-lr-1", 80.0, "best")],
        "test_trials": [("test-seed-0", 81.0, "")],
        "measured_on": "test",
        "soup": "the mean of 3 seeds",
        "settings": {"lr": 0.1, "augment": {"hflip": True}},
    },
    "training.html": {
        "tile_values": TILES,
        "stopped": "Ctrl-C",
        "measured": False,
        "curves": [CHART, CHART],
        "masked": False,
        "measures": measures(MANY),
        "examples": [{"image": IMAGE, "caption": "a/1.jpg"}],
        "notes": ["one note"],
        "findings": [Finding("tiny-class", "problem", "a class is tiny", 1, "add images", (FindingExample("a: 3"),))],
        "unreadable_images": UNREADABLE,
        "classes_checked": True,
        "settings": {"lr": 0.1},
        "environment": {"torch": "2"},
    },
}
"""Values for each template that is a page."""


def test_every_page_is_checked():
    jinja = environment()
    sources = {name: jinja.loader.get_source(jinja, name)[0] for name in jinja.list_templates(["html"])}
    assert {name for name, source in sources.items() if '{% extends "base.html" %}' in source} == set(PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_no_report_violates_a_rule_of_accessibility(name, visit, violations, browser, tmp_path):
    path = tmp_path / name
    path.write_text(render(name, title="A report", subtitle="of 3 images", **PAGES[name]), encoding="utf-8")
    for width in (1366, 390):
        for dark in (False, True):
            visit(path.as_uri(), width=width, dark=dark)
            assert violations() == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_page_of_suspicious_labels_violates_no_rule_of_accessibility(visit, violations, tmp_path):
    from vitruvian.data.doctor.doctor_report import review_page
    from vitruvian.data.formats import open_dataset

    for label, color in (("cat", "white"), ("dog", "black")):
        (tmp_path / "data" / label).mkdir(parents=True)
        Image.new("RGB", (40, 40), color).save(tmp_path / "data" / label / "1.png")
    data = open_dataset(tmp_path / "data")
    refs = tuple(ImageRef("train", index, data.train.key(index), label) for index, label in enumerate(("cat", "dog")))
    conflict = Finding("conflict", "problem", "1 image occurs twice", 1, "", (FindingExample("exact copy", refs),))
    settings = {"data": "data", "splits": {"train": 2}, "classes": 2, "bytes": 1, "seconds": 1.0}
    page = review_page(Diagnosis(**settings, findings=(conflict,), droppable={}), data)
    (tmp_path / "review.html").write_text(page, encoding="utf-8")
    for width in (1366, 390):
        for dark in (False, True):
            visit((tmp_path / "review.html").as_uri(), width=width, dark=dark)
            assert violations() == []


@pytest.mark.slow
def test_forced_colors_keep_the_bars(visit, browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render("explain.html", title="A report", **PAGES["explain.html"]), encoding="utf-8")
    visit(path.as_uri(), forced=True)
    colors = browser.execute_script(
        "return ['.bar i', '.bar'].map((name) => getComputedStyle(document.querySelector(name)).backgroundColor)"
    )
    assert colors[0] != colors[1]
    assert not re.fullmatch(r"rgba\(.*, 0\)", colors[0])

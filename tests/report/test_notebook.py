"""Results in notebooks: `_repr_html_` of predictions, evaluations, explanations, probes, comparisons and runs."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.inference import Encoder, ImageResult, Prediction


class Checker(HTMLParser):
    """The text, and the elements that are open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.text, self.images = [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.images += tag == "img"
        if tag not in ("img", "br", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def shown(result: object) -> tuple[str, int]:
    """The text and the number of images that a notebook shows."""
    checker = Checker(result._repr_html_())
    assert checker.open == []
    return " ".join(" ".join(checker.text).split()), checker.images


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = vt.build(
        vt.ViTConfig(image_size=32, patch_size=8, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=2)
    )
    torch.nn.init.normal_(model.head.weight)
    model.meta = model.meta.replace(labels=("a<b>", "dark"))
    return model.eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split in ("train", "test"):
        for level, name in ((200, "a<b>"), (40, "dark")):
            (folder / split / name).mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(level - 30, level + 30, (40, 44, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def test_predictions_are_a_table(model, data):
    image = data / "test" / "dark" / "0.png"
    predictions = vt.Classifier(model)(image)
    text, _ = shown(predictions)
    assert text == f"class probability {predictions[0].label} {predictions[0].text} " + (
        f"{predictions[1].label} {predictions[1].text}"
    )
    assert predictions == list(predictions)
    (result,) = vt.Classifier(model).stream([image])
    assert shown(result)[0] == f"{image} {text}"


def test_names_are_escaped_and_errors_and_sets_are_shown():
    html = ImageResult(
        "<i>.png", (Prediction("<script>", 0.5, 0),), rejected=True, prediction_set=("<p>",)
    )._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html
    assert "<p>rejected (none of the classes)</p>" in html
    assert "set: &lt;p&gt;" in html
    assert shown(ImageResult("a.png", error="not an image"))[0] == "a.png not an image"


def test_an_explanation_shows_its_maps_over_the_image(model, data):
    explained = vt.Explainer(model).explain(data / "test" / "dark" / "0.png")
    text, images = shown(explained)
    assert images == 4  # the image, and three maps
    assert "attention rollout" in text
    assert explained.predictions[0].label in text


def test_evaluations_probes_and_comparisons_show_their_metrics(model, data):
    evaluation = vt.evaluate(data, model)
    text, _ = shown(evaluation)
    assert text.startswith("12 images of the split 'test', 2 classes")
    assert f"top-1 accuracy {evaluation.measures.top1:.2f}" in text
    text, _ = shown(vt.probe(data, model, only=["linear"]))
    assert text.startswith("12 training images of 2 classes, 12 test images")
    assert "linear" in text
    text, _ = shown(vt.compare([Encoder(model), Encoder(model)], data))
    assert "McNemar p = 1" in text


@pytest.mark.slow
def test_a_run_shows_its_result_and_where_its_report_is(tmp_path):
    tiny = {"depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2, "patch_size": 4}
    settings = {f"architecture.{name}": value for name, value in tiny.items()}
    settings |= {"steps": 2, "batch_size": 8, "warmup": 0, "workers": 0}
    run = vt.train("digits", out=tmp_path / "run", settings=settings, progress=False)
    text, _ = shown(run)
    assert text.startswith(f"{run.folder}: ")
    assert f"top1 {run.evaluation['top1']:,.2f}" in text
    assert str(run.folder / "report.html") in text
    assert shown(vt.Run(tmp_path / "none"))[0] == f"{tmp_path / 'none'}: waiting"

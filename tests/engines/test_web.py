"""A model exported for the browser: predictions equal those of Python, also offline, and the page is accessible."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from browsing import Page
from vitruvian.compress import int8
from vitruvian.config import Preprocess
from vitruvian.data.preprocess import image_pixels, preprocess_image
from vitruvian.engines import web
from vitruvian.errors import ConversionError, HubError
from vitruvian.explain.deletion import cover_patches

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CAT = files("vitruvian.serve") / "page" / "cat.jpg"
BUNDLED = files("vitruvian") / "bundled"


def small_vit(**meta):
    """ViT-Ti with two blocks for 48 x 64 pixels, with random weights."""
    torch.manual_seed(0)
    config = vt.ViTConfig(image_size=(48, 64), depth=2, width=192, mlp_dim=768, num_heads=3, num_classes=7)
    model = vt.build(config)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    preprocess = Preprocess(image_size=(48, 64), fit="crop", scaled_size=(56, 72), interpolation="bicubic")
    defaults = {"preprocess": preprocess, "temperature": 1.5, "origin": "random"}
    model.meta = model.meta.replace(**defaults | meta)
    return model.eval()


@pytest.fixture(scope="module")
def runtime():
    """The folder with node_modules, as the current one."""
    if not (ROOT / "node_modules" / web.PACKAGE / "dist").is_dir():
        pytest.skip("onnxruntime-web is not installed: run make browser")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def folder(runtime, browser, tmp_path_factory):
    """Where the exported folders are; the tests that need one have `bundled` or `small`, its certificate."""
    return tmp_path_factory.mktemp("sites")


@pytest.fixture(scope="module")
def bundled(folder):
    return vt.export(str(BUNDLED), folder / "bundled", to="web")


@pytest.fixture(scope="module")
def small_graph(tmp_path_factory):
    """A folder with the exported graph for single images, which the page then takes as it is."""
    path = tmp_path_factory.mktemp("graph") / "single.onnx"
    vt.save(small_vit(), path.parent)
    vt.export(small_vit(temperature=2.5), path, batch_size=1)
    return path.parent


@pytest.fixture(scope="module")
def small(folder):
    return vt.export(small_vit(), folder / "small", to="web")


class Server:
    """`python -m http.server` on a free port."""

    def __init__(self, folder):
        command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        port = re.search(r"port (\d+)", self.process.stdout.readline())[1]
        self.url = f"http://127.0.0.1:{port}"

    def close(self):
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def url(folder):
    server = Server(folder)
    yield server.url
    server.close()


class WebPage(Page):
    """The exported page."""

    ready = (
        "return !!document.querySelector('.prediction, #problem:not([hidden])')"
        " && document.documentElement.dataset.pending === '0'"
    )

    def probabilities(self, image, erased=()):
        """Of an encoded image, by the modules that the page has loaded."""
        script = """const [bytes, erased, done] = arguments;
          const blob = new Blob([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))]);
          import("./page/model.js")
            .then((m) => m.prepare({ blob, name: "a" }).then((input) => m.predict(input, { erased })))
            .then(({ probabilities }) => done(probabilities), (error) => done(error.message));"""
        return self.browser.execute_async_script(script, base64.b64encode(image).decode(), list(erased))


@pytest.fixture
def page(browser, visit):
    page = WebPage(browser, visit)
    browser.set_script_timeout(120)
    page.errors()  # of the test before
    return page


def encoded(image, kind="PNG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def noise(size, mode="RGB", seed=0):
    channels = len(mode)
    levels = np.random.default_rng(seed).integers(0, 256, (9, 7, channels), dtype=np.uint8)
    return Image.fromarray(levels.squeeze(-1) if channels == 1 else levels, mode).resize(size)


def images():
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "photo": CAT.read_bytes(),
        "wide": encoded(noise((500, 90))),
        "tall": encoded(noise((31, 400), seed=1)),
        "smaller than the input": encoded(noise((9, 20), seed=2)),
        "gray": encoded(noise((80, 120), "L", seed=3)),
        "alpha": encoded(noise((120, 80), "RGBA", seed=4)),
        "turned": encoded(noise((160, 90), seed=5), "JPEG", quality=95, exif=turned),
        "gif": encoded(noise((90, 90), seed=6), "GIF"),
        "webp": encoded(noise((90, 90), seed=7), "WEBP", lossless=True),
    }


@pytest.mark.parametrize("name", ["bundled", "small"])
def test_probabilities_equal_those_of_the_classifier(name, request, url, page):
    certificate = request.getfixturevalue(name)
    assert 0 <= certificate.browser_difference <= 0.01
    assert "in Chromium, probabilities differ by at most" in str(certificate)
    assert certificate.to_json()["format"] == "web"
    classifier = vt.Classifier(str(BUNDLED) if name == "bundled" else small_vit(), device="cpu")
    page.open(f"{url}/{name}/")
    for kind, image in images().items():
        expected = [0.0] * len(classifier.labels)
        for prediction in classifier(image, top=len(expected)):
            expected[prediction.index] = prediction.probability
        # JPEG decoders differ by a level or two, and Chromium stores transparent colors multiplied by their alpha
        assert page.probabilities(image) == pytest.approx(expected, abs=0.01), kind
    shown = page.texts(".prediction > span:first-child")
    assert shown == [prediction.label for prediction in classifier(CAT.read_bytes())]
    assert page.errors() == []


def test_an_exported_folder_is_also_a_model(folder, small):
    expected = vt.Classifier(small_vit(), device="cpu")(CAT.read_bytes())
    predictions = vt.Classifier(folder / "small")(CAT.read_bytes())
    assert [p.label for p in predictions] == [p.label for p in expected]
    assert [p.probability for p in predictions] == pytest.approx([p.probability for p in expected], abs=1e-5)


def test_erased_patches_are_erased_as_in_python(url, page, small):
    model = small_vit()
    page.open(f"{url}/small/")
    erased = [0, 3, 5]
    pixels = preprocess_image(CAT.read_bytes(), model.meta.preprocess)
    covered = cover_patches(pixels, np.asarray(erased), (3, 4))
    expected = (model(covered[None])[0] / 1.5).softmax(dim=0).tolist()
    assert page.probabilities(CAT.read_bytes(), erased) == pytest.approx(expected, abs=0.01)


def test_the_brush_and_the_keyboard_erase_patches(url, page, small):
    page.open(f"{url}/small/")
    before = page.texts(".prediction")
    brush = """const canvas = document.querySelector("#brush canvas"), box = canvas.getBoundingClientRect();
      canvas.setPointerCapture = () => {};
      for (const [kind, x] of [["pointerdown", 0.1], ["pointermove", 0.4], ["pointermove", 0.6], ["pointerup", 0.6]])
        canvas.dispatchEvent(new PointerEvent(kind, { buttons: 1, pointerId: 1, bubbles: true,
          clientX: box.left + x * box.width, clientY: box.top + 0.5 * box.height }));"""
    page.run(brush)
    assert "3 of 12 patches erased" in page.texts("#brush figcaption")[0]
    assert page.texts(".prediction") != before
    page.click("#restore")
    assert page.texts(".prediction") == before
    page.press("#brush canvas", "\ue012", " ")  # an arrow, and Space
    assert "1 of 12" in page.texts("#brush figcaption")[0]
    assert page.errors() == []


def test_images_are_chosen_dropped_and_pasted(url, page, small, tmp_path):
    page.open(f"{url}/small/")
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(encoded(noise((60, 50), seed=len(name))))
    page.choose(tmp_path / "one.png", tmp_path / "two.png")
    assert all(page.texts("#film span"))
    assert page.texts("#brush figcaption")[0].startswith("one.png: ")
    send = """const [text, kind] = arguments;
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
        const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
          : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
        document.body.dispatchEvent(event);"""
    for kind in ("drop", "paste"):
        page.run(send, base64.b64encode(encoded(noise((60, 50)))).decode(), kind)
        assert page.texts("#brush figcaption")[0].startswith(f"{kind}.png")
    broken = base64.b64encode(b"no image").decode()
    page.run(send, broken, "drop")
    assert "drop.png is not an image" in page.text("#problem")
    assert page.texts("#predictions") == ["No prediction."]
    assert page.attribute("#camera", "capture") == "environment"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1366, 390])
def test_the_page_is_accessible_and_fits(width, dark, url, page, bundled, violations):
    page.open(f"{url}/bundled/", width=width, dark=dark)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert violations() == []


def test_nothing_is_requested_from_elsewhere(url, page, bundled):
    page.open(f"{url}/bundled/")
    requested = page.browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert len(requested) > 10
    assert [name for name in requested if not name.startswith((f"{url}/bundled/", f"blob:{url}/"))] == []
    policy = page.attribute("meta[http-equiv]", "content")
    assert policy.startswith("default-src 'none';")


def test_the_page_works_without_a_network_after_the_first_load(folder, bundled, page, browser):
    server = Server(folder / "bundled")
    page.open(server.url)
    before = page.texts(".prediction")
    page.until("return document.querySelector('#offline').textContent === 'Works offline'")
    server.close()
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        page.open(f"{server.url}/")
        assert page.texts(".prediction") == before
        assert page.probabilities(encoded(noise((60, 50))))[0] < 1
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})


SETTINGS = [
    {"interpolation": "bicubic", "image_size": (30, 20), "fit": "crop", "scaled_size": (33, 33)},
    {"interpolation": "bilinear", "image_size": (64, 64), "fit": "crop", "floor_crop": True},
    {"interpolation": "lanczos", "image_size": (17, 25)},
    {"interpolation": "area", "image_size": (16, 16), "fit": "crop", "scaled_size": (21, 21)},
    {"interpolation": "nearest", "image_size": (48, 30), "antialias": False},
    {"interpolation": "bilinear", "image_size": (19, 40), "antialias": False},
    {"interpolation": "bicubic", "image_size": (20, 20), "mean": (0.4,), "std": (0.3,)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_preprocessing_gives_the_same_levels(settings, url, page, small):
    preprocess = Preprocess(**settings)
    page.visit(f"{url}/small/")
    script = """const [width, height, levels, settings, done] = arguments;
      import("./page/preprocess.js").then(({ preprocess }) => {
        const { pixels } = preprocess({ data: Uint8ClampedArray.from(levels), width, height }, settings);
        done([...pixels]);
      });"""
    for size in ((40, 70), (90, 31), (20, 30)):
        image = noise(size, seed=sum(size))
        levels = np.asarray(image.convert("RGBA")).ravel().tolist()
        found = page.browser.execute_async_script(script, *size, levels, preprocess.to_json())
        # two levels of 255: from version 13 on, Pillow resizes rows before columns where that is cheaper
        atol = 2.01 / 255 / preprocess.std[0]
        np.testing.assert_allclose(found, image_pixels(image, preprocess).ravel(), atol=atol, rtol=0)


def test_the_graph_for_single_images_of_an_optimized_folder_is_taken(runtime, small_graph, tmp_path, monkeypatch):
    monkeypatch.setattr(web, "BROWSERS", ("no-such-browser",))
    certificate = vt.export(small_graph, tmp_path / "site", to="web")
    assert (tmp_path / "site" / "model.onnx").read_bytes() == (small_graph / "single.onnx").read_bytes()
    assert certificate.browser_difference is None
    assert certificate.largest_difference == 0
    assert '"temperature": 2.5' in (tmp_path / "site" / "model.json").read_text()


def test_a_graph_in_int8_computes_the_same_in_the_browser(runtime, browser, tmp_path):
    model = small_vit()
    pixels = preprocess_image(CAT.read_bytes(), model.meta.preprocess)[None]
    smoothed, inputs = int8.prepare(model, [torch.cat([pixels, pixels.flip(-1)])])
    vt.export(smoothed, tmp_path / "float.onnx")
    graph = tmp_path / "int8" / "model.onnx"
    graph.parent.mkdir()
    int8.write_int8(tmp_path / "float.onnx", graph, smoothed, int8.rounded_layers(smoothed, inputs))
    certificate = vt.export(graph.parent, tmp_path / "site", to="web")
    assert (tmp_path / "site" / "model.onnx").read_bytes() == graph.read_bytes()
    assert 0 <= certificate.browser_difference <= 0.01


def test_a_missing_browser_is_reported(runtime, small_graph, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(web, "BROWSERS", ("no-such-browser",))
    vt.export(small_graph, tmp_path / "site", to="web")
    assert "note: the predictions were not compared in a browser" in capsys.readouterr().err
    assert not (tmp_path / "site" / "check.html").exists()


def test_predictions_that_differ_are_not_written(runtime, small_graph, tmp_path, monkeypatch):
    monkeypatch.setattr(web, "predict_in_browser", lambda folder: [1.0] + [0.0] * 6)
    with pytest.raises(ConversionError, match=r"not written, probabilities in the browser differ by 0\.\d+, 0\.01 is"):
        vt.export(small_graph, tmp_path / "site", to="web")
    monkeypatch.setattr(web, "predict_in_browser", lambda folder: [float("nan")] * 7)
    with pytest.raises(ConversionError, match="differ by nan"):
        vt.export(small_graph, tmp_path / "site", to="web")
    assert list(tmp_path.iterdir()) == []


def test_models_without_classes_are_refused(runtime, tmp_path):
    headless = vt.build(small_vit().config.replace(num_classes=0))
    for model in (headless, small_vit(score_function="identity")):
        with pytest.raises(ConversionError, match="needs a model that predicts classes, one image at a time"):
            vt.export(model, tmp_path / "site", to="web")
    with pytest.raises(ConversionError, match="one image at a time"):
        vt.export(small_vit(), tmp_path / "site", to="web", batch_size=2)
    naflex = small_vit(preprocess=Preprocess(image_size=(48, 64), fit="naflex", patch_size=16, max_num_patches=12))
    with pytest.raises(ConversionError, match="needs one size of images; give image_size"):
        vt.export(naflex, tmp_path / "site", to="web", dynamic_size=True)
    assert not (tmp_path / "site").exists()


def test_a_runtime_that_is_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "DOWNLOAD_URL", tmp_path.as_uri())
    for name in web.RUNTIME_FILES:
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(HubError, match="its SHA-256 is another one"):
        vt.export(small_vit(), tmp_path / "site", to="web")
    with pytest.raises(ConversionError, match="give the name of a folder"):
        vt.export(small_vit(), tmp_path / "site.onnx", to="web")


def test_the_makefile_installs_the_pinned_version():
    assert f"{web.PACKAGE}@{web.VERSION}" in (ROOT / "Makefile").read_text()

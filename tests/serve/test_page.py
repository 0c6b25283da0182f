"""The page in a real browser: upload, answer, hover, brush, sliders, errors, phone, keyboard, link, saved file."""

from __future__ import annotations

import base64
import re
import time
from importlib.resources import files

import numpy as np
import pytest
import torch
from processes import Process
from test_service_targets import model_of
from tiny_service import photo, tiny_digits, tiny_vit
from two_towers import save_clip

import vitruvian as vt
from browsing import Page
from vitruvian.config import Preprocess
from vitruvian.data.preprocess import preprocess_image
from vitruvian.report.html import render

PHOTOS = files("vitruvian.serve") / "page"
PREDICTIONS = """const body = new FormData();
  return fetch("page/cat.jpg").then((r) => r.blob()).then((blob) => {
    body.append("image", blob, "cat.jpg");
    body.append("model", "one");
    return fetch("predict", { method: "POST", body });
  }).then((r) => r.json()).then((c) => c.results[0].predictions);"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    vt.save(tiny_vit(), folder / "one")
    vt.save(tiny_vit(1, size=48), folder / "two")
    vt.save(tiny_digits(), folder / "digits")
    save_clip(folder / "clip")
    doubtful = tiny_vit()
    doubtful.meta = doubtful.meta.replace(threshold=1.0)
    vt.save(doubtful, folder / "doubtful")
    vt.save(tiny_vit(2, num_classes=3, num_heads=4, depth=4), folder / "heads")
    vt.save(tiny_vit(3, cls_token=False, pool="mean"), folder / "mean")
    vt.save(tiny_vit(4, reg_tokens=4), folder / "registers")
    vt.save(tiny_vit(5, patch_size=4), folder / "fine")
    cropped = tiny_vit(6)
    cropped.meta = cropped.meta.replace(preprocess=Preprocess(image_size=(32, 32), fit="crop"))
    vt.save(cropped, folder / "cropped")
    names = ("one", "two", "digits", "clip", "doubtful", "heads", "mean", "registers", "fine", "cropped")
    running = Process(*(part for name in names for part in ("--model", f"{name}={folder / name}")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def targets(browser, tmp_path_factory):
    """A service with a model of several labels, of which one is predicted, and one of numbers."""
    folder = tmp_path_factory.mktemp("targets")
    vt.save(model_of("multi", "sigmoid"), folder / "labels")
    vt.save(model_of("number", "identity"), folder / "numbers")
    running = Process("--model", f"labels={folder / 'labels'}", "--model", f"numbers={folder / 'numbers'}")
    yield running
    running.close()


class InsidePage(Page):
    """The page of the service."""

    ready = (
        "return !!document.querySelector('.prediction, #problem:not([hidden]), #missing:not([hidden])')"
        " && document.documentElement.dataset.pending === '0'"
    )

    def __init__(self, browser, visit, url: str) -> None:
        super().__init__(browser, visit)
        self.url = url

    def open(self, state: str = "", **settings) -> None:
        super().open(f"{self.url}/#{state}" if self.url.startswith("http") else self.url, **settings)

    def predictions(self) -> list[str]:
        return self.texts(".prediction > span:first-child")

    def pixels(self, selector: str = ".grids > figure > canvas") -> str:
        return self.read(selector, "e.toDataURL()")

    def pointer(self, kind: str, x: float, y: float, buttons: int = 0, selector: str = ".grids canvas") -> None:
        """A pointer event at a place of the canvas, from 0 to 1."""
        self.run(
            """const [selector, kind, x, y, buttons] = arguments;
            const canvas = document.querySelector(selector), box = canvas.getBoundingClientRect();
            canvas.setPointerCapture = () => {};
            const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
            canvas.dispatchEvent(new PointerEvent(kind, { ...place, buttons, bubbles: true, pointerId: 1 }));
            if (kind === "pointerup") canvas.dispatchEvent(new MouseEvent("click", { ...place, bubbles: true }));""",
            selector,
            kind,
            x,
            y,
            buttons,
        )

    def save(self):
        """The path of the saved page."""
        saved = self.browser.downloads / "vitruvian.html"
        saved.unlink(missing_ok=True)
        self.click("#save")
        end = time.monotonic() + 60
        while not saved.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return saved

    def caption_of(self, model: str) -> str:
        """The caption of the left map of a model, once it is drawn."""
        return self.texts(f"[data-model={model}] .grids figcaption")[0]

    def slide(self, name: str, value: int) -> None:
        self.read(f"#{name}", f"(e.value = {value}, e.dispatchEvent(new Event('input')))")

    def choose_head(self, layer: int, head: int = -1, model: str = "one") -> None:
        """Click the thumbnail of a layer and a head, by default of the mean of all heads."""
        self.click(f'[data-model={model}] .heads [data-layer="{layer}"][data-head="{head}"]')


@pytest.fixture
def page(browser, visit, service):
    page = InsidePage(browser, visit, service.url)
    page.errors()  # of the test before
    page.open("show=attention")
    return page


def test_the_page_opens_with_a_sample_and_its_answer(page):
    assert len(page.predictions()) == 5, page.texts("#problem, #missing")
    assert page.attribute("#samples [aria-pressed=true]", "data-sample") == "cat"
    assert page.texts(".panel h2") == ["one"]
    assert page.errors() == []


def test_an_upload_is_answered_as_the_library_answers(page, service, tmp_path):
    image = photo(5, size=(300, 200))
    (tmp_path / "own.png").write_bytes(image)
    page.choose(tmp_path / "own.png")
    expected = service.client.post("/predict", files=[("image", ("own.png", image))]).json()
    assert page.predictions() == [a["label"] for a in expected["results"][0]["predictions"]]
    assert page.run("return document.querySelectorAll('#samples [aria-pressed=true]').length") == 0


def test_a_dropped_and_a_pasted_image_are_taken(page):
    send = """const [text, kind] = arguments;
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
        const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
          : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
        document.body.dispatchEvent(event);"""
    before = page.pixels()
    for kind, seed in (("drop", 1), ("paste", 2)):
        page.run(send, base64.b64encode(photo(seed)).decode(), kind)
        after = page.pixels()
        assert after != before
        before = after


def test_hovering_a_patch_shows_where_it_looks_without_asking_the_service(page):
    before = page.pixels()
    page.run(
        "window.asked = 0; const old = window.fetch; window.fetch = (...a) => { window.asked += 1; return old(...a) }"
    )
    page.pointer("pointermove", 0.6, 0.3)
    assert page.pixels() != before
    left, right = page.texts(".grids figcaption")
    assert left.startswith("Patch 1,2 attends to these patches: most to ")
    assert right.startswith("Patches that attend to patch 1,2, most of all ")
    page.pointer("pointerleave", 0.6, 0.3)
    assert page.texts(".grids figcaption")[0].startswith("The class token attends")
    assert page.run("return window.asked") == 0


def test_thumbnails_choose_layer_and_head_and_the_link_keeps_them(page):
    before = page.pixels()
    page.choose_head(0)
    assert page.pixels() != before
    page.choose_head(0, 1)
    page.pointer("pointermove", 0.1, 0.9)
    page.pointer("pointerup", 0.1, 0.9)
    shown, link = page.pixels(), page.link
    assert link.split("#")[1] == "model=one&sample=cat&show=attention&layer=0&head=1&patch=3%2C0"
    assert page.name(".heads [aria-checked=true]") == "layer 0, head 1"
    page.browser.get("about:blank")
    page.browser.get(link)
    assert page.pixels() == shown
    assert page.name(".heads [aria-checked=true]") == "layer 0, head 1"


@pytest.mark.parametrize("show", ["similarity", "rollout", "class"])
def test_every_view_draws_its_map(page, show):
    before = page.pixels()
    page.click(f"[data-show={show}]")
    assert page.pixels() != before
    assert page.run("return document.querySelector('.heads-part').hidden") == (show != "similarity")
    assert page.errors() == []


def test_an_answer_is_clicked_for_its_class_map(page):
    page.click(".prediction", 2)
    assert page.texts(".grids figcaption")[0].endswith(page.predictions()[2])


def test_an_image_of_no_class_is_said_to_be_none_of_these(page):
    assert page.texts(".rejected") == []
    page.open("model=doubtful")
    assert page.texts(".rejected") == ["Rejected (none of the classes); the most similar are:"]
    assert len(page.predictions()) == 5
    assert page.errors() == []


def test_brushing_erases_patches_and_changes_the_answer(page):
    page.click("[data-show=erase]")
    before = page.texts(".prediction .number")
    page.pointer("pointerdown", 0.1, 0.1, 1)
    for step in range(1, 4):
        page.pointer("pointermove", 0.1 + 0.25 * step, 0.1, 1)
    assert page.texts(".grids figcaption")[0] == "4 of 16 patches erased (25%)"
    assert page.texts(".prediction .number") != before
    assert "erased=f" in page.link
    page.click("#restore")
    assert page.texts(".prediction .number") == before


def test_the_answer_is_read_after_every_layer(page):
    assert len(page.texts(".layers > svg > polyline")) == 5
    label = page.attribute(".layers > svg", "aria-label")
    assert label.startswith("Prediction after each layer: ")
    assert page.predictions()[0] in label


def test_two_models_are_side_by_side_and_hover_together(page):
    page.run("const s = document.querySelector('#compare'); s.value = 'two'; s.dispatchEvent(new Event('change'))")
    assert page.texts(".panel h2") == ["one", "two"]
    page.pointer("pointermove", 0.9, 0.9)
    captions = page.texts(".grids figcaption")
    assert [caption.split(" attends")[0] for caption in captions[::2]] == ["Patch 3,3"] * 2
    left, right = (page.box(f"[data-model={name}]") for name in ("one", "two"))
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]


def test_a_link_to_two_models_works_whichever_answers_first(page, browser):
    slow = """const old = window.fetch; window.fetch = async (path, options) => {
      const first = options?.body instanceof FormData && options.body.get("model") === "one";
      if (first) await new Promise((done) => setTimeout(done, 600));
      return old(path, options); };"""
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": slow})
    try:
        page.open("model=one&with=two&show=attention&patch=1,2&erased=0,5")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert [text.split(" attends")[0] for text in page.texts(".grids figure:first-child figcaption")] == [
        "Patch 1,2"
    ] * 2
    assert page.errors() == []


def test_a_drawn_digit_is_answered_and_kept_in_the_link(page):
    page.open("model=digits&sample=7")
    before = page.pixels()
    assert len(page.texts("#samples button")) == 10
    for step in range(9):
        page.pointer("pointerdown" if step == 0 else "pointermove", 0.5, 0.1 + 0.1 * step, 1, selector="#paper")
    link, shown = page.link, page.pixels()
    digit = link.split("digit=")[1].split("&")[0]
    assert len(digit) == 64
    assert all(row[:2] == "00" and row[3:5] != "00" for row in (digit[i : i + 8] for i in range(0, 64, 8)))
    assert shown != before
    page.browser.get("about:blank")
    page.browser.get(link)
    assert page.pixels() == shown


def test_a_file_that_is_no_image_gets_a_sentence(page, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    page.choose(tmp_path / "broken.png")
    assert "image of 11 bytes: not an image" in page.text("#problem")
    page.click("[data-sample=coffee]")
    assert not page.is_shown("#problem")


def test_nothing_of_the_image_before_stays_below_an_error(page, tmp_path):
    parts = "return ['.prediction', '.layers svg', '.grids:not([hidden])', '.heads-part:not([hidden])']"
    shown = f"{parts}.map((each) => document.querySelectorAll(each).length)"
    assert all(page.run(shown))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    page.choose(tmp_path / "broken.png")
    assert page.run(shown) == [0, 0, 0, 0]
    page.click("[data-sample=coffee]")
    assert all(page.run(shown))


def test_all_of_it_works_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    canvas = ".grids canvas"
    page.press(canvas, Keys.ARROW_RIGHT)
    assert page.texts(".grids figcaption")[0].startswith("Patch 2,2 ")
    page.press(canvas, Keys.ARROW_UP)
    page.press(canvas, Keys.ENTER)
    assert "patch=1%2C2" in page.link
    page.press(canvas, Keys.SPACE)
    page.press(canvas, Keys.ESCAPE)
    assert "patch" not in page.link
    page.press("[data-show=attention]", Keys.ARROW_RIGHT)
    assert page.attribute("[data-show=similarity]", "aria-checked") == "true"
    assert page.run("return document.activeElement.dataset.show") == "similarity"
    page.press("[data-sample=rocket]", Keys.ENTER)
    assert "sample=rocket" in page.link


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(page, dark):
    page.open("sample=coffee", width=360, height=740, dark=dark)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    colors = page.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    light = [sum(map(int, color[4:-1].split(","))) for color in colors]
    assert (light[0] > light[1]) == dark
    small = page.run(
        "return [...document.querySelectorAll('button, select')]"
        ".filter((e) => e.offsetParent && e.offsetHeight < 32).length"
    )
    assert small == 0


def test_what_takes_long_is_said(page):
    page.run(
        "const old = window.fetch;"
        "window.fetch = async (...a) => { await new Promise((done) => setTimeout(done, 400)); return old(...a); }"
    )
    page.click("[data-sample=rocket]")
    assert page.until("return document.querySelector('#busy').textContent")


def test_the_saved_page_works_without_the_service(page, visit, browser):
    page.open("sample=coffee&show=attention&patch=2,1")
    saved = page.save()
    predictions, shown = page.predictions(), page.pixels()
    assert "http:" not in saved.read_text().replace("http://www.w3.org", "").replace("http-equiv", "")
    offline = InsidePage(browser, visit, saved.as_uri())
    offline.open()
    assert offline.predictions() == predictions
    assert offline.pixels() == shown
    for show in ("similarity", "rollout", "class", "attention"):
        offline.click(f"[data-show={show}]")
    assert offline.pixels() == shown
    offline.choose_head(0)
    assert offline.pixels() != shown
    assert offline.errors() == []


def test_every_class_of_the_saved_page_has_its_own_map(page, visit, browser):
    page.open("sample=coffee&show=class&erased=3")
    maps = []
    for number in range(3):
        page.click(".prediction", number)
        maps.append((page.texts(".grids figcaption")[0], page.pixels()))
    assert len(set(maps)) == 3
    offline = InsidePage(browser, visit, page.save().as_uri())
    offline.open()
    for number, expected in enumerate(maps):
        offline.click(".prediction", number)
        assert (offline.texts(".grids figcaption")[0], offline.pixels()) == expected
    assert offline.errors() == []


def test_a_saved_page_says_that_erasing_needs_the_service(page, visit, browser):
    from selenium.webdriver.common.keys import Keys

    page.open("sample=coffee&show=attention&erased=3")
    numbers = page.texts(".prediction .number")
    offline = InsidePage(browser, visit, page.save().as_uri())
    offline.open()
    assert offline.texts(".prediction .number") == numbers
    assert offline.texts(".grids figcaption")[0].endswith("with 2 of 16 patches erased")
    offline.press(".grids canvas", Keys.ARROW_RIGHT, Keys.SPACE)
    assert offline.text("#problem") == "This is a saved page: erasing patches needs the running service."
    assert offline.texts(".prediction .number") == numbers
    assert not offline.is_shown("#restore")


def test_a_link_to_an_own_image_asks_for_it(page, tmp_path):
    (tmp_path / "own.png").write_bytes(photo(5, size=(300, 200)))
    page.choose(tmp_path / "own.png")
    page.choose_head(0)
    link, shown = page.link, page.pixels()
    page.open(link.split("#")[1])
    assert "The image is not part of this link." in page.text("#missing")
    assert page.predictions() == []
    assert not page.is_shown("#panels")
    page.choose(tmp_path / "own.png")
    assert page.pixels() == shown
    assert not page.is_shown("#missing")
    page.open(link.split("#")[1])
    page.click("[data-sample=rocket]")
    assert "image=own" not in page.link
    assert page.errors() == []


def test_the_link_is_copied_or_shown_where_there_is_no_clipboard(page, tmp_path):
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
    page.run("document.execCommand = () => false")
    page.click("#link")
    field = "const f = document.querySelector('#copied-link'); return f.value.slice(f.selectionStart, f.selectionEnd)"
    assert page.run(field) == f"{page.url}/#model=one&sample=cat&show=attention"
    assert page.texts("#copied-text") == ["Copy this link:"]
    page.run("document.execCommand = () => true")
    (tmp_path / "own.png").write_bytes(photo(5))
    page.choose(tmp_path / "own.png")
    page.click("#link")
    assert page.texts("#copied-text") == ["Copied. The image is not part of it:"]
    page.choose_head(0)
    assert not page.is_shown("#copied")
    assert page.errors() == []


def test_another_link_in_the_same_tab_is_opened(page):
    page.browser.get(f"{page.url}/#model=two&sample=rocket")
    page.until("return document.querySelector('.panel')?.dataset.model === 'two'")
    page.press(".skip", "\n")
    assert page.run("return document.activeElement.id") == "panels"
    assert "model=two" in page.link


@pytest.mark.parametrize("show", ["attention", "similarity", "rollout", "class"])
def test_maps_and_chart_are_of_the_image_with_its_erased_patches(page, show):
    chart = "return [...document.querySelectorAll('.layers > svg > polyline')].map((e) => e.getAttribute('points'))"
    listen = """window.erased = []; const old = window.fetch; window.fetch = (path, options) => {
      if (path === "inspect") window.erased.push([options.body.get("parts"), options.body.get("erased")]);
      return old(path, options); };"""
    page.open(f"show={show}")
    whole, values = page.run(chart), page.pixels()
    page.open(f"show={show}&erased=ff")
    expected, pixels = page.run(chart), page.pixels()
    assert expected != whole
    page.open(f"show={show}")
    page.run(listen)
    for column in range(4):
        for row in range(2):
            page.click("[data-show=erase]")
            page.pointer("pointerdown", 0.1 + 0.25 * column, 0.1 + 0.25 * row, 1)
    page.click(f"[data-show={show}]")
    assert page.run(chart) == expected
    assert page.pixels() == pixels != values
    requested = page.run("return window.erased")
    assert all(erased for parts, erased in requested if parts != "scores")
    assert any("layers" in parts for parts, _ in requested)
    assert page.texts(".grids figcaption")[0].endswith(", with 8 of 16 patches erased")
    assert page.texts(".last h3") == ["Predictions after each layer, with 8 of 16 patches erased"]
    page.click("#restore")
    assert page.run(chart) == whole
    assert page.pixels() == values


def test_captions_name_the_tokens_that_the_model_has(page):
    assert page.texts(".grids figcaption")[0].startswith("The class token attends to these patches: most to ")
    assert page.texts(".grids figcaption")[0].endswith("% to itself")
    page.open("model=mean&show=attention")
    left, right = page.texts(".grids figcaption")
    assert left.startswith("On average, patches attend to these patches: most to ")
    assert right == "The input of the model"
    assert not any("class token" in caption for caption in (left, right))
    page.pointer("pointermove", 0.6, 0.3)
    assert not any("token" in caption for caption in page.texts(".grids figcaption"))
    page.open("model=registers&show=attention")
    left = page.texts(".grids figcaption")[0]
    assert left.startswith("The class token attends to these patches: most to ")
    assert re.search(r", [<\d.]+% to itself, [<\d.]+% to the 4 register tokens$", left)
    page.pointer("pointermove", 0.6, 0.3)
    left = page.texts(".grids figcaption")[0]
    assert re.search(r", [<\d.]+% to the class token, [<\d.]+% to the 4 register tokens$", left)
    assert page.errors() == []


def test_a_head_of_the_second_model_is_chosen_in_the_first_model_too(page):
    page.open("model=one&with=heads&show=attention")
    marked = (
        "return [...document.querySelectorAll('.heads')]"
        ".map((e) => e.querySelector('[aria-checked=true]').getAttribute('aria-label'))"
    )
    page.choose_head(3, 1, "heads")
    assert page.run(marked) == ["layer 1, head 1", "layer 3, head 1"]
    page.choose_head(3, 3, "heads")
    assert page.run(marked) == ["layer 1, mean of all heads", "layer 3, head 3"]
    titles = page.texts(".heads-part h3")
    missing = "this model has no head 3, so the mean is shown"
    assert titles == [f"All layers and heads; {missing}", "All layers and heads"]
    page.choose_head(0, 0)
    assert page.run(marked) == ["layer 0, head 0", "layer 0, head 0"]


def test_patches_are_erased_in_either_of_two_grids(page):
    page.open("model=one&with=fine&show=erase")
    for model, other, x in (("fine", "one", 0.8), ("one", "fine", 0.1)):
        page.pointer("pointerdown", x, 0.94, 1, selector=f"[data-model={model}] .grids canvas")
        captions = [page.caption_of(name) for name in ("one", "fine")]
        assert captions == ["1 of 16 patches erased (6.3%)", "4 of 64 patches erased (6.3%)"]
        page.click("#restore")
        assert page.caption_of(other) == "Brush over patches to erase them."
    assert page.errors() == []


def test_a_class_of_one_model_is_not_asked_of_a_model_with_other_classes(page):
    page.open("model=one&with=heads&show=class")
    page.click("[data-model=one] .prediction", 4)
    assert page.texts("[data-model=one] .prediction[aria-pressed=true]")[0].startswith(page.predictions()[4])
    own = page.texts("[data-model=heads] .prediction > span:first-child")
    assert page.caption_of("heads").endswith(f"evidence for {own[0]}")
    page.click("[data-model=heads] .prediction", 1)
    assert page.caption_of("heads").endswith(f"evidence for {own[1]}")
    assert page.caption_of("one").endswith(f"evidence for {page.predictions()[0]}")
    assert page.errors() == []


STATES = (
    "",
    "show=class",
    "show=erase&erased=3",
    "model=one&with=heads&head=3",
    "image=own",
    "model=digits",
    "model=clip",
)


@pytest.mark.parametrize("state", STATES)
def test_the_page_violates_no_rule_of_accessibility(page, violations, state):
    for width in (1366, 390):
        for dark in (False, True):
            page.open(state, width=width, dark=dark)
            page.click("#link")
            assert violations() == []


def test_the_documentation_of_the_api_violates_no_rule_of_accessibility(page, visit, violations):
    for width in (1366, 390):
        for dark in (False, True):
            visit(f"{page.url}/docs", width=width, dark=dark)
            assert violations() == []
            assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_sliders_have_names_and_changes_are_announced(page):
    for name, label, text in (("step", "Step", "1 of 9: The image"), ("opacity", "Opacity", "70%")):
        assert page.name(f"#{name}") == label
        assert page.attribute(f"#{name}", "aria-valuetext") == text
    assert page.run("return [...document.querySelectorAll('.grids figcaption')].every((e) => e.ariaLive === 'polite')")
    assert page.texts(".panel [role=status]")[0] == f"{page.predictions()[0]}, {page.texts('.prediction .number')[0]}"


def test_forced_colors_keep_bars_and_selection(page):
    page.open("show=class", forced=True)
    color = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    for chosen, other in (
        (".prediction[aria-pressed=false] .fill", ".prediction[aria-pressed=false] .track"),
        (".prediction[aria-pressed=true] .fill", ".prediction[aria-pressed=true] .track"),
        (".prediction[aria-pressed=true]", ".prediction[aria-pressed=false]"),
        ("[data-show=class]", "[data-show=attention]"),
    ):
        assert page.run(color, chosen) != page.run(color, other)


def test_the_legend_has_the_dashes_of_the_lines(page):
    dashes = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getAttribute('stroke-dasharray'))"
    lines = page.run(dashes, ".layers > svg > polyline")
    assert page.run(dashes, ".legend polyline") == lines[::-1]
    assert len(set(lines)) == 5


@pytest.mark.parametrize("state", ["model=one", "model=digits", "model=one&with=heads"])
def test_a_phone_shows_the_image_first_and_keeps_the_controls_in_reach(page, state):
    page.open(state, width=390, height=844)
    image, controls = page.box(".photo canvas"), page.box("#controls")
    assert image["y"] + image["height"] < 844 - controls["height"]
    for _ in range(2):
        place = page.run(
            "const b = document.querySelector('#controls').getBoundingClientRect(); return [b.top, b.bottom]"
        )
        assert 844 / 2 < place[0] < place[1] <= 844
        page.run("scrollTo(0, document.body.scrollHeight)")
    footer = page.run("return document.querySelector('footer').getBoundingClientRect().bottom")
    assert footer <= place[0]  # nothing stays hidden behind the controls


def test_a_model_with_a_text_tower_answers_in_the_words_that_are_typed(page):
    page.open("model=clip")
    assert sorted(page.predictions()) == sorted(["a photo of a cat", "a photo of a dog", "a cup of coffee", "a rocket"])
    page.run("document.querySelector('#labels-text').value = 'red, green'")
    page.click("#labels button")
    assert sorted(page.predictions()) == ["green", "red"]
    assert "labels=red" in page.run("return location.hash")
    assert "zero-shot" in page.texts(".about")[0]
    assert page.texts("#show button:not([hidden])") == ["Rollout", "Attention", "Similar patches", "Erase"]
    assert page.errors() == []
    page.open("model=one")
    assert page.run("return document.querySelector('#labels').hidden")


def test_every_number_of_the_steps_is_that_of_forward_intermediates(page):
    model = tiny_vit()
    pixels = preprocess_image(PHOTOS / "cat.jpg", model.meta.preprocess)[None]
    with torch.no_grad():
        values = model.forward_intermediates(pixels, model.intermediate_names)
    shown = "return [...document.querySelectorAll(arguments[0])].map((e) => Number(e.dataset.value ?? e.textContent))"

    def numbers(selector: str, step: int) -> list[float]:
        page.slide("step", step)
        return page.run(shown, f".numbers {selector}")

    patch = 1 + 2 * 4 + 2  # the token of the patch in the middle
    colors = ((pixels[0, :, 16, 16:20] * 0.5 + 0.5) * 255).T.flatten().tolist()
    for step in (0, 1):
        assert numbers(".value", step) == pytest.approx(colors, abs=0.51)
    vectors = numbers(".first .value", 2)
    assert vectors[12:] == pytest.approx(values["embedded"][0, patch, :6].tolist(), abs=6e-4)
    assert [a + b for a, b in zip(vectors, vectors[6:12])] == pytest.approx(vectors[12:], abs=2e-3)
    order = [prediction["index"] for prediction in page.run(PREDICTIONS)]
    before = values["embedded"]
    for layer in range(2):
        weights = values[f"block_{layer}/attention"][0].mean(dim=0)[0]
        rows = numbers(".bar-row .value", 3 + 2 * layer)
        assert rows == pytest.approx(weights.sort(descending=True).values[:5].tolist(), abs=1e-4)
        after = values[f"block_{layer}"]
        expected = torch.cat([before[0, 0, :6], (after - before)[0, 0, :6], after[0, 0, :6]])
        assert numbers(".first .value", 4 + 2 * layer) == pytest.approx(expected.tolist(), abs=6e-4)
        with torch.no_grad():
            logits = model.forward_head(model.norm(after))[0]
        listed = page.run(shown, ".numbers .bar-row .value")
        assert set(np.round(listed, 3)) <= set(np.round(logits.tolist(), 3))
        assert listed[0] == pytest.approx(float(logits.max()), abs=1e-4)
        before = after
    assert numbers(".first .value", 7) == pytest.approx(values["pooled"][0, :6].tolist(), abs=6e-4)
    assert page.run(shown, ".numbers .bar-row .value") == pytest.approx(values["logits"][0, order].tolist(), abs=1e-4)
    final = values["logits"][0].softmax(dim=0)
    assert numbers(".bar-row .value", 8) == pytest.approx(final[order].tolist(), abs=1e-4)
    page.pointer("pointerup", 0.9, 0.9, selector=".scene")
    rows = numbers(".first .value", 4)
    assert rows[:6] == pytest.approx(values["embedded"][0, 16, :6].tolist(), abs=6e-4)
    assert page.errors() == []


def test_the_steps_are_played_and_stepped_and_the_chart_follows(page):
    cursor = "return document.querySelector('.layers .now').style.transform"
    titles = []
    for _ in range(3):
        page.click("#next")
        titles.append((page.texts(".told h3")[0], page.run(cursor)))
    assert [title for title, _ in titles] == ["Patches", "Tokens", "Attention of block 0"]
    assert len({place for _, place in titles}) == 3
    assert "step=attention&" in page.link
    assert page.name(".spine [aria-current]") == "Block 0"
    page.click("#back")
    assert page.texts(".told h3")[0] == "Tokens"
    page.click("#play")
    page.until("return document.querySelector('#step').value === '8'", 40)
    page.until("return document.querySelector('#play').textContent === 'Play'")
    assert page.texts(".told h3")[0] == "Probabilities"
    page.run(LISTEN_TO_LINKS)
    page.click(".play-layers")
    page.until("return document.querySelector('.play-layers').textContent === 'Play the layers'")
    layers = [link.partition("layer=")[2] for link in page.run("return window.links")]
    assert layers == ["0", "1"]
    assert page.errors() == []


LISTEN_TO_LINKS = """window.links = []; const old = history.replaceState.bind(history);
  history.replaceState = (...a) => { window.links.push(a[2]); old(...a); };"""


def test_the_scene_is_operated_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    page.open("step=patches")
    page.press(".scene", Keys.ARROW_LEFT)
    assert "Patch 2,1" in page.texts(".pixels")[0]
    page.press(".scene", Keys.ENTER)
    assert "patch=2%2C1" in page.link
    page.press(".scene", Keys.ESCAPE)
    assert "patch=" not in page.link


SINKS = """const old = window.fetch; window.fetch = async (path, options) => {
  const response = await old(path, options);
  if (!(options?.body instanceof FormData) || options.body.get("parts") !== "heads") return response;
  const content = await response.json();
  const floats = new Float32Array(32).fill(0.01);
  floats[5] = floats[16 + 5] = 0.6;
  const data = btoa(String.fromCharCode(...new Uint8Array(floats.buffer)));
  content.received = { shape: [2, 16], bits: 32, data };
  return new Response(JSON.stringify(content)); };"""


def test_attention_sinks_are_named_and_left_out_of_the_colors(page, browser):
    assert not page.is_shown("#sinks-control")
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SINKS})
    try:
        page.open("show=attention")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert page.texts(".sinks")[0].startswith("1 attention sink 1,1: nearly all tokens attend to it")
    assert "60% of all attention" in page.texts(".sinks")[0]
    assert page.read("#sinks", "e.checked")
    without = page.pixels()
    page.click("#sinks")
    assert page.pixels() != without
    assert "sinks=in" in page.link


def test_color_scales_are_robust_and_sinks_are_outliers(page):
    arrays = "const done = arguments[0]; import('./page/arrays.js').then((m) => done({}))"
    call = arrays.replace(
        "{}",
        "{ scale: m.scaleOf(Float32Array.from({ length: 101 }, (_, i) => i === 100 ? 1000 : i)),"
        " out: m.scaleOf(Float32Array.from([1, 2, 3, 900]), new Set([3])),"
        " sinks: [...m.sinksOf(Float32Array.from({ length: 64 }, (_, i) => ({ 3: 0.1, 7: 0.3, 9: 0.3 })[i] ?? 0.005))],"
        " none: [...m.sinksOf(Float32Array.from({ length: 64 }, (_, i) => i / 64))] }",
    )
    found = page.browser.execute_async_script(call)
    assert found["scale"]["low"] == pytest.approx(2)
    assert found["scale"]["high"] == pytest.approx(98)
    assert found["scale"]["cutHigh"]
    assert found["out"]["high"] < 3
    assert found["sinks"] == [7, 9]
    assert found["none"] == []


def test_the_first_map_is_the_one_with_the_best_deletion_score(page):
    page.open()
    text = page.texts(".scores")[0]
    found = re.findall(r"(Class map|Rollout|Attention|random order) (\d\.\d+)( best)?", text)
    assert {name for name, _, _ in found} == {"Class map", "Rollout", "Attention", "random order"}
    scores = {name: float(score) for name, score, _ in found if name != "random order"}
    (best,) = (name for name, _, mark in found if mark)
    assert scores[best] == min(scores.values())
    assert page.texts("#show [aria-checked=true]")[0] == best
    assert "show=" not in page.link
    assert page.text("#can").startswith("Can tell")
    assert page.text("#cannot").startswith("Cannot tell")


def test_opacity_and_numbers_belong_to_the_colors(page):
    before = page.pixels()
    page.slide("opacity", 20)
    assert page.pixels() != before
    low, high = page.texts(".grids figure:first-child .bar span")
    assert re.fullmatch(r"≤ [<\d.]+%", low)
    assert re.fullmatch(r"≥ [<\d.]+%", high)
    assert page.run("return document.querySelectorAll('.grids figcaption .chip canvas').length") >= 1


def test_several_images_become_a_strip_with_their_predictions(page, tmp_path):
    for name, seed in (("first.png", 5), ("second.png", 6)):
        (tmp_path / name).write_bytes(photo(seed))
    page.choose(tmp_path / "first.png", tmp_path / "second.png")
    assert page.text(".photo strong") == "first.png"
    first = page.predictions()[0]
    assert page.texts("#film span")[0].startswith(first)
    page.click("#film button", 1)
    assert page.texts("#film span")[1].startswith(page.predictions()[0])
    assert page.errors() == []


def test_the_frame_the_name_and_the_time_stand_beside_the_image(page):
    assert page.text(".photo figcaption") == "sample cat 400 × 266 pixels, all of it seen by the model"
    page.open("model=cropped")
    assert page.text(".photo figcaption") == "sample cat 400 × 266 pixels; the model sees the 67% inside the frame"
    assert re.fullmatch(r"predicted in \d+ ms", page.text(".time"))


def test_the_request_is_copied_for_curl_and_python(page, monkeypatch, tmp_path, capsys):
    (tmp_path / "own.png").write_bytes(photo(5))
    page.choose(tmp_path / "own.png")
    page.click("[data-copy=curl]")
    code = "return document.querySelector('#copied-link').value"
    assert page.run(code) == f"curl -F 'image=@own.png' -F 'model=one' {page.url}/predict"
    page.click("[data-copy=python]")
    monkeypatch.chdir(tmp_path)
    exec(compile(page.run(code), "copied", "exec"), {})
    assert f"'label': '{page.predictions()[0]}'" in capsys.readouterr().out


def test_two_models_are_swiped_over_one_picture(page):
    assert not page.is_shown("#swipe")
    page.open("model=one&with=two&show=rollout")
    before = page.pixels("#swipe canvas")
    page.slide("swipe-at", 10)
    assert page.pixels("#swipe canvas") != before
    assert page.text("#swipe figcaption").startswith("one: class ")


def test_examples_tell_a_story(page):
    assert len(page.texts("#stories button")) == 4
    page.click("#stories button")
    assert page.text("#story-title") == "Erase an eye."
    assert "show=erase" in page.link
    page.click("#story-close")
    assert not page.is_shown("#story")
    page.click("#stories button", 2)
    assert page.texts(".told h3")[0] == "MLP of block 0"
    assert page.errors() == []


def test_a_tour_is_offered_and_can_be_dismissed(page):
    from selenium.webdriver.common.keys import Keys

    page.run("localStorage.clear()")
    page.open()
    page.click("#welcome-start")
    assert page.text("#tour-title") == "An image and its predictions"
    page.click("#tour-next")
    assert page.text("#tour-title") == "Patches"
    assert "step=patches" in page.link
    page.press("#tour-next", Keys.ESCAPE)
    assert not page.is_shown("#tour")
    page.open()
    assert not page.is_shown("#welcome")
    page.click("#tour-start")
    for _ in range(7):
        page.click("#tour-next")
    assert not page.is_shown("#tour")
    assert page.errors() == []


def test_terms_are_explained_where_they_stand_and_in_the_glossary(page):
    page.open("step=attention")
    assert "weighted mean" in page.run("return document.querySelector('.sentence .term').dataset.tip")
    page.click(".sentence .term")
    assert page.is_shown("#glossary")
    assert page.text("dt.here") == "Attention"
    assert len(page.texts("dt")) > 12
    page.click("#glossary-close")
    assert not page.is_shown("#glossary")


def test_all_text_of_the_page_is_in_one_file():
    exported = PHOTOS.parent / "web"
    for template, symbols in (("page_inside.html", ["◀", "▶"]), ("page_web.html", [])):
        html = re.sub(r"<!--.*?-->", "", render(template), flags=re.DOTALL)
        assert re.sub(r"<(title|h1)>.*?</\1>|<[^>]+>", "", html).split() == symbols
    for script in (*PHOTOS.glob("*.js"), *exported.glob("*.js")):
        if script.name != "text.js":
            code = re.sub(r"//.*", "", script.read_text(encoding="utf-8"))
            assert re.findall(r"[\"'`][A-Z][a-z]+(?: [a-z]+){2,}", code) == [], script.name


def test_several_labels_and_numbers_are_shown_as_such(browser, visit, targets):
    page = InsidePage(browser, visit, targets.url)
    page.errors()
    page.open("model=labels")
    assert page.texts(".first .prediction:not(.unlikely) > span:first-child") == ["output 0"]
    unlikely = page.texts(".first .prediction.unlikely .number")
    assert unlikely
    assert all(text.endswith("%, below its threshold") for text in unlikely)
    page.open("model=numbers")
    for text in page.texts(".first .prediction .number"):
        value, low, high = map(float, re.fullmatch(r"(\S+) \((\S+) to (\S+)\)", text).groups())
        assert high - low == pytest.approx(2, abs=0.02)  # four digits are shown
        assert value == pytest.approx((low + high) / 2, abs=0.02)
    assert page.texts(".first .prediction .track") == []
    assert page.errors() == []

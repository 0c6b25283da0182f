"""The page in a real browser: upload, answer, hover, brush, sliders, errors, phone, keyboard, link, saved file."""

from __future__ import annotations

import base64
import re
import time

import pytest
from processes import Process
from tiny_service import photo, tiny_digits, tiny_vit
from two_towers import save_clip

import vitruvian as vt

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
    names = ("one", "two", "digits", "clip", "doubtful", "heads", "mean", "registers", "fine")
    running = Process(*(part for name in names for part in ("--model", f"{name}={folder / name}")))
    yield running
    running.close()


class Page:
    """The page and what tests ask of it."""

    def __init__(self, browser, visit, url: str) -> None:
        self.browser, self.visit, self.url = browser, visit, url

    def open(self, state: str = "", **settings) -> None:
        self.visit(f"{self.url}/#{state}" if self.url.startswith("http") else self.url, **settings)
        self.settled()

    def settled(self) -> None:
        """Wait until answers are there and nothing is under way."""
        ready = (
            "return !!document.querySelector('.prediction, #problem:not([hidden]), #missing:not([hidden])')"
            " && !document.querySelector('#busy').textContent"
        )
        self.until(ready)
        time.sleep(0.15)
        self.until(ready)

    def until(self, script: str, seconds: float = 20) -> object:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.03)
        raise AssertionError(f"not in {seconds} s: {script}")

    def run(self, script: str, *values: object) -> object:
        return self.browser.execute_script(script, *values)

    def find(self, selector: str):
        return self.browser.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def predictions(self) -> list[str]:
        return self.texts(".prediction > span:first-child")

    def pixels(self, selector: str = ".grids canvas") -> str:
        return self.run("return document.querySelector(arguments[0]).toDataURL()", selector)

    def upload(self, path) -> None:
        self.find("#file").send_keys(str(path))
        self.settled()

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
        self.find("#save").click()
        end = time.monotonic() + 60
        while not saved.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return saved

    def caption_of(self, model: str) -> str:
        """The caption of the left map of a model, once it is drawn."""
        text = f"return document.querySelector('[data-model={model}] figcaption').textContent"
        self.settled()
        return str(self.until(text))

    def slide(self, name: str, value: int) -> None:
        self.run(f"const s = document.querySelector('#{name}'); s.value = {value}; s.dispatchEvent(new Event('input'))")
        self.settled()

    def errors(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def page(browser, visit, service):
    page = Page(browser, visit, service.url)
    page.errors()  # of the test before
    page.open()
    return page


def test_the_page_opens_with_a_sample_and_its_answer(page):
    assert len(page.predictions()) == 5
    assert page.find("#samples [aria-pressed=true]").get_attribute("data-sample") == "cat"
    assert page.texts(".panel h2") == ["one"]
    assert page.errors() == []


def test_an_upload_is_answered_as_the_library_answers(page, service, tmp_path):
    image = photo(5, size=(300, 200))
    (tmp_path / "own.png").write_bytes(image)
    page.upload(tmp_path / "own.png")
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
        page.until("return !location.hash.includes('sample')")
        page.settled()
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


def test_sliders_choose_layer_and_head_and_the_link_keeps_them(page):
    set_value = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    before = page.pixels()
    page.run(set_value, page.find("#layer"), 0)
    page.settled()
    assert page.pixels() != before
    page.run(set_value, page.find("#head"), 1)
    page.settled()
    page.pointer("pointermove", 0.1, 0.9)
    page.pointer("pointerup", 0.1, 0.9)
    shown, link = page.pixels(), page.browser.current_url
    assert link.split("#")[1] == "model=one&sample=cat&layer=0&head=1&patch=3%2C0"
    assert page.find(".heads [aria-pressed=true]").text == "head 1"
    page.browser.get("about:blank")
    page.browser.get(link)
    page.settled()
    assert page.pixels() == shown
    assert page.texts("#layer-text, #head-text") == ["0 of 1", "1 of 1"]


@pytest.mark.parametrize("show", ["similarity", "rollout", "class"])
def test_every_view_draws_its_map(page, show):
    before = page.pixels()
    page.find(f"[data-show={show}]").click()
    page.settled()
    assert page.pixels() != before
    assert page.run("return document.querySelector('.heads-part').hidden")
    assert page.errors() == []


def test_an_answer_is_clicked_for_its_class_map(page):
    page.run("document.querySelectorAll('.prediction')[2].click()")
    page.settled()
    assert page.texts(".grids figcaption")[0].endswith(page.predictions()[2])


def test_an_image_of_no_class_is_said_to_be_none_of_these(page):
    assert page.texts(".rejected") == []
    page.open("model=doubtful")
    assert page.texts(".rejected") == ["Rejected (none of the classes); the most similar are:"]
    assert len(page.predictions()) == 5
    assert page.errors() == []


def test_brushing_erases_patches_and_changes_the_answer(page):
    page.find("[data-show=erase]").click()
    before = page.texts(".prediction .number")
    page.pointer("pointerdown", 0.1, 0.1, 1)
    for step in range(1, 4):
        page.pointer("pointermove", 0.1 + 0.25 * step, 0.1, 1)
    page.until("return document.querySelector('.prediction .before')")
    page.settled()
    assert page.texts(".grids figcaption")[0] == "4 of 16 patches erased (25%)"
    assert page.texts(".prediction .number") != before
    assert "erased=f" in page.browser.current_url
    page.find("#restore").click()
    page.settled()
    assert page.texts(".prediction .number") == before


def test_the_answer_is_read_after_every_layer(page):
    assert len(page.texts(".layers > svg > polyline")) == 5
    label = page.find(".layers > svg").get_attribute("aria-label")
    assert label.startswith("Prediction after each layer: ")
    assert page.predictions()[0] in label


def test_two_models_are_side_by_side_and_hover_together(page):
    page.run("const s = document.querySelector('#compare'); s.value = 'two'; s.dispatchEvent(new Event('change'))")
    page.until("return document.querySelectorAll('.panel .predictions:not(:empty)').length === 2")
    page.settled()
    assert page.texts(".panel h2") == ["one", "two"]
    page.pointer("pointermove", 0.9, 0.9)
    captions = page.texts(".grids figcaption")
    assert [caption.split(" attends")[0] for caption in captions[::2]] == ["Patch 3,3"] * 2
    left, right = (page.find(f"[data-model={name}]").rect for name in ("one", "two"))
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]


def test_a_link_to_two_models_works_whichever_answers_first(page, browser):
    slow = """const old = window.fetch; window.fetch = async (path, options) => {
      const first = options?.body instanceof FormData && options.body.get("model") === "one";
      if (first) await new Promise((done) => setTimeout(done, 600));
      return old(path, options); };"""
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": slow})
    try:
        page.open("model=one&with=two&patch=1,2&erased=0,5")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    page.until("return document.querySelectorAll('.layers > svg').length === 2")
    page.settled()
    assert [text.split(" attends")[0] for text in page.texts("figure:first-child figcaption")] == ["Patch 1,2"] * 2
    assert page.errors() == []


def test_a_drawn_digit_is_answered_and_kept_in_the_link(page):
    page.open("model=digits&sample=7")
    before = page.pixels()
    assert len(page.texts("#samples button")) == 10
    for step in range(9):
        page.pointer("pointerdown" if step == 0 else "pointermove", 0.5, 0.1 + 0.1 * step, 1, selector="#paper")
    page.until("return location.hash.includes('digit=')")
    page.settled()
    link, shown = page.browser.current_url, page.pixels()
    digit = link.split("digit=")[1].split("&")[0]
    assert len(digit) == 64
    assert all(row[:2] == "00" and row[3:5] != "00" for row in (digit[i : i + 8] for i in range(0, 64, 8)))
    assert shown != before
    page.browser.get("about:blank")
    page.browser.get(link)
    page.settled()
    assert page.pixels() == shown


def test_a_file_that_is_no_image_gets_a_sentence(page, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    page.upload(tmp_path / "broken.png")
    page.until("return !document.querySelector('#problem').hidden")
    assert "image of 11 bytes: not an image" in page.find("#problem").text
    page.find("[data-sample=coffee]").click()
    page.until("return document.querySelector('#problem').hidden")


def test_nothing_of_the_image_before_stays_below_an_error(page, tmp_path):
    parts = "return ['.prediction', '.layers svg', '.grids:not([hidden])', '.heads-part:not([hidden])']"
    shown = f"{parts}.map((each) => document.querySelectorAll(each).length)"
    assert all(page.run(shown))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    page.upload(tmp_path / "broken.png")
    page.until("return !document.querySelector('#problem').hidden")
    assert page.run(shown) == [0, 0, 0, 0]
    page.find("[data-sample=coffee]").click()
    page.until("return document.querySelector('#problem').hidden")
    page.settled()
    assert all(page.run(shown))


def test_all_of_it_works_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    canvas = page.find(".grids canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert page.texts(".grids figcaption")[0].startswith("Patch 2,2 ")
    canvas.send_keys(Keys.ARROW_UP)
    canvas.send_keys(Keys.ENTER)
    assert "patch=1%2C2" in page.browser.current_url
    canvas.send_keys(Keys.SPACE)
    page.until("return document.querySelector('.prediction .before')")
    canvas.send_keys(Keys.ESCAPE)
    assert "patch" not in page.browser.current_url
    page.find("[data-show=attention]").send_keys(Keys.ARROW_RIGHT)
    assert page.find("[data-show=similarity]").get_attribute("aria-checked") == "true"
    assert page.run("return document.activeElement.dataset.show") == "similarity"
    page.find("[data-sample=rocket]").send_keys(Keys.ENTER)
    page.until("return location.hash.includes('rocket')")


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
    page.find("[data-sample=rocket]").click()
    assert page.until("return document.querySelector('#busy').textContent", 2)
    page.settled()


def test_the_saved_page_works_without_the_service(page, visit, browser):
    page.open("sample=coffee&patch=2,1")
    saved = page.save()
    predictions, shown = page.predictions(), page.pixels()
    assert "http:" not in saved.read_text().replace("http://www.w3.org", "").replace("http-equiv", "")
    offline = Page(browser, visit, saved.as_uri())
    offline.open()
    assert offline.predictions() == predictions
    assert offline.pixels() == shown
    for show in ("similarity", "rollout", "class", "attention"):
        offline.find(f"[data-show={show}]").click()
        offline.settled()
    assert offline.pixels() == shown
    offline.run("const l = document.querySelector('#layer'); l.value = 0; l.dispatchEvent(new Event('input'))")
    offline.settled()
    assert offline.pixels() != shown
    assert offline.errors() == []


def test_every_class_of_the_saved_page_has_its_own_map(page, visit, browser):
    page.open("sample=coffee&show=class&erased=3")
    maps = []
    for number in range(3):
        page.run("document.querySelectorAll('.prediction')[arguments[0]].click()", number)
        page.settled()
        maps.append((page.texts(".grids figcaption")[0], page.pixels()))
    assert len(set(maps)) == 3
    offline = Page(browser, visit, page.save().as_uri())
    offline.open()
    for number, expected in enumerate(maps):
        offline.run("document.querySelectorAll('.prediction')[arguments[0]].click()", number)
        offline.settled()
        assert (offline.texts(".grids figcaption")[0], offline.pixels()) == expected
    assert offline.errors() == []


def test_a_saved_page_says_that_erasing_needs_the_service(page, visit, browser):
    from selenium.webdriver.common.keys import Keys

    page.open("sample=coffee&erased=3")
    numbers = page.texts(".prediction .number")
    offline = Page(browser, visit, page.save().as_uri())
    offline.open()
    assert offline.texts(".prediction .number") == numbers
    assert offline.texts(".grids figcaption")[0].endswith("with 2 of 16 patches erased")
    offline.find(".grids canvas").send_keys(Keys.ARROW_RIGHT, Keys.SPACE)
    assert offline.find("#problem").text == "This is a saved page: erasing patches needs the running service."
    assert offline.texts(".prediction .number") == numbers
    assert not offline.find("#restore").is_displayed()


def test_a_link_to_an_own_image_asks_for_it(page, tmp_path):
    (tmp_path / "own.png").write_bytes(photo(5, size=(300, 200)))
    page.upload(tmp_path / "own.png")
    page.slide("layer", 0)
    link, shown = page.browser.current_url, page.pixels()
    page.open(link.split("#")[1])
    assert "The image is not part of this link." in page.find("#missing").text
    assert page.predictions() == []
    assert not page.find("#panels").is_displayed()
    page.upload(tmp_path / "own.png")
    page.until("return document.querySelector('.prediction')")
    page.settled()
    assert page.pixels() == shown
    assert not page.find("#missing").is_displayed()
    page.open(link.split("#")[1])
    page.find("[data-sample=rocket]").click()
    page.until("return document.querySelector('.prediction')")
    assert "image=own" not in page.browser.current_url
    assert page.errors() == []


def test_the_link_is_copied_or_shown_where_there_is_no_clipboard(page, tmp_path):
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
    page.run("document.execCommand = () => false")
    page.find("#link").click()
    field = "const f = document.querySelector('#copied-link'); return f.value.slice(f.selectionStart, f.selectionEnd)"
    assert page.run(field) == f"{page.url}/#model=one&sample=cat"
    assert page.texts("#copied-text") == ["Copy this link:"]
    page.run("document.execCommand = () => true")
    (tmp_path / "own.png").write_bytes(photo(5))
    page.upload(tmp_path / "own.png")
    page.find("#link").click()
    assert page.texts("#copied-text") == ["Copied. The image is not part of it:"]
    page.slide("layer", 0)
    assert not page.find("#copied").is_displayed()
    assert page.errors() == []


def test_another_link_in_the_same_tab_is_opened(page):
    page.browser.get(f"{page.url}/#model=two&sample=rocket")
    page.until("return document.querySelector('.panel')?.dataset.model === 'two'")
    page.find(".skip").send_keys("\n")
    assert page.run("return document.activeElement.id") == "panels"
    assert "model=two" in page.browser.current_url


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
            page.find("[data-show=erase]").click()
            page.pointer("pointerdown", 0.1 + 0.25 * column, 0.1 + 0.25 * row, 1)
    page.find(f"[data-show={show}]").click()
    page.until("return !document.querySelector('.outdated')")
    page.settled()
    assert page.run(chart) == expected
    assert page.pixels() == pixels != values
    requested = page.run("return window.erased")
    assert all(erased for _, erased in requested)
    assert any("layers" in parts for parts, _ in requested)
    assert page.texts(".grids figcaption")[0].endswith(", with 8 of 16 patches erased")
    assert page.texts(".last h3") == ["Predictions after each layer, with 8 of 16 patches erased"]
    page.find("#restore").click()
    page.settled()
    assert page.run(chart) == whole
    assert page.pixels() == values


def test_captions_name_the_tokens_that_the_model_has(page):
    assert page.texts(".grids figcaption")[0].startswith("The class token attends to these patches: most to ")
    assert page.texts(".grids figcaption")[0].endswith("% to itself")
    page.open("model=mean")
    left, right = page.texts(".grids figcaption")
    assert left.startswith("On average, patches attend to these patches: most to ")
    assert right == "The input of the model"
    assert not any("class token" in caption for caption in (left, right))
    page.pointer("pointermove", 0.6, 0.3)
    assert not any("token" in caption for caption in page.texts(".grids figcaption"))
    page.open("model=registers")
    left = page.texts(".grids figcaption")[0]
    assert left.startswith("The class token attends to these patches: most to ")
    assert re.search(r", [<\d.]+% to itself, [<\d.]+% to the 4 register tokens$", left)
    page.pointer("pointermove", 0.6, 0.3)
    left = page.texts(".grids figcaption")[0]
    assert re.search(r", [<\d.]+% to the class token, [<\d.]+% to the 4 register tokens$", left)
    assert page.errors() == []


def test_a_head_of_the_second_model_moves_the_slider_and_the_first_model(page):
    page.open("model=one&with=heads")
    page.until("return document.querySelectorAll('.heads button').length === 6")
    page.settled()
    pressed = (
        "return [...document.querySelectorAll('.heads')]"
        ".map((e) => e.querySelector('[aria-pressed=true]')?.textContent ?? '')"
    )
    page.run("document.querySelectorAll('[data-model=heads] .heads button')[1].click()")
    assert page.run(pressed) == ["head 1", "head 1"]
    assert page.texts("#head-text") == ["1 of 3"]
    page.run("document.querySelectorAll('[data-model=heads] .heads button')[3].click()")
    assert page.run(pressed) == ["", "head 3"]
    assert page.find("#head").get_attribute("value") == "3"
    titles = page.texts(".heads-part h3")
    assert titles == ["All heads of layer 1; this model has no head 3, so the mean is shown", "All heads of layer 3"]
    page.slide("layer", 0)
    page.slide("head", 0)
    assert page.run(pressed) == ["head 0", "head 0"]
    assert page.texts(".heads-part h3") == ["All heads of layer 0", "All heads of layer 0"]


def test_patches_are_erased_in_either_of_two_grids(page):
    page.open("model=one&with=fine&show=erase")
    for model, other, x in (("fine", "one", 0.8), ("one", "fine", 0.1)):
        page.pointer("pointerdown", x, 0.94, 1, selector=f"[data-model={model}] canvas")
        page.settled()
        captions = [page.caption_of(name) for name in ("one", "fine")]
        assert captions == ["1 of 16 patches erased (6.3%)", "4 of 64 patches erased (6.3%)"]
        page.find("#restore").click()
        page.settled()
        assert page.caption_of(other) == "Brush over patches to erase them."
    assert page.errors() == []


def test_a_class_of_one_model_is_not_asked_of_a_model_with_other_classes(page):
    page.open("model=one&with=heads&show=class")
    page.run("document.querySelectorAll('[data-model=one] .prediction')[4].click()")
    page.settled()
    assert page.find("[data-model=one] [aria-pressed=true]").text.startswith(page.predictions()[4])
    own = page.texts("[data-model=heads] .prediction > span:first-child")
    assert page.caption_of("heads").endswith(f"evidence for {own[0]}")
    page.run("document.querySelectorAll('[data-model=heads] .prediction')[1].click()")
    page.settled()
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
            page.find("#link").click()
            assert violations() == []


def test_the_documentation_of_the_api_violates_no_rule_of_accessibility(page, visit, violations):
    for width in (1366, 390):
        for dark in (False, True):
            visit(f"{page.url}/docs", width=width, dark=dark)
            assert violations() == []
            assert page.run("return document.documentElement.scrollWidth") <= width


def test_sliders_have_names_and_changes_are_announced(page):
    for name, text in (("layer", "1 of 1"), ("head", "mean")):
        slider = page.find(f"#{name}")
        assert slider.accessible_name == name.capitalize()
        assert slider.get_attribute("aria-valuetext") == text
    assert page.run("return [...document.querySelectorAll('figcaption')].every((e) => e.ariaLive === 'polite')")
    status = page.find(".panel [role=status]")
    assert status.get_attribute("textContent") == f"{page.predictions()[0]}, {page.texts('.prediction .number')[0]}"


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
    image, controls = page.find(".grids canvas").rect, page.find("#controls").rect
    assert image["y"] + image["height"] / 2 < 844 - controls["height"]
    assert page.find(".headline").is_displayed()
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
    page.find("#labels button").click()
    page.until("return document.querySelectorAll('.prediction').length === 2")
    page.settled()
    assert sorted(page.predictions()) == ["green", "red"]
    assert "labels=red" in page.run("return location.hash")
    assert "zero-shot" in page.texts(".about")[0]
    assert page.texts("#show button:not([hidden])") == ["Attention", "Similar patches", "Rollout", "Erase"]
    assert page.errors() == []
    page.open("model=one")
    assert page.run("return document.querySelector('#labels').hidden")

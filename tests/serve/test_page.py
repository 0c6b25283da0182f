"""The page in a real browser: upload, answer, hover, brush, sliders, errors, phone, keyboard, link, saved file."""

from __future__ import annotations

import base64
import shutil
import time

import pytest
from processes import Process
from tiny_service import photo, tiny_digits, tiny_vit
from two_towers import save_clip

import vitruvian as vt

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="chromium and chromedriver are not here: make browser installs them"
    ),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    vt.save(tiny_vit(), folder / "one")
    vt.save(tiny_vit(1, size=48), folder / "two")
    vt.save(tiny_digits(), folder / "digits")
    save_clip(folder / "clip")
    doubtful = tiny_vit()
    doubtful.meta = doubtful.meta.replace(threshold=1.0)
    vt.save(doubtful, folder / "doubtful")
    names = ("one", "two", "digits", "clip", "doubtful")
    running = Process(*(part for name in names for part in ("--model", f"{name}={folder / name}")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.downloads = downloads
    yield driver
    driver.quit()


class Page:
    """The page and what tests ask of it."""

    def __init__(self, browser, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, state: str = "", *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.browser.get("about:blank")  # so that a change of the state alone loads the page again
        self.browser.get(f"{self.url}/#{state}" if "://" in self.url and self.url.startswith("http") else self.url)
        self.settled()

    def settled(self) -> None:
        """Wait until answers are there and nothing is under way."""
        ready = (
            "return !!document.querySelector('.prediction, #problem:not([hidden])')"
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

    def errors(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def page(browser, service):
    page = Page(browser, service.url)
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
    assert page.texts("#layer-text, #head-text") == ["0 of 1", "1"]


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
    assert len(page.texts(".layers polyline")) == 5
    label = page.find(".layers svg").get_attribute("aria-label")
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
    page.until("return document.querySelectorAll('.layers svg').length === 2")
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


def test_the_saved_page_works_without_the_service(page, browser):
    page.open("sample=coffee&patch=2,1")
    page.find("#save").click()
    saved = browser.downloads / "vitruvian.html"
    end = time.monotonic() + 30
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    predictions, shown = page.predictions(), page.pixels()
    assert "http:" not in saved.read_text().replace("http://www.w3.org", "").replace("http-equiv", "")
    offline = Page(browser, saved.as_uri())
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

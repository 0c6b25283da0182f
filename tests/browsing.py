"""A page in the browser, as tests read and operate it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CLICK = """const e = document.querySelectorAll(arguments[0])[arguments[1]];
  if (!e) throw new Error("no element to click");
  e.scrollIntoView({ block: "center", behavior: "instant" });
  const box = e.getBoundingClientRect();
  const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (e.disabled || !top || !(e.contains(top) || top.contains(e))) throw new Error(`covered: ${e.outerHTML}`);
  e.click();"""


class Page:
    """A page that counts in `data-pending` of its root what is under way.

    Each method waits until nothing is, and then reads or clicks in one script: between finding an element and using it,
    a driver lets the page run, which may replace the element.
    """

    ready = "return document.documentElement.dataset.pending === '0'"

    def __init__(self, browser: Any, visit: Callable[..., None]) -> None:
        self.browser, self.visit = browser, visit

    def open(self, url: str, **settings: object) -> None:
        self.visit(url, **settings)
        self.settled()

    def settled(self) -> None:
        self.until(self.ready)

    def until(self, script: str, seconds: float = 120) -> object:  # a deadline, not a measurement
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if result := self.browser.execute_script(script):
                return result
            time.sleep(0.03)
        raise AssertionError(f"not in {seconds} s: {script}")

    def run(self, script: str, *values: object) -> Any:
        self.settled()
        return self.browser.execute_script(script, *values)

    def read(self, selector: str, expression: str) -> Any:
        """An expression of the first of these elements, `e`."""
        return self.run(f"const e = document.querySelector(arguments[0]); return {expression}", selector)

    def text(self, selector: str) -> str:
        """The text as it is shown."""
        return self.read(selector, "e.innerText").strip()

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def attribute(self, selector: str, name: str) -> str | None:
        return self.read(selector, f"e.getAttribute('{name}')")

    def is_shown(self, selector: str) -> bool:
        return self.read(selector, "e.checkVisibility()")

    def name(self, selector: str) -> str:
        """The name that a screen reader says."""
        return self.read(selector, "e.computedName")

    def box(self, selector: str) -> dict[str, float]:
        return self.read(selector, "e.getBoundingClientRect().toJSON()")

    @property
    def link(self) -> str:
        return self.run("return location.href")

    def click(self, selector: str, index: int = 0) -> None:
        """Click one of these elements, which must not be covered by another."""
        self.run(CLICK, selector, index)

    def press(self, selector: str, *keys: str) -> None:
        """Press keys in an element."""
        from selenium.webdriver.common.action_chains import ActionChains

        assert self.read(selector, "(e.focus(), document.activeElement === e)"), selector
        ActionChains(self.browser).send_keys(*keys).perform()

    def choose(self, *paths: object) -> None:
        """Choose files in the page's field for images."""
        self.read("#file", "void e.addEventListener('change', () => { window.hasFiles = true }, { once: true })")
        self.browser.find_element("id", "file").send_keys("\n".join(map(str, paths)))
        self.until("return window.hasFiles")

    def errors(self) -> list[str]:
        """The errors in the browser's log since the last call."""
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]

"""The page of `vit serve` in chromium: seconds from a dropped image to its answer and from a hover to its drawing, and
the frames per second while the steps through the model are played.

    python benchmarks/page.py --model W.safetensors [--drops 10] [--hovers 60] [--engine torch]

Needs chromium, chromedriver and selenium (`make browser`, extra `test`). A drop counts from its event until the answers
are in the page and the browser has painted them; a hover from the pointer's event until the frame after it. The frames
are those of the browser in five seconds of the step view, with a step and its transition in each second.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from base64 import b64encode
from typing import Any

import numpy as np
from PIL import Image

from serving import wait_until_ready

DROP = """const [text, done] = arguments;
const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "dropped.jpg", { type: "image/jpeg" }));
const place = document.querySelector(".predictions");
const begun = performance.now();
const seen = new MutationObserver(() => {
  seen.disconnect();
  requestAnimationFrame(() => setTimeout(() => done((performance.now() - begun) / 1000), 0));
});
seen.observe(place, { childList: true });
document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));"""
HOVER = """const [x, y, done] = arguments;
const canvas = document.querySelector(".grids > figure > canvas"), box = canvas.getBoundingClientRect();
const begun = performance.now();
const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
canvas.dispatchEvent(new PointerEvent("pointermove", place));
requestAnimationFrame(() => setTimeout(() => done((performance.now() - begun) / 1000), 0));"""
FRAMES = """const done = arguments[0], times = [];
const next = document.querySelector("#next");
const tick = (time) => {
  times.push(time);
  if (Math.floor((time - times[0]) / 1000) > steps) { steps += 1; next.click(); }
  if (time - times[0] < 5000) requestAnimationFrame(tick); else done(times.slice(1).map((t, i) => t - times[i]));
};
let steps = 0;
requestAnimationFrame(tick);"""
SETTLED = """return !!document.querySelector(".layers svg") && !document.querySelector("#busy").textContent
  && document.querySelector(".grids figcaption").textContent.includes("attends to")"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drops", type=int, default=10)
    parser.add_argument("--hovers", type=int, default=60)
    parser.add_argument("--engine", default="torch")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vitruvian", "serve", "--model", asked.model, "--engine", asked.engine]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    browser = None
    try:
        wait_until_ready(port, server)
        browser = opened(f"http://127.0.0.1:{port}/#show=attention")
        print(json.dumps({"drop": told([dropped(browser, seed) for seed in range(asked.drops)])}))
        rng = np.random.default_rng(0)
        hovers = [browser.execute_async_script(HOVER, *rng.random(2).tolist()) for _ in range(asked.hovers)]
        print(json.dumps({"hover": told(hovers)}))
        gaps = browser.execute_async_script(FRAMES)
        rate, slow = 1000 * len(gaps) / sum(gaps), sum(gap > 1000 / 30 for gap in gaps)
        print(json.dumps({"steps": {"frames_per_second": round(rate, 1), "frames": len(gaps), "below_30": slow}}))
    finally:
        if browser is not None:
            browser.quit()
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def opened(url: str) -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1200,900",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.get(url)
    settle(browser)
    return browser


def settle(browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, poll_frequency=0.1).until(lambda each: each.execute_script(SETTLED))


def dropped(browser: Any, seed: int) -> float:
    """Seconds from dropping a photo of 800 x 600 to its answer."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((800, 600)).save(file, "JPEG", quality=90)
    seconds = browser.execute_async_script(DROP, b64encode(file.getvalue()).decode())
    settle(browser)
    return float(seconds)


def told(seconds: list[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median_seconds": round(statistics.median(seconds), 4),
        "fastest_seconds": round(min(seconds), 4),
        "slowest_seconds": round(max(seconds), 4),
    }


if __name__ == "__main__":
    main()

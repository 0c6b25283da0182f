"""The page of `vit export --to web` in chromium: seconds from opening it to its first prediction.

    python benchmarks/web.py SITE [--rounds 5]

Needs chromium, chromedriver and selenium (`make browser`, extra `test`). Each round has a new browser with an empty
cache; the seconds are those of the page, from the start of the navigation to the prediction of the sample.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

PREDICTED = "return document.querySelector('.prediction') && performance.now() / 1000"


def first_prediction(url: str) -> float:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get(url)
        while not (seconds := browser.execute_script(PREDICTED)):
            time.sleep(0.02)
        return float(seconds)
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", help="a folder of `vit export --to web`")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=arguments.site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    seconds = [first_prediction(f"http://127.0.0.1:{server.server_port}/") for _ in range(arguments.rounds)]
    server.shutdown()
    print(json.dumps({"median": statistics.median(seconds), "rounds": [round(second, 2) for second in seconds]}))


if __name__ == "__main__":
    main()

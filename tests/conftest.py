"""What tests of several folders use."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Some virtual machines announce AMX and end a process that uses it; oneDNN then takes the kernels without it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

LONGEST = ("test_elastic.py", "test_demo.py", "test_architectures.py", "test_pages.py", "test_optimize.py")
"""Files of few tests that take a minute; begun last, one of them would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those with the most tests: `--no-loadscope-reorder` keeps this order."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -tests[item.path]))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for every test and for the processes it starts, so that numbers repeat on any machine.

    For the whole session: fixtures of a module are made before those of a test, and must compute alike.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def two_threads(one_thread: None) -> Iterator[None]:
    """Two threads for tensors, as a machine of two cores has them."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Ctrl-C reaches tests and their processes, also where the shell that started them in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real weights and images beside the project; tests that need it are skipped without it."""
    folder = Path(os.environ.get("VITRUVIAN_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist; set VITRUVIAN_SHARED")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window. Its attribute `downloads` is the folder of downloaded files."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("chromium and chromedriver are not installed: run make browser")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
    for flag in (*flags, "--enable-blink-features=ComputedAccessibilityInfo"):  # an element's `computedName`
        options.add_argument(flag)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.downloads = downloads
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser: Any) -> Callable[..., None]:
    """Opens a page at a size of the window, light, dark or with forced colors."""

    def visit(url: str, *, width: int = 1200, height: int = 900, dark: bool = False, forced: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "forced-colors": "active" if forced else "none",
        }
        media = {"features": [{"name": name, "value": value} for name, value in features.items()]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get("about:blank")  # so that a change of the fragment alone loads the page again
        browser.get(url)

    return visit


@pytest.fixture
def violations(browser: Any) -> Callable[[], list[str]]:
    """Runs axe-core, a checker of accessibility, on the open page; returns the rules that it violates, and where."""
    installed = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"
    script = Path(os.environ.get("AXE_CORE", installed))
    if not script.is_file():
        pytest.skip("axe-core is not installed: run make browser, or set AXE_CORE to its axe.min.js")

    def violations() -> list[str]:
        # Not as an element of the page, whose content security policy would refuse it.
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": script.read_text(encoding="utf-8")})
        run = "const done = arguments[0]; axe.run(document).then((result) => done(result.violations))"
        found = browser.execute_async_script(run)
        return [f"{rule['id']}: {node['html'][:150]}" for rule in found for node in rule["nodes"]]

    return violations

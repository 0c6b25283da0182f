"""A folder of static files that runs a model in the browser: the graph, its runtime, preprocessing and a page."""

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitruvian.catalog import title_of
from vitruvian.config import GraphConfig, ModelMeta, ViTConfig
from vitruvian.data.preprocess import preprocess_image
from vitruvian.engines.graph import Graph
from vitruvian.errors import ConversionError, HubError, argument
from vitruvian.files import digest, json_bytes, short_hash
from vitruvian.progress import print_status
from vitruvian.report.html import render
from vitruvian.text import describe_error

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
RUNTIME_FILES = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""The files of the npm package that the page needs, with their SHA-256."""
DOWNLOAD_URL = f"https://cdn.jsdelivr.net/npm/{PACKAGE}@{VERSION}/dist"
SAMPLE = "cat.jpg"  # the photo of the comparison
SHARED_SCRIPTS = ("api.js", "arrays.js", "grid.js", "guide.js", "input.js", "predictions.js", "state.js", "text.js")
SHARED_FILES = (*SHARED_SCRIPTS, "style.css", "icon.svg", SAMPLE, "coffee.jpg", "rocket.jpg")
"""The files of the page of `vit serve` that the exported page shares."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
BROWSER_SECONDS = 300  # after which a browser counts as broken
PROBABILITY_TOLERANCE = 0.01  # browsers and Pillow decode a JPEG to slightly different levels


def copy_runtime(folder: Path) -> None:
    """Copy the files of onnxruntime-web from node_modules here or in a folder above, or download them."""
    above = (Path.cwd(), *Path.cwd().parents)
    for name, sha256 in RUNTIME_FILES.items():
        paths = (path / "node_modules" / PACKAGE / "dist" / name for path in above)
        intact = next((path for path in paths if digest(path) == sha256), None)
        url = f"{DOWNLOAD_URL}/{name}" if intact is None else intact.as_uri()
        target = folder / name.replace(".mjs", ".js")  # which every web server serves as a script
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                target.write_bytes(reply.read())
            if digest(target) != sha256:
                raise OSError("its SHA-256 is another one")
        except OSError as error:
            reason = f"{PACKAGE} {VERSION} is not in node_modules and cannot be downloaded ({describe_error(error)})"
            hint = f"run `npm install --no-save {PACKAGE}@{VERSION}` here"
            raise HubError(reason, where=url, hint=hint) from error


def check_page(meta: ModelMeta, num_classes: int, batch_size: int | None) -> None:
    """Raise ConversionError if a page in the browser cannot run the model."""
    if num_classes == 0 or meta.score_function == "identity" or batch_size not in (None, 1):
        reason = "a page in the browser needs a model that predicts classes, one image at a time"
        raise ConversionError(reason, hint="for a CLIP or SigLIP, `vit convert --labels` makes one")
    if meta.preprocess.fit == "naflex":
        raise ConversionError(f"a page in the browser needs one size of images; give {argument('image_size')}")
    meta.preprocess.require_rgb("a page in the browser")


def write_site(folder: Path, graph: Graph) -> float | None:
    """Complete a folder that contains `model.onnx`, and compare its probabilities of a photo with those of the graph.

    Returns the largest difference, or None with a note if there is no browser to compute them.
    """
    meta, config, single = graph.meta, graph.config, graph.graph.single
    package = files("vitruvian")
    shared = [package / "serve" / "page" / name for name in SHARED_FILES]
    for source in (*shared, package / "report/templates/base.css", *(package / "serve" / "web").iterdir()):
        target = folder if source.name in ("check.html", "offline.js") else folder / "page"
        (target / source.name).write_bytes(source.read_bytes())
    (folder / "index.html").write_text(render("page_web.html"), encoding="utf-8")
    facts = meta.to_json() | {
        "name": meta.origin if isinstance(config, GraphConfig) else title_of(config),
        "output": single.output,
        "grid": config.grid_of(meta.preprocess.image_size) if isinstance(config, ViTConfig) else None,
    }
    (folder / "model.json").write_bytes(json_bytes(facts))
    logits = graph(preprocess_image(folder / "page" / SAMPLE, meta.preprocess)[None])[0] / meta.temperature
    expected = logits.sigmoid() if meta.score_function == "sigmoid" else logits.softmax(dim=0)
    probabilities = predict_in_browser(folder)
    (folder / "check.html").unlink()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    version = short_hash([[name, digest(folder / name)] for name in names])
    constants = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(['./', *names])};\n"
    (folder / "offline.js").write_bytes(constants.encode() + (folder / "offline.js").read_bytes())
    if probabilities is None:
        return None
    difference = float((torch.tensor(probabilities) - expected).abs().max())
    if not difference <= PROBABILITY_TOLERANCE:
        reason = f"probabilities in the browser differ by {difference:.2g}, {PROBABILITY_TOLERANCE} is allowed"
        raise ConversionError(f"not written, {reason}", hint="please report this")
    return difference


def predict_in_browser(folder: Path) -> list[float] | None:
    """Probabilities that the folder computes for its sample in headless Chromium; None, with a note, without one."""
    replies: list[Any] = []

    class FolderHandler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            replies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    browser = next(filter(None, map(shutil.which, BROWSERS)), BROWSERS[0])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(FolderHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile, suppress(FileNotFoundError):
        page = f"http://127.0.0.1:{server.server_port}/check.html"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", page]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + BROWSER_SECONDS
            while not replies and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.kill()
    server.shutdown()
    server.server_close()
    if not replies:
        print_status(f"note: the predictions were not compared in a browser, because {browser} did not compute them")
        return None
    if "error" in replies[0]:
        raise ConversionError(f"not written, {browser} reports: {replies[0]['error']}", hint="please report this")
    return replies[0]["probabilities"]

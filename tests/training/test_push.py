"""`vt.push`: a repository that transformers, timm and we open, through a server that speaks the Hub's API."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import vitruvian as vt
from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError, HubError
from vitruvian.model.build import build
from vitruvian.training.integrations import card_of, write_repository

pytestmark = pytest.mark.slow
COMMIT = "0" * 40
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAME = "user/photos"
CONFIG = ViTConfig(image_size=(32, 32), patch_size=16, depth=2, width=48, mlp_dim=192, num_heads=3, num_classes=3)
OPEN = """
import sys, json, torch, warnings
warnings.simplefilter("ignore")
name, pixels = sys.argv[1], torch.load(sys.argv[2])
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(name).eval()
print(json.dumps(["transformers", model(pixels).logits.tolist(), list(model.config.id2label.values())]))
sys.path.insert(0, sys.argv[3])
from peers import make_torchvision_importable
make_torchvision_importable()  # timm imports it, but this model does not need it
import timm
model = timm.create_model(f"hf_hub:{name}", pretrained=True).eval()
print(json.dumps(["timm", model(pixels).tolist(), list(model.pretrained_cfg["label_names"])]))
import vitruvian as vt
model = vt.load(name)
print(json.dumps(["vitruvian", model(pixels).tolist(), list(model.meta.labels)]))
"""


class Hub(BaseHTTPRequestHandler):
    """The routes of the Hub that huggingface_hub uses to create, upload and download."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: object = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        body, url = self.content(), f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_test":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.answer({"url": f"{url}/{NAME}", "name": NAME, "id": NAME})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            rows = [{"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")]} for f in files]
            self.answer({"files": [row | {"shouldIgnore": False, "oid": None} for row in rows]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            where = [{"upload": {"href": f"{url}/upload/{item['oid']}"}} for item in objects]
            rows = [item | {"actions": actions} for item, actions in zip(objects, where)]
            self.answer({"transfer": "basic", "objects": rows})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.blobs[value["oid"]]
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": f"{url}/{NAME}/commit/{COMMIT}"})
        else:  # validation of the card
            self.answer({"warnings": [], "errors": []})

    def do_PUT(self) -> None:
        blob = self.content()
        self.server.blobs[hashlib.sha256(blob).hexdigest()] = blob
        self.answer(b"")

    def do_GET(self) -> None:
        files, path = self.server.files, self.path.partition("?")[0]
        match = re.fullmatch(rf"/{NAME}/resolve/\w+/(.+)", path)
        if match and match[1] in files:
            data = files[match[1]]
            self.answer(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')
        elif match:
            self.answer(b"", 404, X_Error_Code="EntryNotFound")
        elif "/tree/" in path:
            self.answer([{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()])
        elif path.startswith(f"/api/models/{NAME}"):
            self.answer({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        else:
            self.answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.blobs = {}, {}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
    for name, value in (settings | {"HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    with server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def model():
    model = build(CONFIG, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(labels=("cat", "dog", "owl"))
    return model


def other_process(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.slow
def test_all_three_libraries_open_what_was_pushed(hub, model, tmp_path):
    vt.save(model, tmp_path / "model")
    command = ("-m", "vitruvian", "push", tmp_path / "model", NAME, "--license", "mit")
    refused = other_process(*command, HF_TOKEN="hf_wrong")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "error: user/photos: " in refused.stderr
    assert "401" in refused.stderr
    done = other_process(*command, HF_TOKEN="hf_test")
    assert (done.returncode, done.stdout) == (0, f"pushed http://127.0.0.1:{hub.server_port}/{NAME}\n"), done.stderr
    assert set(hub.files) >= {"config.json", "model.safetensors", "timm.safetensors", "README.md"}
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.save(pixels, tmp_path / "pixels.pt")
    opened = other_process("-c", OPEN, NAME, tmp_path / "pixels.pt", BENCHMARKS)
    assert opened.returncode == 0, opened.stderr
    results = [json.loads(line) for line in opened.stdout.splitlines() if line.startswith("[")]
    assert [library for library, *_ in results] == ["transformers", "timm", "vitruvian"]
    for _, logits, labels in results:
        torch.testing.assert_close(torch.tensor(logits), model.eval()(pixels).detach(), atol=1e-4, rtol=1e-4)
        assert labels == ["cat", "dog", "owl"]


def front_matter(card: str) -> dict:
    _, text, _ = card.split("---\n", 2)
    return yaml.safe_load(text)


def test_a_card_has_the_hubs_metadata_and_nothing_that_was_not_measured(model, tmp_path):
    write_repository(model, tmp_path / "repository", repository=NAME)
    card = (tmp_path / "repository" / "README.md").read_text()
    metadata = front_matter(card)
    assert metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["vitruvian", "vision-transformer", "transformers", "timm"]
    assert "license" not in metadata
    assert "model-index" not in metadata
    assert "\nNothing was measured.\n" in card
    assert "- classes: 3: cat, dog, owl\n" in card
    assert vt.load(tmp_path / "repository").config == model.config


def test_a_model_that_others_cannot_express_is_pushed_in_our_format(tmp_path):
    model = build(CONFIG.replace(pos_embed="relative"), seed=0)
    write_repository(model, tmp_path / "repository")
    card = (tmp_path / "repository" / "README.md").read_text()
    assert front_matter(card)["library_name"] == "vitruvian"
    assert "- note: huggingface cannot express this model: " in card
    assert vt.load(tmp_path / "repository").config == model.config


def test_the_card_of_a_run_has_its_data_accuracy_and_a_report(tmp_path):
    shape = {"depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2, "patch_size": 4}
    settings = {"architecture": shape, "steps": 2, "batch_size": 8, "warmup": 0, "workers": 0}
    run = vt.train("digits", out=tmp_path / "run", settings=settings, progress=False)
    (tmp_path / "report").mkdir()
    before, after = {"error": 3.0}, {"error": 1.25}
    report = {"data": "digits", "split": "test", "top1": 90.0, "intervals": {"top1": [88.0, 92.0]}}
    report |= {"interval_percent": 95, "calibration": {"temperature": 1.5, "before": before, "after": after}}
    (tmp_path / "report" / "evaluation.json").write_text(json.dumps(report))
    card = card_of(run.model(), run.folder, report=tmp_path / "report", license="mit")
    metadata = front_matter(card)
    metrics = metadata["model-index"][0]["results"][0]["metrics"]
    assert metrics == [{"type": "accuracy", "value": pytest.approx(run.evaluation["top1"] / 100)}]
    assert metadata["license"] == "mit"
    assert "- data: digits, 1,438 images for training\n" in card
    assert "| top1 | 90.00 | 88.00 to 92.00 |\n" in card
    assert "Calibration error 3.00%; with the temperature 1.500, 1.25%.\n" in card
    assert f"- command: {run.recipe.command}\n" in card


@pytest.mark.parametrize("name", ["photos", "user/photos/x", "user/a b", "../x", ""])
def test_the_name_of_a_repository_is_checked_before_anything_is_read(name):
    with pytest.raises(ConfigError, match=r"not the name of a repository|Repo id must"):
        vt.push("no model", name)


def test_a_missing_network_is_one_line(monkeypatch, model):
    import huggingface_hub

    def fail(*arguments, **options):
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "create_repo", fail)
    with pytest.raises(HubError, match=r"user/photos: no network at all; `hf auth login` stores a token"):
        vt.push(model, NAME)

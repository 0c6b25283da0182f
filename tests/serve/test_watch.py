"""`vit serve --watch`: models are added, replaced and removed while requests are answered."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
from processes import Process
from tiny_service import photo, tiny_vit

import vitruvian as vt
from vitruvian.inference import Classifier

pytestmark = pytest.mark.slow


def save(path: Path, label: str, seed: int = 0, **settings: int) -> None:
    model = tiny_vit(seed, **settings)
    model.meta = model.meta.replace(labels=tuple(f"{label} {index}" for index in range(6)))
    vt.save(model, path)


def names(service: Process) -> list[str]:
    return [model["name"] for model in service.client.get("/models").json()["models"]]


def until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def predicted(service: Process | httpx.Client, model: str) -> str:
    client = service.client if isinstance(service, Process) else service
    response = client.post(f"/predict?model={model}", files={"image": ("a.png", photo(1), "image/png")})
    assert response.status_code == 200, response.text
    return response.json()["results"][0]["predictions"][0]["label"]


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "models" / "cats", "cat")
    return tmp_path / "models"


@pytest.fixture
def service(folder, tmp_path):
    save(tmp_path / "base", "base")
    running = Process("--model", tmp_path / "base", "--watch", folder)
    yield running
    running.close()


def test_models_are_added_replaced_and_removed(service, folder):
    assert names(service) == ["base", "cats"]
    save(folder / "dogs", "dog", seed=1)
    until(lambda: "dogs" in names(service))
    assert predicted(service, "dogs") == Classifier(folder / "dogs").predict([photo(1)])[0][0].label
    shutil.rmtree(folder / "cats")
    until(lambda: "cats" not in names(service))
    response = service.client.post("/predict?model=cats", files={"image": ("a.png", photo(1), "image/png")})
    assert (response.status_code, "unknown model 'cats'" in response.json()["detail"]) == (404, True)
    assert 'vit_accepted_images{model="cats"}' not in service.client.get("/metrics").text
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("no model")
    (folder / "broken.safetensors").write_bytes(b"no weights")
    until(lambda: any("broken is not served: " in line for line in service.lines))
    assert names(service) == ["base", "dogs"]
    save(folder / "base", "other")
    until(lambda: any("base is not served: " in line and "--model has this name" in line for line in service.lines))
    assert predicted(service, "base").startswith("base ")
    assert not any("Traceback" in line for line in service.lines)


def test_no_request_is_lost_while_a_model_is_replaced(service, folder):
    answers: list[list[str]] = [[] for _ in range(4)]
    failures, stopped = [], threading.Event()

    def ask(labels: list[str]) -> None:
        with httpx.Client(base_url=service.url, timeout=60) as client:
            while not stopped.is_set():
                try:
                    labels.append(predicted(client, "cats").split()[0])
                except BaseException as error:
                    failures.append(error)
                    return

    threads = [threading.Thread(target=ask, args=(labels,)) for labels in answers]
    for thread in threads:
        thread.start()
    for seed, label in enumerate(("second", "third", "fourth"), start=1):
        save(folder / "cats", label, seed)
        until(lambda label=label: failures or all(label in labels for labels in answers))
    stopped.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    order = ["cat", "second", "third", "fourth"]
    for labels in answers:
        assert list(dict.fromkeys(labels)) == order  # the replaced model never comes back
        assert labels == sorted(labels, key=order.index)


def test_weights_that_are_overwritten_in_place_do_not_change_what_is_served(service, folder):
    save(folder / "large", "cat", width=512, mlp_dim=2048)  # its matrices are mapped when it is loaded
    until(lambda: "large" in names(service))
    before = predicted(service, "large")
    weights = folder / "large" / "model.safetensors"
    content = weights.read_bytes()
    with weights.open("r+b") as file:  # a copy that was interrupted
        file.truncate(100)
        os.fsync(file.fileno())
    until(lambda: any("large is not served: " in line for line in service.lines))
    assert predicted(service, "large") == before
    weights.write_bytes(content)
    until(lambda: sum("large is served from " in line for line in service.lines) == 2)
    assert predicted(service, "large") == before


def test_the_last_model_stays(folder):
    service = Process("--watch", folder)
    try:
        shutil.rmtree(folder / "cats")
        until(lambda: any("cats was removed from " in line and "but stays" in line for line in service.lines))
        assert predicted(service, "cats").startswith("cat ")
    finally:
        service.close()


def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch, capsys):
    from vitruvian.cli.app import main

    reasons = {tmp_path: "contains no model; give one with --model", tmp_path / "none": "cannot be read"}
    for folder, reason in reasons.items():
        monkeypatch.setattr("sys.argv", ["vit", "serve", "--watch", str(folder)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        assert reason in capsys.readouterr().err

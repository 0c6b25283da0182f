"""Trackers: what each is given by a run, offline, with the real packages where they are installed."""

import json
import os
import re
import subprocess
import sys

import pytest
from runs import TINY

from vitruvian.errors import MissingExtraError, UnknownNameError
from vitruvian.training import train
from vitruvian.training.integrations import TRACKERS, Tracker, open_trackers

SETTINGS = [*TINY, "steps=2"]


class Kept(Tracker):
    package = "json"

    def __init__(self):
        super().__init__()
        self.heard = {}

    def begin(self, run, config):
        self.heard["config"] = config

    def log(self, values, step):
        self.heard.setdefault("metrics", []).append((step, values))

    def keep(self, run, images):
        self.heard["kept"] = ((run.folder / "model").is_dir(), len(images))

    def end(self):
        self.heard["ended"] = True


class Broken(Kept):
    def log(self, values, step):
        raise OSError("no network")


def test_a_tracker_gets_settings_metrics_images_and_the_model(tmp_path, capsys):
    kept, broken = Kept(), Broken()
    train("digits", out=tmp_path / "run", settings=SETTINGS, listeners=[kept, broken], progress=False)
    assert kept.heard["config"]["run.training_images"]
    assert kept.heard["config"]["batch_size"] == 32
    assert "loss/train" in kept.heard["metrics"][0][1]
    assert "top1/val" in kept.heard["metrics"][-1][1]
    assert kept.heard["kept"][0]
    assert kept.heard["ended"]
    json.dumps(kept.heard)
    assert capsys.readouterr().err == "note: json failed and gets nothing more of this run: no network\n"
    assert "kept" not in broken.heard


def test_unknown_and_missing_trackers_are_refused_in_one_line(monkeypatch):
    with pytest.raises(UnknownNameError, match="tracker 'wand'"):
        open_trackers(["wand"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match="this needs the package 'wandb': run pip install wandb"):
        open_trackers(["wandb"])
    assert open_trackers(["tensorboard"]) == []
    assert set(TRACKERS) == {"wandb", "mlflow", "trackio", "tensorboard"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_has_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    train("digits", out=tmp_path / "run", settings=SETTINGS, listeners=open_trackers(["mlflow"]), progress=False)
    (found,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("vitruvian").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["batch_size"] == "32"
    assert "top1/val" in found.data.metrics
    assert list((tmp_path / "mlruns").rglob("model/model.safetensors"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_writes_an_offline_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("digits", out=tmp_path / "run", settings=SETTINGS, listeners=open_trackers(["wandb"]), progress=False)
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert log.stat().st_size > 0
    assert "failed and gets nothing more" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trackio_has_the_run_on_this_machine(tmp_path):
    pytest.importorskip("trackio", reason="it requires pillow<13, and constraints.txt has pillow 13")
    script = """
import json, sys
from vitruvian.training.integrations import open_trackers
from vitruvian.training.train import train
train("digits", out=sys.argv[1], settings=json.loads(sys.argv[2]), listeners=open_trackers(["trackio"]), progress=False)
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("vitruvian")
rows = SQLiteStorage.get_logs("vitruvian", run.name)
print("result", json.dumps([run.name, run.config["batch_size"], any("top1/val" in row for row in rows)]))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, str(tmp_path / "run"), json.dumps(SETTINGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "failed and gets nothing more" not in done.stderr
    name, batch_size, has_accuracy = json.loads(re.search(r"^result (.*)$", done.stdout, re.MULTILINE)[1])
    assert (name.rpartition("-")[0], batch_size, has_accuracy) == ("run", 32, True)
    assert any(path.stat().st_size for path in (tmp_path / "trackio").rglob("*") if path.is_file())

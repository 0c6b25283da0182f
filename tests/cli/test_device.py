"""`--device auto`: every command on a pretend accelerator, with the results of the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian import machine
from vitruvian.errors import ConfigError

pytestmark = pytest.mark.slow
TINY = "depth=1 width=16 mlp_dim=16 num_heads=2 patch_size=4"
SETTINGS = [f"architecture.{setting}" for setting in TINY.split()] + ["steps=2", "batch_size=8", "warmup=0"]
LINE = "device: pretend (Pretend 100)"


def write_images(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in (f"{split}/{label}" for split in ("train", "val") for label in ("dark", "gray", "light")):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(folder / name / f"{i}.png")
    return folder


def test_every_command_runs_on_an_accelerator_and_names_it_once(weights, tmp_path, vit):
    data = str(write_images(tmp_path / "data"))
    image, model = f"{data}/val/dark/0.png", ("--model", str(weights))
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in Path(data).glob("train/dark/*.png"):
        Image.fromarray(np.repeat([[0], [1]], 10, axis=0).repeat(20, axis=1).astype(np.uint8)).save(masks / path.name)
    commands = {
        "predict": ["predict", image, *model, "--json"],
        "evaluate": ["evaluate", data, *model, "--json"],
        "probe": ["probe", data, *model, "--json"],
        "embed": ["embed", f"{data}/val", *model, "--out", str(tmp_path / "vectors")],
        "embed on the CPU": ["embed", f"{data}/val", *model, "--out", str(tmp_path / "cpu"), "--device", "cpu"],
        "similar": ["similar", image, "--in", str(tmp_path / "cpu"), "--json"],
        "explain": ["explain", image, *model, "--out", str(tmp_path / "maps"), "--json"],
        "compare": ["compare", str(weights), str(weights), "--data", data, "--json"],
        "doctor": ["doctor", data, *model, "--json"],
        "segment": [
            "segment",
            f"{data}/train/dark",
            *model,
            "--masks",
            str(masks),
            "--out",
            str(tmp_path / "segmenter"),
        ],
        "anomaly": ["anomaly", "--good", f"{data}/train/dark", *model, "--out", str(tmp_path / "detector")],
        "bench": ["bench", *model, "--rounds", "1", "--batches", "2", "--json"],
        "train": ["train", "digits", "--out", str(tmp_path / "run"), *(f"--set={value}" for value in SETTINGS)],
        "finetune": [
            *("finetune", data, "--from", str(weights), "--out", str(tmp_path / "sweep"), "--seeds", "1", "--quick"),
            *(f"--set={value}" for value in ("steps=1", "batch_size=4", "warmup=0", "workers=0")),
        ],
        "serve": ["serve-in-process", str(weights), image],
        "bf16": ["predict", image, *model, "--json", "--precision", "bf16"],
        "both": ["predict", image, *model, "--engine", "onnxruntime", "--device", "pretend"],
    }
    script = Path(__file__).with_name("pretend_device.py")
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(list(commands.values())), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ran = dict(zip(commands, json.loads(done.stdout)))
    assert [(name, err) for name, (code, _, err) in ran.items() if code and err] == [
        ("both", "error: --engine 'onnxruntime' runs on the CPU; --device 'pretend' needs --engine 'torch'\n")
    ]
    named = {name: err.count(LINE) for name, (_, _, err) in ran.items() if LINE in err}
    assert named == {"predict": 1, "train": 1, "finetune": 1}  # once, and as a note of runs
    changed = "precision: bf16 changes 0 of 1 top-1 predictions (0.0%) in the first batch, compared with float32"
    assert changed in ran["bf16"][2]  # moved there and back; the pretend device computes in float32
    for name, rows, key in (("predict", "predictions", "label"), ("similar", "neighbors", "key")):
        found, expected = (json.loads(out)[rows] for out in (ran[name][1], vit(*commands[name]).out))
        assert [row[key] for row in found] == [row[key] for row in expected]
    assert json.loads(ran["bench"][1])["device"] == "pretend:0"
    predicted, _, _, models = map(json.loads, ran["serve"][1].splitlines())
    assert (
        predicted["results"][0]["predictions"][0]["label"] == json.loads(ran["predict"][1])["predictions"][0]["label"]
    )
    assert models["models"][0]["device"] == "pretend:0"
    assert vt.load(tmp_path / "run").config.num_classes == 10


def test_without_an_accelerator_auto_is_the_cpu(weights, capsys):
    assert machine.choose_device("auto") == "cpu"
    assert vt.Classifier(weights).device == "cpu"
    assert capsys.readouterr().err == ""


def test_processes_of_torchrun_take_one_accelerator_each_and_engines_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    assert machine.choose_device("auto") == "cuda:0"
    assert machine.choose_device("auto", "openvino") == "cpu"
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    assert [machine.choose_device(name) for name in ("auto", "xpu", "cuda:1", "mps")] == [
        "cuda:3",
        "xpu:3",
        "cuda:1",
        "mps",
    ]


def test_a_built_model_stays_on_its_device(weights):
    model = vt.load(weights).to("meta")
    with pytest.raises(ConfigError, match="device='meta' cannot be used"):
        vt.Classifier(model)

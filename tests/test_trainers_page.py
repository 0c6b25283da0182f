"""Every section of docs/trainers.md runs with the real libraries, and leaves a model that has learned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE))
TIMM = re.findall("```python\n(.*?)```", TEXT, re.DOTALL)[-1]
RUN = """
import importlib.util, json, os, sys, warnings
warnings.simplefilter("ignore")
sections, benchmarks = json.load(sys.stdin), sys.argv[1]
sys.path.insert(0, benchmarks)
names, results = {"__name__": "page"}, {}
for title, block in sections.items():
    if title == "fastai" and importlib.util.find_spec("fastai") is None:
        continue
    if title == "timm":
        from peers import make_torchvision_importable
        make_torchvision_importable()  # timm imports it, but this model does not need it
    exec(compile(block, f"docs/trainers.md: {title}", "exec"), names)
    if "theirs" in names:
        pixels = names["torch"].stack([names["test"][0][0], names["test"][7][0]])
        theirs = names.pop("theirs").eval()(pixels)
        difference = getattr(theirs, "logits", theirs) - names["model"].eval()(pixels)
        results[title] = float(difference.abs().max())
print("results " + json.dumps(results))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the whole page has run; its `results` are the largest differences of other libraries' logits."""
    folder, rng = tmp_path_factory.mktemp("trainers"), np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 4)):
        for name, level in (("cat", 60), ("dog", 180)):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = (level + 30 * rng.normal(size=(40, 50, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / name / f"{number}.jpg")
    torch.manual_seed(0)
    size = {"image_size": 32, "patch_size": 16, "depth": 2, "width": 16, "mlp_dim": 32, "num_heads": 2}
    vt.save(vt.build(vt.ViTConfig(**size, num_classes=3)), folder / "weights.safetensors", family="timm")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "benchmarks")],
        input=json.dumps(SECTIONS | {"timm": TIMM}),
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder / "results").write_text(re.search(r"^results (.*)$", done.stdout, re.MULTILINE)[1])
    return folder


def test_the_page_has_a_section_for_each_library():
    libraries = ["transformers' Trainer", "Accelerate", "Lightning", "fastai", "peft"]
    assert list(SECTIONS) == ["The data", *libraries, "Our model in other libraries"]
    assert max(block.count("\n") for block in SECTIONS.values()) < 20  # a screen


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning", "fastai", "peft"])
def test_a_trainer_leaves_a_model_that_has_learned(folder, name):
    if name == "fastai" and not (folder / "runs" / "with-fastai").is_dir():
        pytest.skip(
            "fastai is not installed: it requires torchvision, whose builds tie the environment to one of torch"
        )
    classifier = vt.Classifier(folder / "runs" / f"with-{name}")
    assert classifier.labels == ("cat", "dog")
    assert classifier.predict([folder / "photos" / "test" / "dog" / "1.jpg"])[0]
    before, after = vt.load(folder / "weights.safetensors").state_dict(), classifier.torch_model.state_dict()
    assert after.keys() == before.keys()
    assert not torch.equal(before["blocks.0.attn.qkv.weight"], after["blocks.0.attn.qkv.weight"])
    assert after["head.weight"].abs().max() > 0  # it was new, and zero


def test_transformers_and_timm_compute_the_same_logits(folder):
    results = json.loads((folder / "results").read_text())
    assert results.keys() == {"Our model in other libraries", "timm"}
    assert max(results.values()) < 1e-5  # float32 sums in another order

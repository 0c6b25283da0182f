"""Every line of docs/pytorch.md runs: its code blocks, one after the other, on tiny models."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.model.build import build

TEXT = (Path(__file__).parents[1] / "docs" / "pytorch.md").read_text(encoding="utf-8")
BLOCKS = re.findall("```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with photos, and tiny stand-ins for published weights and the compiler."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 4)):
        for name, color in (("cat", 60), ("dog", 180)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = (color + 30 * rng.normal(size=(40, 50, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    real_load, real_compile = vitruvian.load, torch.compile

    def load(source, **options):
        if source != "google/vit-base-patch16-224-in21k":
            return real_load(source, **options)
        config = ViTConfig(image_size=32, patch_size=16, depth=2, width=16, mlp_dim=32, num_heads=2, **options)
        model = build(config, seed=0)
        model.meta = model.meta.replace(preprocess=Preprocess(image_size=32))
        return model

    monkeypatch.setattr(vitruvian, "load", load, raising=False)
    shape = {"patch_size": 32, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    real_builder = vitruvian.vit_b_16
    monkeypatch.setattr(vitruvian, "vit_b_16", lambda weights: real_builder(**shape), raising=False)
    monkeypatch.setattr(torch, "compile", lambda model: real_compile(model, backend="eager"))
    return tmp_path


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_its_results_are_as_it_says(tiny, capsys):
    names = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/pytorch.md, block {number}", "exec"), names)
        if "model.forward_features" in block:
            assert names["features"].shape == (1, 16)
            assert names["tokens"].shape == (1, 5, 16)
            torch.testing.assert_close(names["intermediates"]["features"], names["features"])
        if "torch.compile" in block:
            torch.testing.assert_close(names["logits"], names["model"](names["pixels"][None]).detach())
        if "state.pth" in block:
            assert names["predictions"][0][0].label in ("cat", "dog")
            for saved, own in zip(names["again"].parameters(), names["model"].parameters()):
                assert torch.equal(saved, own)
        if "heads.head" in block:
            assert names["network"](names["preprocess"](Image.new("RGB", (300, 300)))[None]).shape == (1, 2)
        if "confusion" in block:
            assert names["result"].measures.count == 8
    assert names["run"].finished
    assert re.search(r"^step \d+: val loss \d\.\d{3}$", capsys.readouterr().out, re.MULTILINE)


def test_the_page_has_every_subject():
    for subject in ("transform", "Dataset", "Features of layers", "training loop", "torch.compile", "Saving", "pandas"):
        assert re.search(f"^## .*{subject}", TEXT, re.MULTILINE), subject

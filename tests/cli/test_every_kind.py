"""Every kind of model is probed, fine-tuned, trained further, explained and read by layers, or refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitruvian as vt
from vitruvian.cli.app import app
from vitruvian.config import ResNetConfig, RopeConfig, StemConfig, ViTConfig
from vitruvian.errors import VitruvianError
from vitruvian.model.build import build

TINY = ViTConfig(image_size=32, patch_size=8, width=32, mlp_dim=48, depth=2, num_heads=4, num_classes=0)
NORMALIZED = RopeConfig(kind="normalized", temperature=100.0, half=True)
KINDS = {
    "ViT": TINY,
    "DeiT, distilled": TINY.replace(distillation=True, num_classes=3),
    "CLIP": TINY.replace(pre_norm=True, patch_bias=False, representation_size=16, projection=True),
    "SigLIP": TINY.replace(pool="map", cls_token=False),
    "SigLIP, trimmed": TINY.replace(pool="map", cls_token=False, trim=True, image_size=36),
    "DINOv2": TINY.replace(layer_scale=True, reg_tokens=2, mlp="swiglu"),
    "DINOv2 with its head": TINY.replace(layer_scale=True, pool="token_mean", num_classes=3),
    "DINOv3": TINY.replace(layer_scale=True, reg_tokens=2, pos_embed="none", rope=NORMALIZED),
    "EVA-02": TINY.replace(rope=RopeConfig(reference_grid=(4, 4)), mlp="swiglu", mlp_norm=True, attn_norm=True),
    "RoPE, mixed": TINY.replace(pos_embed="none", rope=RopeConfig(kind="mixed")),
    "BEiT": TINY.replace(pos_embed="relative_bias", pool="mean", norm_after_pool=True, layer_scale=True),
    "I-JEPA": TINY.replace(pool="mean", cls_token=False),
    "NaFlex": TINY.replace(pos_embed="factorized", cls_token=False, pool="mean"),
    "AIMv2": TINY.replace(norm="rms", patch_norm=True, mlp="swiglu", pool="mean", cls_token=False, dense_bias=False),
    "parallel": TINY.replace(block="parallel", qk_norm=True),
    "res-post-norm": TINY.replace(block="res_post_norm"),
    "differential": TINY.replace(attention="differential"),
    "branches": TINY.replace(attn_dim=64, num_heads=8),
    "non-square": TINY.replace(image_size=(32, 48)),
    "hybrid": TINY.replace(stem=StemConfig(stages=(1,), width=32), patch_size=2),
    "ResNet-D stem": TINY.replace(stem=StemConfig(stages=(1,), width=32, style="resnet_d"), patch_size=2),
    "MobileCLIP stem": TINY.replace(stem=StemConfig(stages=(), width=32, style="mobile_clip"), patch_size=1),
    "BiT": ResNetConfig(image_size=32, stages=(1, 1), width=32, num_classes=0),
}
REFUSED = {
    # kind and command: why it has no meaning
    ("BiT", "explain"): "ResNet",
    ("differential", "explain"): "attention rollout is not defined for differential attention",
}
COMMANDS = {
    "probe": "probe {data} --model {model} --only neighbors,linear",
    "explain": "explain {image} --model {model} --out {out}",
    "train": "train {data} --from {model} --recipe finetune-small --epochs 1 --batch-size 4 --out {out} --workers 0",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for level, name in ((40, "dark"), (200, "light")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(level - 30, level + 30, (40, 44, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found = {}

    def folder_of(kind):
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp("model") / "model"
            vt.save(build(KINDS[kind], seed=1), found[kind])
        return found[kind]

    return folder_of


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_works_for_every_kind_or_says_why_not(kind, command, data, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    image = data / "test" / "dark" / "0.png"
    words = COMMANDS[command].format(data=data, model=saved(kind), image=image, out=tmp_path / "out")
    done = CliRunner().invoke(app, words.split())
    reason = REFUSED.get((kind, command))
    if reason is None:
        assert done.exit_code == 0, (done.output, done.exception)
    else:
        assert isinstance(done.exception, VitruvianError | SystemExit)
        assert reason in f"{done.exception} {done.output}"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_kind_are_maps_of_its_grid(kind):
    model = build(KINDS[kind], seed=1).eval()
    rows, columns = model.config.image_size
    pixels = torch.randn(2, 3, rows, columns)
    first, last = vt.features(model, pixels, layers=[0, -1], grid=True)
    if isinstance(model.config, ResNetConfig):
        assert last.shape[:2] == (2, model.config.feature_width)
        return
    assert first.shape == last.shape == (2, 32, *model.config.grid)
    tokens = vt.features(model, pixels, layers=[-1], grid=False)[0]
    grid = tokens[:, model.config.prefix_tokens :].unflatten(1, model.config.grid)
    assert torch.equal(last, grid.permute(0, 3, 1, 2))

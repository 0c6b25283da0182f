"""A way to run `vit` inside the test, and a small model to run it with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image

from vitruvian.cli.app import main
from vitruvian.config import ViTConfig
from vitruvian.model.build import build
from vitruvian.weights.save import save


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`vit(*arguments)` as the console script would run it: exit code, stdout, stderr."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["vit", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native model that calls bright images `light` and others `dark` or `gray`."""
    config = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=3)
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(labels=("dark", "gray", "light"))
    path = tmp_path_factory.mktemp("weights") / "tiny"
    save(model, path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two images."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (20, 30), (10, 20, 30)).save(folder / "a.png")
    Image.new("RGB", (30, 20), (250, 240, 230)).save(folder / "b.jpg")
    return folder

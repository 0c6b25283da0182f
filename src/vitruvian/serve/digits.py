"""The model that is served where none is named: the built-in digits, trained on first use and kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from vitruvian.files import cache_folder, locked
from vitruvian.model.build import Model
from vitruvian.training import train
from vitruvian.weights.load import load
from vitruvian.weights.save import save

SETTINGS = (
    # 8 x 8 patches to look at, and a class token whose answer can be read after every layer
    "image_size=16",
    "epochs=24",
    "ema_decay=0.98",
    "architecture.patch_size=2",
    "architecture.layers=3",
    "architecture.width=48",
    "architecture.mlp_width=96",
    "architecture.pool=token",
    "architecture.class_token=true",
    "augment.padding=2",
)


def digits_model(said: Callable[[str], None], settings: tuple[str, ...] = SETTINGS) -> Model:
    """The digits model, from the cache folder if it is there."""
    kept = cache_folder() / "models" / "digits"
    with locked(kept.with_name("digits.lock")):
        if not kept.exists():
            said("no --model: training one on the built-in digits, about a minute, once")
            with tempfile.TemporaryDirectory() as folder:
                model = train("digits", recipe="digits", out=Path(folder) / "run", settings=settings).model()
            model.origin = "trained on the built-in digits"
            save(model, kept)
        said(f"no --model: serving the digits model in {kept}")
    return load(kept)

"""Where the time of one image goes: decoding, resizing, and the parts of a model."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitruvian.data.decode import decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.engines.graph import Graph
from vitruvian.model.build import Model
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT

PHOTO = (500, 375)
"""Width and height of the image that is decoded where none is given."""


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def readable(image: str | Path) -> bytes:
    """The bytes of an image that can be decoded."""
    decode(Path(image))
    return Path(image).read_bytes()


def shares_of(model: Model | Graph, data: bytes, rounds: int) -> dict[str, float]:
    """Milliseconds an image takes in each part of its way, medians."""
    decoded = decode(data)
    model_parts: list[dict[str, float]] = []
    pixels = apply_preprocess(decoded, model.meta.preprocess)[None]
    for _ in range(rounds + 1):
        model_parts.append(parts_of(model, pixels))
    found = {
        "decode": statistics.median(timed(lambda: decode(data)) for _ in range(rounds)),
        "resize": statistics.median(
            timed(lambda: apply_preprocess(decoded, model.meta.preprocess)) for _ in range(rounds)
        ),
    }
    for name in model_parts[0]:
        found[name] = statistics.median(parts[name] for parts in model_parts[1:])
    return {name: 1000 * seconds for name, seconds in found.items()}


def parts_of(model: Model | Graph, pixels: Tensor) -> dict[str, float]:
    """Seconds of one forward pass in the embedding, attention, MLPs and the rest."""
    parts: dict[str, list[nn.Module]] = {}
    rest = "model"
    if isinstance(model, ViT):
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        parts = {
            "embed": [model.embed],
            "attention": [block.attn for block in blocks],
            "MLP": [block.mlp for block in blocks],
        }
        rest = "norms, sums, head"
        if model.config.merges_tokens:  # which calls the steps of attention, not the module
            parts.pop("attention")
            rest = "attention, merging, norms, head"
    seconds, hooks, starts = dict.fromkeys(parts, 0.0), [], {}

    def begin(module: nn.Module, *_: Any) -> None:
        starts[module] = time.perf_counter()

    def end(part: str) -> Callable[..., None]:
        def ended(module: nn.Module, *_: Any) -> None:
            seconds[part] += time.perf_counter() - starts[module]

        return ended

    for part, modules in parts.items():
        for module in modules:
            hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end(part))]
    try:
        with torch.inference_mode():
            whole = timed(lambda: model(pixels))
    finally:
        for hook in hooks:
            hook.remove()
    return seconds | {rest: max(0.0, whole - sum(seconds.values()))}


def photo() -> bytes:
    """A JPEG with the detail of a photo."""
    noise = np.random.default_rng(0).integers(0, 256, (PHOTO[1] // 8, PHOTO[0] // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(PHOTO, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()

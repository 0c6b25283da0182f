"""Seconds and peak memory of one training step beside timm and transformers: same model, batch and precision.

    make bench                                          # once: builds .venv-peers
    .venv-peers/bin/python benchmarks/training_step.py [--rounds 9] [--out steps.jsonl]

A step is forward, cross entropy, backward, clipping at 1 and fused AdamW, in float32. Every round times each library
once, one after the other in an order drawn anew; ratios are between medians. Peak memory is that of a new
process: the resident set at its highest less what it was before the model was made.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers import Forward, declare_torchvision_operators
from vitruvian.machine import tune_allocator


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One ViT with a class token and one batch for it."""

    image: int
    patch: int
    layers: int
    width: int
    heads: int
    batch: int
    classes: int


SHAPES = {
    "6 layers, width 192, 65 tokens": Shape(image=32, patch=4, layers=6, width=192, heads=3, batch=128, classes=10),
    "ViT-Ti/16 at 224": Shape(image=224, patch=16, layers=12, width=192, heads=3, batch=16, classes=1000),
    "ViT-S/16 at 224": Shape(image=224, patch=16, layers=12, width=384, heads=6, batch=8, classes=1000),
}


def vitruvian(shape: Shape, *, checkpointed: bool = False) -> tuple[nn.Module, Forward]:
    import vitruvian as vt
    from vitruvian.catalog import resolve
    from vitruvian.model.build import build

    config = resolve("ViT-Ti/16").replace(
        image_size=shape.image,
        patch_size=shape.patch,
        depth=shape.layers,
        width=shape.width,
        mlp_dim=4 * shape.width,
        num_heads=shape.heads,
        num_classes=shape.classes,
    )
    model = build(config)
    assert isinstance(model, vt.ViT)
    model.grad_checkpointing = checkpointed
    return model, model


def timm(shape: Shape) -> tuple[nn.Module, Forward]:
    from timm.models import VisionTransformer

    model = VisionTransformer(
        img_size=shape.image,
        patch_size=shape.patch,
        embed_dim=shape.width,
        depth=shape.layers,
        num_heads=shape.heads,
        num_classes=shape.classes,
    )
    return model, model


def transformers(shape: Shape) -> tuple[nn.Module, Forward]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=shape.image,
        patch_size=shape.patch,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=shape.classes,
    )
    model = ViTForImageClassification(config)
    return model, lambda pixels: model(pixels).logits


LIBRARIES: dict[str, Callable[[Shape], tuple[nn.Module, Forward]]] = {
    "vitruvian": vitruvian,
    "vitruvian, checkpointed": lambda shape: vitruvian(shape, checkpointed=True),
    "timm": timm,
    "transformers": transformers,
}


def stepper(model: nn.Module, forward: Forward, shape: Shape) -> Callable[[], Tensor]:
    """A function that takes one training step on a fixed batch."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(shape.batch, 3, shape.image, shape.image, generator=generator)
    labels = torch.randint(shape.classes, (shape.batch,), generator=generator)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = F.cross_entropy(forward(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds_of(shape: Shape, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each library."""
    steps = {name: stepper(*make(shape), shape) for name, make in LIBRARIES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for turn in range(rounds + 1):  # the first round warms up
        for name in order.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def megabytes_of(name: str, shape: str) -> float:
    """Peak memory that training with a library adds to a process."""
    command = [sys.executable, __file__, "--memory", name, "--shape", shape]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_memory(name: str, shape: Shape) -> None:
    tiny = Shape(image=8, patch=4, layers=1, width=12, heads=1, batch=1, classes=2)
    stepper(*LIBRARIES[name](tiny), tiny)()  # imports what a step needs
    before = peak_kilobytes()
    step = stepper(*LIBRARIES[name](shape), shape)
    is_ours = name.startswith("vitruvian")  # as in our training loop
    with tune_allocator(keep_freed=not name.endswith("checkpointed")) if is_ours else nullcontext():
        for _ in range(3):
            step()
    print((peak_kilobytes() - before) / 1024)


def peak_kilobytes() -> int:
    """Of this process; getrusage would start from what the process that started this one had."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


def compare(title: str, rounds: int) -> list[dict[str, object]]:
    shape = SHAPES[title]
    seconds = seconds_of(shape, rounds)
    peers = [name for name in seconds if not name.startswith("vitruvian")]
    fastest = min(seconds[name] for name in peers)
    megabytes = {name: megabytes_of(name, title) for name in seconds}
    least = min(megabytes[name] for name in peers)
    rows: list[dict[str, object]] = []
    print(f"\n{title}, batch {shape.batch}\n{'':26}{'img/s':>8}{'speed':>8}{'MB':>8}{'memory':>8}   (peers' best = 1)")
    for name in seconds:
        row = {
            "shape": title,
            "library": name,
            "images_per_second": round(shape.batch / seconds[name], 2),
            "speed": round(fastest / seconds[name], 3),
            "megabytes": round(megabytes[name]),
            "memory": round(megabytes[name] / least, 3),
        }
        rows.append(row)
        print(f"{name:26}{row['images_per_second']:8}{row['speed']:8}{row['megabytes']:8}{row['memory']:8}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--out", type=Path, help="write the rows as JSON lines")
    parser.add_argument("--memory", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    declare_torchvision_operators()
    if arguments.memory:
        return print_memory(arguments.memory, SHAPES[arguments.shape])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} interleaved rounds")
    rows = [row for title in SHAPES if arguments.shape in (None, title) for row in compare(title, arguments.rounds)]
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return None


if __name__ == "__main__":
    main()

"""timm, our exact model and our fast ones, interleaved in one run, and what the fast ones lose.

    vit optimize W fast --calibrate OTHER_IMAGES --max-loss 0.5
    python benchmarks/fast.py --model W --fast fast [int8.onnx ...] [--data imagenet-val] [--batches 1,16] [--rounds 9]
    python benchmarks/fast.py --size B --int8 --tome-r 13 [--batches 1,8]       # random weights: time only

With --size, a model of random weights is quantized whole, on noise, with merged tokens if asked for: what that gains in
time, nothing about answers.
With --data, the answers of each are compared with those of the model on the same images: top-1 with the standard error
of the paired difference, and how many are the same.
Every round times each once on the same batch, in an order drawn anew, each in a process of its own; ratios are between
medians of the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import vitruvian as vt
from apart import apart, in_turn
from inference import random_model
from peers import Forward, timm_model
from vitruvian.compress.loss import accuracy_loss, read_sample

MOST_IMAGES = 50_000


def random_int8(model: vt.ViT, folder: Path, r: int) -> Path:
    """All dense layers in int8, with ranges of noise, and `r` tokens merged in each layer."""
    from vitruvian.compress.int8 import prepare, rounded_layers, write_int8
    from vitruvian.engines.export import export

    noise = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    ready, inputs = prepare(model.eval(), [noise])
    merged = vt.with_merging(ready, r) if r else ready
    export(merged, folder / "float.onnx")
    write_int8(folder / "float.onnx", folder / "int8.onnx", merged, rounded_layers(ready, inputs))
    return folder / "int8.onnx"


def source(weights: str | None, size: str) -> vt.ViT:
    model = vt.load(weights) if weights else random_model(size)
    assert isinstance(model, vt.ViT)
    return model


def timm(weights: str | None, size: str) -> Forward:
    with tempfile.TemporaryDirectory() as folder:
        return timm_model(source(weights, size), size, Path(folder)).eval()


def exact(weights: str | None, size: str) -> Forward:
    return vt.Classifier(source(weights, size), engine="auto").logits


def answers(path: Path) -> Forward:
    return vt.Classifier(path).logits


def compare(builders: dict[str, tuple[Any, ...]], batch_size: int, rounds: int) -> None:
    pixels = torch.randn(batch_size, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with apart(builders) as libraries:
        seconds, _ = in_turn(libraries, pixels, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(
            f"batch {batch_size:3}  {name:24} {batch_size / median:8.1f} images/s  "
            f"{medians['timm'] / median:5.2f} times timm",
            flush=True,
        )


def lose(model: vt.ViT, fast: dict[str, Forward], data: str) -> None:
    """Print what each loses on these images."""
    classifier = vt.Classifier(model, engine="auto")
    sample = read_sample(classifier, data, images=MOST_IMAGES, training=False)
    before = sample.logits(classifier.logits, "exact")
    for name, forward in fast.items():
        print(f"{name}: {accuracy_loss(model, before, sample.logits(forward, name), sample)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="weights; the size of timm's model is --size")
    parser.add_argument("--fast", nargs="+", default=[], help="what vit optimize wrote of them")
    parser.add_argument("--size", default="Ti", choices=["Ti", "S", "B"])
    parser.add_argument("--int8", action="store_true", help="quantize random weights")
    parser.add_argument("--tome-r", type=int, default=0, help="with --int8: tokens merged in each layer")
    parser.add_argument("--data", help="images with labels: top-1 of both")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model, weights = source(arguments.model, arguments.size), (arguments.model, arguments.size)
    with tempfile.TemporaryDirectory() as name:
        made = [random_int8(model, Path(name), arguments.tome_r)] if arguments.int8 else arguments.fast
        builders = {"timm": (timm, *weights), "ours exact": (exact, *weights)}
        for batch in map(int, arguments.batches.split(",")):
            compare(builders | {str(each): (answers, each) for each in made}, batch, arguments.rounds)
        fast = {str(each): answers(each) for each in made}
        if arguments.data:
            lose(model, fast, arguments.data)


if __name__ == "__main__":
    main()

"""A peer's ViT on CIFAR-10 from scratch for a given number of processor seconds, with the settings that it documents.

    OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/cifar10_peers.py timm FOLDER --depth 6 --out timm.jsonl
    OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/cifar10_peers.py vit-pytorch FOLDER --out vit-pytorch.jsonl

FOLDER holds CIFAR's binary version (data_batch_1.bin ...).

timm: its `vit_tiny` at 32 pixels with patch 4; AdamW 5e-4 x batch / 512, weight decay 0.05, batch 128, RandAugment
rand-m9-mstd0.5, Mixup 0.8, CutMix 1.0, label smoothing 0.1, erasing 0.25, stochastic depth 0.1 (timm's DeiT settings),
cosine with warm-up over the whole time, so that it always comes to its end.

vit-pytorch: `vit_for_small_dataset.ViT`, its README's answer to small datasets (shifted patches, attention with a
learned temperature), with the README's dropout of 0.1; sizes and training as in the one script of its repository that
trains on 32-pixel images (train_vit_decorr.py, CIFAR-100): width 128, patch 4, depth 6, 8 heads, MLP 512, Adam 3e-4,
batch 32, no augmentation, no schedule.

The clock is the processor time of this process, which has one thread: a shared or paused machine changes nothing. Time
spent evaluating does not count. Killed and started again it continues from a checkpoint beside --out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from peers import declare_torchvision_operators

Examples = tuple[np.ndarray, np.ndarray]
"""Images (N, 32, 32, 3) uint8 and labels (N,)."""
CHECKPOINT_SECONDS = 120
"""Processor seconds between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a peer documents: model, optimizer and views; `mix` makes soft targets (B, 10) of a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: int
    augment: Callable[[Image.Image], Tensor]
    plain: Callable[[Image.Image], Tensor]
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    schedule: Callable[[float], float]
    """The share of the learning rate at a progress from 0 to 1."""


def warmup_and_cosine(progress: float, warmup: float = 0.05) -> float:
    """Linear warm-up, then cosine to nothing."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + float(np.cos(np.pi * min(1.0, (progress - warmup) / (1 - warmup)))))


def timm(depth: int) -> Peer:
    import timm
    from timm.data import Mixup, create_transform
    from timm.optim import create_optimizer_v2

    batch = 128
    statistics = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.247, 0.243, 0.262)}
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, depth=depth, drop_path_rate=0.1
    )
    return Peer(
        model=model,
        optimizer=create_optimizer_v2(model, opt="adamw", lr=5e-4 * batch / 512, weight_decay=0.05),
        batch=batch,
        augment=create_transform(
            32, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25, color_jitter=None, **statistics
        ),
        plain=create_transform(32, is_training=False, crop_pct=1.0, **statistics),
        mix=Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10),
        schedule=warmup_and_cosine,
    )


def vit_pytorch(depth: int) -> Peer:
    from vit_pytorch.vit_for_small_dataset import ViT

    model = ViT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=128,
        depth=depth,
        heads=8,
        mlp_dim=512,
        dropout=0.1,
        emb_dropout=0.1,
    )

    def pixels(image: Image.Image) -> Tensor:  # (3, 32, 32) from -1 to 1
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1

    return Peer(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
        batch=32,
        augment=pixels,
        plain=pixels,
        mix=lambda pixels, labels: (pixels, F.one_hot(labels, 10).float()),
        schedule=lambda progress: 1.0,
    )


PEERS: dict[str, Callable[[int], Peer]] = {"timm": timm, "vit-pytorch": vit_pytorch}


def read(folder: Path, names: list[str]) -> Examples:
    records = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names])
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)


def batches(examples: Examples, size: int, view: Callable[[Image.Image], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = examples
    for start in range(0, len(images), size):
        pixels = torch.stack([view(Image.fromarray(image)) for image in images[start : start + size]])
        yield pixels, torch.from_numpy(labels[start : start + size])


def shuffled(examples: Examples, size: int, done: int) -> Iterator[Examples]:
    """Whole batches in a new order each epoch, from the batch after `done` of them."""
    images, labels = examples
    per_epoch = len(images) // size
    while True:
        order = np.random.RandomState(done // per_epoch).permutation(len(images))
        for start in range(done % per_epoch * size, per_epoch * size, size):
            chosen = order[start : start + size]
            done += 1
            yield images[chosen], labels[chosen]


def accuracy(peer: Peer, test: Examples) -> float:
    """Top-1 in percent over every image."""
    peer.model.eval()
    with torch.inference_mode():
        right = sum(
            int((peer.model(pixels).argmax(1) == labels).sum()) for pixels, labels in batches(test, 250, peer.plain)
        )
    peer.model.train()
    return 100 * right / len(test[0])


def save(path: Path, peer: Peer, progress: dict[str, float]) -> None:
    """Everything that the next step depends on, in one atomic write."""
    state: dict[str, Any] = {"model": peer.model.state_dict(), "optimizer": peer.optimizer.state_dict()}
    state |= {"progress": progress, "random": (random.getstate(), np.random.get_state(), torch.get_rng_state())}  # noqa: NPY002
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def restore(path: Path, peer: Peer) -> dict[str, float]:
    state = torch.load(path, weights_only=False)  # written by this script: it holds Python's generators
    peer.model.load_state_dict(state["model"])
    peer.optimizer.load_state_dict(state["optimizer"])
    random.setstate(state["random"][0])
    np.random.set_state(state["random"][1])  # noqa: NPY002, the one that timm draws from
    torch.set_rng_state(state["random"][2])
    progress: dict[str, float] = state["progress"]
    return progress


def step(peer: Peer, examples: Examples, rates: list[float], share: float) -> None:
    pixels, labels = next(batches(examples, len(examples[0]), peer.augment))
    pixels, targets = peer.mix(pixels, labels)
    for group, rate in zip(peer.optimizer.param_groups, rates):
        group["lr"] = rate * share
    loss = -(targets * F.log_softmax(peer.model(pixels), dim=1)).sum(1).mean()
    peer.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    peer.optimizer.step()


def train(peer: Peer, folder: Path, *, seconds: float, evaluations: int, out: Path) -> None:
    """Rows of seconds, images and test accuracy in `out`, after every part of the time."""
    training = read(folder, [f"data_batch_{i}" for i in range(1, 6)])
    test = read(folder, ["test_batch"])
    rates = [group["lr"] for group in peer.optimizer.param_groups]
    checkpoint = out.with_suffix(".pt")
    elapsed, steps, rows = 0.0, 0, 0
    if checkpoint.is_file():
        before = restore(checkpoint, peer)
        elapsed, steps, rows = before["elapsed"], int(before["steps"]), int(before["rows"])
    kept = out.read_text().splitlines(keepends=True)[:rows] if rows else []
    out.write_text("".join(kept))
    saved = elapsed
    for examples in shuffled(training, peer.batch, steps):
        if elapsed >= seconds:
            break
        start = time.process_time()
        step(peer, examples, rates, peer.schedule(elapsed / seconds))
        elapsed += time.process_time() - start
        steps += 1
        if elapsed >= seconds * (rows + 1) / evaluations:
            row = {"seconds": round(elapsed, 1), "images": steps * peer.batch, "top1": round(accuracy(peer, test), 2)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
            rows += 1
        if elapsed >= saved + CHECKPOINT_SECONDS:
            save(checkpoint, peer, {"elapsed": elapsed, "steps": steps, "rows": rows})
            saved = elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    declare_torchvision_operators()
    train(
        PEERS[arguments.peer](arguments.depth),
        arguments.folder,
        seconds=arguments.seconds,
        evaluations=arguments.evaluations,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()

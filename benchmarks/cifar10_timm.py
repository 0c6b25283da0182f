"""timm's ViT on CIFAR-10 from scratch for a given number of seconds, with the settings timm documents for ViTs.

    .venv-peers/bin/python benchmarks/cifar10_timm.py FOLDER --seconds 1800 --out timm.jsonl

FOLDER holds CIFAR's binary version (data_batch_1.bin ...). The model is timm's `vit_tiny` at 32 pixels
with patch 4; AdamW 5e-4 x batch / 512, weight decay 0.05, cosine with warm-up, RandAugment rand-m9-mstd0.5,
Mixup 0.8, CutMix 1.0, label smoothing 0.1, erasing 0.25, stochastic depth 0.1 (timm's DeiT settings). The
schedule runs over the seconds, so it always comes to its end. Time spent evaluating does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from peers import declare_torchvision_operators


def read(folder: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) uint8 and labels (N,) of binary batches."""
    records = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names])
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: object) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])  # type: ignore[operator]


def accuracy(model: nn.Module, batches: DataLoader[tuple[Tensor, int]]) -> float:
    """Top-1 in percent over every image."""
    model.eval()
    with torch.inference_mode():
        right = sum(int((model(pixels).argmax(1) == labels).sum()) for pixels, labels in batches)
    model.train()
    return 100 * right / len(batches.dataset)  # type: ignore[arg-type]


def share_of_rate(progress: float, warmup: float = 0.05) -> float:
    """Linear warm-up, then cosine to nothing; progress from 0 to 1."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + float(np.cos(np.pi * min(1.0, (progress - warmup) / (1 - warmup)))))


def train(folder: Path, *, seconds: float, depth: int, batch: int, evaluations: int, out: Path) -> None:
    import timm
    from timm.data import Mixup, create_transform
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    statistics = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.247, 0.243, 0.262)}
    augment = create_transform(
        32, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25, color_jitter=None, **statistics
    )
    plain = create_transform(32, is_training=False, crop_pct=1.0, **statistics)
    training = Images(*read(folder, [f"data_batch_{i}" for i in range(1, 6)]), augment)
    loader = DataLoader(training, batch, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)
    test = DataLoader(Images(*read(folder, ["test_batch"]), plain), 250)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, depth=depth, drop_path_rate=0.1
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4 * batch / 512, weight_decay=0.05)
    rates = [group["lr"] for group in optimizer.param_groups]
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    elapsed, images, due = 0.0, 0, seconds / evaluations
    out.write_text("")
    while elapsed < seconds:
        start = time.perf_counter()
        for pixels, labels in loader:
            pixels, targets = mixup(pixels, labels)
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share_of_rate(elapsed / seconds)
            loss = -(targets * F.log_softmax(model(pixels), dim=1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            images += len(pixels)
            elapsed += time.perf_counter() - start
            if elapsed >= due or elapsed >= seconds:
                due += seconds / evaluations
                row = {"seconds": round(elapsed, 1), "images": images, "top1": round(accuracy(model, test), 2)}
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
            if elapsed >= seconds:
                break
            start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("timm.jsonl"))
    arguments = parser.parse_args()
    declare_torchvision_operators()
    train(
        arguments.folder,
        seconds=arguments.seconds,
        depth=arguments.depth,
        batch=arguments.batch,
        evaluations=arguments.evaluations,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()

"""Multi-label training against minutes: `vit train` and a plain PyTorch loop with timm's multi-label recipe.

    python benchmarks/multilabel.py mosaics PETS DATA [--train N] [--test N]
    python benchmarks/multilabel.py vitruvian DATA --weights W --minutes 2 5 10 --out results.jsonl
    .venv-peers/bin/python benchmarks/multilabel.py timm DATA --weights W --minutes 2 5 10 --out results.jsonl

PETS holds the Oxford-IIIT Pets in class folders, `train` and `test`. DATA receives mosaics of one to four of its
images, whose labels are the breeds that they show, as files and `labels.csv` with the splits train, val and test. No
image is in mosaics of two splits; those of test show images of PETS' own test split. W is a timm ViT of 224 pixels as
safetensors, such as ViT-Ti/16.

Each number of minutes is a run of its own, with a schedule that ends in time. The minutes of both include reading the
data and starting; evaluation of the test split is not counted. The metric is the macro mAP of scikit-learn on `test`.

timm: `create_classification_loss(multi_label=True)` (BCE, or ASL with --loss asl), its AdamW with layer decay 0.75 and
weight decay 0.05, lr 5e-4 x batch / 256 with warmup and cosine, RandAugment rand-m9-mstd0.5-inc1, random erasing 0.25
and a new head that starts at zero; 10% of the time is a reserve, as in `vit train --minutes`. vitruvian: the recipe
`photos`, as `vit train DATA/labels.csv --from W --target multi --minutes N` chooses it.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

SIDE = 256  # of a mosaic, in pixels
BATCH, LR, WARMUP = 64, 5e-4, 0.1  # images, learning rate for 256 images, fraction of the steps
RESERVE = 0.1  # fraction of the time


def make_mosaics(pets: Path, out: Path, sizes: dict[str, int]) -> None:
    """Write mosaics of 1, 2 or 4 images and labels.csv."""
    rng, rows = np.random.default_rng(0), []
    for split, count in sizes.items():
        folder = pets / ("test" if split == "test" else "train")
        files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".png"))
        if split != "test":  # a tenth of the images for val
            files = [path for i, path in enumerate(files) if (i % 10 == 0) == (split == "val")]
        for number in range(count):
            cells = int(rng.choice([1, 2, 4]))
            chosen = [files[i] for i in rng.choice(len(files), cells, replace=False)]
            across, down = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[cells]
            mosaic = Image.new("RGB", (SIDE, SIDE))
            for cell, path in enumerate(chosen):
                part = Image.open(path).convert("RGB").resize((SIDE // across, SIDE // down), Image.Resampling.BILINEAR)
                mosaic.paste(part, (cell % across * part.width, cell // across * part.height))
            name = f"{split}/{number:05}.jpg"
            (out / split).mkdir(parents=True, exist_ok=True)
            mosaic.save(out / name, quality=90)
            rows.append((name, ";".join(sorted({path.parent.name for path in chosen})), split))
    with open(out / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])


def read_rows(data: Path, split: str) -> tuple[list[Path], np.ndarray, list[str]]:
    """Paths, labels (n, K) and names of a split."""
    with open(data / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({name for row in rows for name in row["label"].split(";")})
    chosen = [row for row in rows if row["split"] == split]
    truth = np.array([[name in row["label"].split(";") for name in names] for row in chosen], np.float32)
    return [data / row["path"] for row in chosen], truth, names


def mean_average_precision(truth: np.ndarray, scores: np.ndarray) -> float:
    from sklearn.metrics import average_precision_score

    present = truth.any(axis=0)
    return 100 * float(average_precision_score(truth[:, present], scores[:, present]))


def run_vitruvian(data: Path, options: argparse.Namespace, minutes: float) -> dict[str, float]:
    import vitruvian as vt
    from vitruvian.data.formats import open_dataset
    from vitruvian.evaluation.evaluate import run_targets

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "vitruvian", "train", str(data / "labels.csv"), "--from", str(options.weights)]
        command += [
            "--target",
            "multi",
            "--minutes",
            str(minutes),
            "--out",
            str(run),
            "--workers",
            str(options.workers),
        ]
        began = time.monotonic()
        subprocess.run([*command, "--set", f"loss={options.loss}"], check=True)
        seconds = time.monotonic() - began
        source = open_dataset(data / "labels.csv", target="multi", accepts=["multi"]).splits["test"]
        classifier = vt.Classifier(run)
        measures, _ = run_targets(classifier, source, batch_size=BATCH)
        epochs = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["epoch"]
        truth = np.nan_to_num(measures.targets).astype(np.float32)
        return {"map": mean_average_precision(truth, measures.scores), "seconds": seconds, "epochs": epochs}


class Mosaics(torch.utils.data.Dataset):
    def __init__(self, paths: list[Path], truth: np.ndarray, transform: object) -> None:
        self.paths, self.truth, self.transform = paths, truth, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.transform(Image.open(self.paths[index]).convert("RGB"))  # type: ignore[operator]
        return image, torch.from_numpy(self.truth[index])


def run_timm(data: Path, options: argparse.Namespace, minutes: float) -> dict[str, float]:
    from peers import declare_torchvision_operators

    declare_torchvision_operators()
    import timm
    from timm.data import create_transform, resolve_data_config
    from timm.loss import create_classification_loss
    from timm.optim import create_optimizer_v2

    began = time.monotonic()
    torch.manual_seed(0)
    paths, truth, names = read_rows(data, "train")
    cfg = {"file": str(options.weights)}
    model = timm.create_model(options.model, pretrained=True, pretrained_cfg_overlay=cfg, num_classes=len(names))
    nn.init.zeros_(model.head.weight)
    config = resolve_data_config({}, model=model)
    size = {"input_size": config["input_size"], "mean": config["mean"], "std": config["std"]}
    train_transform = create_transform(
        **size, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, interpolation="bicubic"
    )
    plain = create_transform(**size, crop_pct=config["crop_pct"], interpolation=config["interpolation"])
    loss_of = create_classification_loss(options.loss, multi_label=True)
    lr = LR * BATCH / 256
    optimizer = create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05, layer_decay=0.75)
    loader = torch.utils.data.DataLoader(
        Mosaics(paths, truth, train_transform), BATCH, shuffle=True, drop_last=True, num_workers=options.workers
    )
    end = began + 60 * minutes * (1 - RESERVE)
    steps, total, first = 0, 0, 0.0
    model.train()
    while steps < max(total, 3):
        for images, labels in loader:
            if steps == 1:
                first = time.monotonic()
            elif steps == 3:  # the schedule ends in time, as two steps predict it
                total = 3 + max(0, int((end - time.monotonic()) / ((time.monotonic() - first) / 2)))
            done = steps / max(total, steps + 1, 20)
            scale = min(1.0, done / WARMUP) * (1 + np.cos(np.pi * done)) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * scale * group.get("lr_scale", 1.0)
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if (total and steps >= total) or time.monotonic() > end:
                total = steps
                break
    seconds = time.monotonic() - began
    paths, truth, _ = read_rows(data, "test")
    test = torch.utils.data.DataLoader(Mosaics(paths, truth, plain), BATCH, num_workers=options.workers)
    model.eval()
    with torch.inference_mode():
        scores = torch.cat([model(images) for images, _ in test]).numpy()
    epochs = steps / max(1, len(loader))
    return {"map": mean_average_precision(truth, scores), "seconds": seconds, "epochs": epochs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["mosaics", "vitruvian", "timm"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="the weights' name in timm")
    parser.add_argument("--loss", default="bce", choices=["bce", "asl"])
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 5.0, 10.0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("multilabel.jsonl"))
    options = parser.parse_args()
    if options.what == "mosaics":
        pets, data = options.folders
        make_mosaics(pets, data, {"train": options.train, "val": options.train // 10, "test": options.test})
        return
    if options.weights is None:
        parser.error("give --weights")
    (data,) = options.folders
    run = {"vitruvian": run_vitruvian, "timm": run_timm}[options.what]
    for minutes in options.minutes:
        row = {"who": options.what, "loss": options.loss, "minutes": minutes, **run(data, options, minutes)}
        print(json.dumps(row), flush=True)
        with open(options.out, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

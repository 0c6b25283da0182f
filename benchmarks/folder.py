"""A folder of images to answers, beside the transformers pipeline and a timm loop with DataLoader workers.

    python benchmarks/folder.py WEIGHTS IMAGES [--count 200] [--rounds 3] [--engines torch,auto]
        [--workers 0,1,2]

`WEIGHTS` is a ViT-Ti/16 that every library can hold. Each runs in a process of its own that loads the model, answers
some images to warm up and then all of them, batch 16; rounds take turns. Answers are compared with ours.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from PIL import Image

from peers import declare_torchvision_operators

BATCH = 16
Answers = Callable[[list[str]], Iterable[str]]
"""From paths to the best label's number of each."""


def ours(folder: Path, engine: str) -> Answers:
    import vitruvian as vt

    classifier = vt.Classifier(folder / "native", engine=engine)
    if engine == "auto":  # what a second command finds: the choice of the first
        classifier.prepare(torch.zeros(BATCH, 3, *classifier.model.meta.preprocess.image_size))
    return lambda paths: [p.predictions[0].index for p in classifier.stream(paths, top=5, batch_size=BATCH)]


def pipeline(folder: Path, _: str) -> Answers:
    declare_torchvision_operators()
    import transformers

    transformers.logging.set_verbosity_error()
    run = transformers.pipeline("image-classification", model=str(folder / "huggingface"), device="cpu")
    numbers = run.model.config.label2id
    return lambda paths: [numbers[found[0]["label"]] for found in run(paths, batch_size=BATCH, top_k=5)]


def timm_loop(folder: Path, workers: str) -> Answers:
    declare_torchvision_operators()
    import timm

    stated = json.loads((folder / "native" / "config.json").read_text())["preprocess"]
    model = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(folder / "timm.safetensors")).eval()
    crop = stated["image_size"][0] / (stated["scaled_size"] or stated["image_size"])[0]
    transform = timm.data.create_transform(
        (3, *stated["image_size"]), mean=stated["mean"], std=stated["std"], interpolation="bicubic", crop_pct=crop
    )

    class Files(torch.utils.data.Dataset):
        def __init__(self, paths: list[str]) -> None:
            self.paths = paths

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(Image.open(self.paths[index]).convert("RGB"))

    def answers(paths: list[str]) -> list[int]:
        with torch.inference_mode():
            batches = torch.utils.data.DataLoader(Files(paths), batch_size=BATCH, num_workers=int(workers))
            return [number for pixels in batches for number in model(pixels).topk(5).indices[:, 0].tolist()]

    return answers


LIBRARIES = {"vitruvian": ours, "transformers pipeline": pipeline, "timm and DataLoader": timm_loop}


def one(name: str, engine: str, folder: Path, paths: list[str]) -> None:
    """One library's time in this process, as JSON on stdout."""
    answers = LIBRARIES[name](folder, engine)
    list(answers(paths[: 2 * BATCH]))
    start = time.perf_counter()
    cpu = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = list(answers(paths))
    seconds = time.perf_counter() - start
    used = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rate": len(paths) / seconds, "cores": used / seconds, "peak_mb": peak, "answers": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="torch,auto")
    parser.add_argument("--workers", default="0,1,2", help="of timm's DataLoader")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    paths = sorted(str(path) for path in asked.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    paths = random.Random(0).sample(paths, min(asked.count, len(paths)))
    if asked.one:
        return one(asked.one[0], asked.one[1], Path(asked.one[2]), paths)
    import vitruvian as vt

    ways = [("vitruvian", engine) for engine in asked.engines.split(",")] + [("transformers pipeline", "")]
    ways += [("timm and DataLoader", workers) for workers in asked.workers.split(",")]
    found: dict[tuple[str, str], list[dict[str, object]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), vt.load(asked.weights)
        vt.save(model, folder / "native")
        vt.save(model, folder / "timm.safetensors", family="timm")
        vt.save(model, folder / "huggingface", family="huggingface")
        for number in range(asked.rounds):
            for way in random.Random(number).sample(ways, len(ways)):
                command = [sys.executable, __file__, asked.weights, str(asked.images), "--count", str(asked.count)]
                done = subprocess.run([*command, "--one", *way, name], check=True, stdout=subprocess.PIPE, text=True)
                found[way].append(json.loads(done.stdout))
                print(number, *way, f"{found[way][-1]['rate']:.1f} images/s", file=sys.stderr, flush=True)
    best = max(statistics.median(r["rate"] for r in found[way]) for way in ways if way[0] != "vitruvian")
    wanted = found[ways[0]][0]["answers"]
    for way, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in ("rate", "cores", "peak_mb")}
        same = statistics.mean(a == b for a, b in zip(rounds[0]["answers"], wanted))
        print(
            f"{' '.join(way):24} {middle['rate']:6.1f} images/s  {middle['rate'] / best:5.2f} of the faster peer  "
            f"{middle['cores']:4.2f} cores  {middle['peak_mb']:5.0f} MB  same answers {same:.1%}"
        )
    return None


if __name__ == "__main__":
    main()

"""Makes every bad input of the corpus in a folder: `python bad_inputs.py FOLDER`, or `make(folder)`."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import pickle
import shutil
import signal
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from vitruvian.config import ViTConfig
from vitruvian.errors import Interrupted
from vitruvian.model.build import build
from vitruvian.training import Listener, train
from vitruvian.weights.save import save

DEEP = 100_000
"""Levels of nesting, far more than any parser that calls itself can follow."""
TINY = ("architecture.depth=1", "architecture.width=16", "architecture.mlp_dim=16", "architecture.num_heads=2")
RUN = (
    "architecture.patch_size=4",
    "steps=6",
    "batch_size=16",
    "warmup=0",
    "checkpoint_steps=2",
    "log_every=1",
    "workers=0",
)


class Planted:
    """A pickle of this makes the folder PLANTED when it is loaded as code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def make(folder: Path) -> None:
    """All good and bad inputs, each by a name of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    make_good(folder / "good")
    for part in (make_images, make_weights, make_model_folders, make_data, make_recipes, make_runs):
        part(folder, folder / "good")


def photo(seed: int = 0, size: tuple[int, int] = (24, 20)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def encoded(form: str, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    photo(seed).save(buffer, form)
    return buffer.getvalue()


def make_good(good: Path) -> None:
    """A model, images and a dataset with which only the other input can be at fault."""
    good.mkdir()
    config = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=2)
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(labels=("dark", "light"))
    save(model, good / "model")
    photo().save(good / "photo.png")
    for label in model.meta.labels:
        (good / "data" / label).mkdir(parents=True)
        for number in range(6):
            photo(number).save(good / "data" / label / f"{number}.png")
    (good / "masks").mkdir()
    for number in range(6):
        Image.fromarray((np.asarray(photo(number).convert("L")) > 127).astype(np.uint8)).save(
            good / "masks" / f"{number}.png"
        )


def flipped(content: bytes, places: range) -> bytes:
    changed = bytearray(content)
    for place in places:
        changed[place] ^= 1 << place % 8
    return bytes(changed)


def odd_files(folder: Path, suffix: str) -> None:
    """What is no regular file with contents of its own."""
    os.mkfifo(folder / f"fifo{suffix}")
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    (folder / f"dangling{suffix}").symlink_to("nowhere")
    (folder / f"endless{suffix}").symlink_to("/dev/zero")
    (folder / f"folder{suffix}").mkdir()
    (folder / f"empty{suffix}").touch()
    (folder / f"text{suffix}").write_text("hello\n")
    (folder / f"zeros{suffix}").write_bytes(bytes(4096))


def make_images(folder: Path, good: Path) -> None:
    images = folder / "images"
    images.mkdir()
    odd_files(images, ".jpg")
    for form, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("TIFF", "tif")):
        content = encoded(form)
        (images / f"truncated.{suffix}").write_bytes(content[: len(content) // 2])
        (images / f"flipped.{suffix}").write_bytes(flipped(content, range(8, len(content), 61)))
    (images / "bomb.png").write_bytes(png(100_000, 100_000, b"\0"))
    (images / "nothing.png").write_bytes(png(0, 0, b"\0"))
    (images / "text-bomb.png").write_bytes(png(4, 4, bytes(52), extra=text_chunk(70_000_000)))
    (images / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n")
    Image.new("L", (1, 60_000)).save(images / "narrow.png")
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(images / "nan.tif")
    shutil.copy(good / "photo.png", os.fsencode(images) + b"/\xff\xfe.png")
    shutil.copy(good / "photo.png", images / "two\nlines.png")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(columns: int, rows: int, pixels: bytes, extra: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), extra, chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def text_chunk(size: int) -> bytes:
    return chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(size)))


def make_weights(folder: Path, good: Path) -> None:
    weights = folder / "weights"
    weights.mkdir()
    for suffix in (".safetensors", ".pth", ".npz"):
        odd_files(weights, suffix)
    whole = (good / "model" / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    (weights / "truncated.safetensors").write_bytes(whole[:-50])
    (weights / "long-header.safetensors").write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    (weights / "deep-header.safetensors").write_bytes(with_header(b"[" * DEEP))
    (weights / "overlap.safetensors").write_bytes(
        whole[:8] + whole[8 : 8 + size].replace(b"0,", b"1,") + whole[8 + size :]
    )
    (weights / "huge-shape.safetensors").write_bytes(
        with_header(b'{"a":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}') + bytes(4)
    )
    (weights / "flipped-header.safetensors").write_bytes(flipped(whole, range(9, 8 + size, 40)))
    save_file({"a": torch.zeros(2)}, weights / "stranger.safetensors")
    saved = {
        "planted": {"a": Planted(folder / "PLANTED")},
        "list": [torch.zeros(2)],
        "tensor": torch.zeros(2),
        "numbers": {1: torch.zeros(2), "b": 3},
        "meta": {"cls_token": torch.zeros(2, device="meta")},
        "expanded": {"cls_token": torch.zeros(1).expand(1_000_000, 1_000_000)},
        "complex": {"cls_token": torch.zeros(2, dtype=torch.complex64)},
        "sparse": {"cls_token": torch.zeros(2, 2).to_sparse()},
        "nothing": {},
    }
    itself: dict[str, object] = {}
    itself["state_dict"] = itself
    for name, content in {**saved, "itself": itself}.items():
        torch.save(content, weights / f"{name}.pth")
    (weights / "raw-pickle.pth").write_bytes(pickle.dumps(Planted(folder / "PLANTED")))
    (weights / "truncated.pth").write_bytes((weights / "tensor.pth").read_bytes()[:-80])
    np.savez(weights / "objects.npz", a=np.array([Planted(folder / "PLANTED")], dtype=object))
    with zipfile.ZipFile(weights / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("embedding/kernel.npy", npy_header("<f4", (10**6, 10**6)))
        archive.writestr("../escaped.npy", npy_header("<f4", (1,)) + bytes(4))
    np.savez(weights / "stranger.npz", a=np.zeros(2))


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


CONFIGS: dict[str, object] = {
    "wide": {"width": 10**9},
    "long": {"depth": 10**9},
    "negative": {"image_size": [-16, -16]},
    "huge-image": {"image_size": [10**9, 10**9]},
    "no-heads": {"num_heads": 0},
    "many-classes": {"num_classes": 10**12},
    "text-width": {"width": "sixteen"},
    "list-width": {"width": [16]},
    "odd-pool": {"pool": "guess"},
}


def make_model_folders(folder: Path, good: Path) -> None:
    models = folder / "models"
    models.mkdir()

    def changed(name: str) -> Path:
        shutil.copytree(good / "model", models / name)
        return models / name / "config.json"

    for name, change in CONFIGS.items():
        config = changed(name)
        content = json.loads(config.read_text())
        inner = next(value for value in content.values() if isinstance(value, dict) and "width" in value)
        inner.update(change)
        config.write_text(json.dumps(content))
    changed("deep").write_text("[" * DEEP)
    changed("deeper").write_text('{"a":' * DEEP)
    changed("digits").write_text('{"width": ' + "9" * 10_000 + "}")
    changed("array").write_text("[1, 2]")
    changed("not-json").write_text("width = 3")
    changed("not-utf-8").write_bytes(b'{"\xff": 1}')
    changed("infinite").write_text('{"width": Infinity, "a": NaN}')
    changed("no-config").unlink()
    (changed("no-weights").parent / "model.safetensors").unlink()
    fifo = changed("fifo-config")
    fifo.unlink()
    os.mkfifo(fifo)
    index = changed("escaping-index").parent
    (index / "model.safetensors").unlink()
    (index / "config.json").write_text('{"model_type": "vit"}')
    (index / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../good/model/model.safetensors"}}')
    model = build(
        ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=2)
    )
    for name, value, place in (("inf", math.inf, "blocks."), ("nan", math.nan, "")):
        for key, parameter in model.named_parameters():
            if key.startswith(place) and key.endswith("weight"):
                torch.nn.init.constant_(parameter, value)
        save(model, models / name)


def tar_of(path: Path, members: dict[str, bytes], *, end: bool = True) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        length = archive.offset
    if not end:
        os.truncate(path, length)


def make_data(folder: Path, good: Path) -> None:
    data = folder / "data"
    data.mkdir()

    def copied(name: str) -> Path:
        return Path(shutil.copytree(good / "data", data / name))

    (data / "empty").mkdir()
    (data / "empty-classes" / "a").mkdir(parents=True)
    (data / "empty-classes" / "b").mkdir()
    broken = copied("all-broken")
    for path in broken.rglob("*.png"):
        path.write_bytes(b"no image")
    os.mkfifo(copied("with-fifo") / "dark" / "pipe.png")
    (copied("with-loop") / "dark" / "loop.png").symlink_to("loop.png")
    (copied("with-folder-loop") / "dark" / "again").symlink_to("..")
    (copied("with-endless") / "dark" / "zero.png").symlink_to("/dev/zero")
    os.mkdir(os.fsencode(copied("odd-names")) + b"/\xff\xfe")
    shutil.copy(good / "photo.png", os.fsencode(data) + b"/odd-names/\xff\xfe/a.png")
    os.mkfifo(data / "fifo.csv")
    os.mkfifo(data / "fifo.tar")
    (data / "loop.csv").symlink_to("loop.csv")
    (data / "endless.csv").symlink_to("/dev/zero")
    rows = "\n".join(f"{good.name}/data/dark/{n}.png,dark" for n in range(3))
    (folder / "escaping.csv").write_text(f"path,label\n{rows}\n../../../../../../etc/passwd,light\n")
    (folder / "absolute.csv").write_text(f"path,label\n{rows}\n/etc/passwd,light\n")
    (data / "no-columns.csv").write_text("a,b\n1,2\n")
    (data / "not-utf-8.csv").write_bytes(b"path,label\n\xff\xfe.png,x\n")
    (data / "empty.csv").touch()
    (data / "deep.jsonl").write_text('{"path": ' + "[" * DEEP + "\n")
    (data / "digits.jsonl").write_text('{"path": "a.png", "label": ' + "9" * 10_000 + "}\n")
    pairs = [{f"{n:03}.png": encoded("PNG", n), f"{n:03}.cls": b"%d" % (n % 2)} for n in range(4)]
    tar_of(data / "cut.tar", {name: content for pair in pairs for name, content in pair.items()}, end=False)
    whole = (data / "cut.tar").read_bytes()
    (data / "truncated.tar").write_bytes(whole[: len(whole) * 2 // 3 + 100])
    tar_of(data / "escaping.tar", {"../../escaped.png": encoded("PNG"), "../../escaped.cls": b"0"})
    (data / "zeros.tar").write_bytes(bytes(10_240))
    (data / "text.tar").write_text("hello")
    (data / "bomb.tar").write_bytes(tar_header("a.png", 8 * 10**10) + bytes(512))
    (data / "text.parquet").write_text("hello")
    (data / "truncated.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    cifar = data / "cifar-10-batches-py"
    cifar.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
        (cifar / name).write_bytes(pickle.dumps(Planted(folder / "PLANTED")))
    idx = data / "idx"
    idx.mkdir()
    for part in ("train", "t10k"):
        (idx / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, 2**31 - 1, 2**31 - 1, 28))
        (idx / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 2**31 - 1))
    bomb = data / "idx-bomb"
    bomb.mkdir()
    images = gzip.compress(struct.pack(">IIII", 2051, 9, 28, 28) + bytes(10**8), 1)
    for part in ("train", "t10k"):
        (bomb / f"{part}-images-idx3-ubyte.gz").write_bytes(images)
        (bomb / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">II", 2049, 9) + bytes(9)))


def tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


RECIPES = {
    "deep": "a = " + "[" * DEEP,
    "deep-key": ".".join("a" * DEEP) + " = 1",
    "digits": "seed = " + "9" * 10_000,
    "forever": "epochs = 1e308",
    "infinite": "epochs = inf",
    "not-a-number": "epochs = 1\nlr = nan",
    "seed": f"steps = 1\nseed = {10**30}",
    "unknown": "steps = 1\nepocs = 3",
    "twice": "steps = 1\nsteps = 2",
    "empty": "",
    "own-base": 'base = "own-base.toml"',
    "typed": 'steps = "many"',
    "date": "steps = 1979-05-27",
    "escaping-base": 'base = "../../../../../../etc/passwd"',
}


def make_recipes(folder: Path, good: Path) -> None:
    recipes = folder / "recipes"
    recipes.mkdir()
    odd_files(recipes, ".toml")
    for name, content in RECIPES.items():
        (recipes / f"{name}.toml").write_text(content)
    (recipes / "own-base.toml").write_text(f"base = {json.dumps(str(recipes / 'own-base.toml'))}")
    (recipes / "not-utf-8.toml").write_bytes(b'about = "\xff"')


class StopAt(Listener):
    def stepped(self, step: int) -> None:
        if step == 5:
            signal.raise_signal(signal.SIGTERM)


def make_runs(folder: Path, good: Path) -> None:
    """A run that was stopped after a checkpoint, damaged in one file each."""
    runs = folder / "runs"
    whole = runs / "whole"
    with contextlib.suppress(Interrupted):
        train("digits", recipe="digits", out=whole, settings=[*TINY, *RUN], listeners=[StopAt()])

    def damaged(name: str, file: str) -> Path:
        copy = Path(shutil.copytree(whole, runs / name))
        return next(iter(sorted(copy.glob(f"checkpoints/*/{file}"))[::-1]), copy / file)

    damaged("no-record", "run.json").unlink()
    for file in ("run.json", "recipe.toml", "position.json", "state.safetensors", "metrics.jsonl"):
        stem = file.partition(".")[0]
        path = damaged(f"empty-{stem}", file)
        path.write_bytes(b"")
        path = damaged(f"truncated-{stem}", file)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        path = damaged(f"flipped-{stem}", file)
        path.write_bytes(flipped(path.read_bytes(), range(path.stat().st_size // 2, path.stat().st_size // 2 + 1)))
        path = damaged(f"deep-{stem}", file)
        path.write_bytes(b"[" * DEEP)
        path = damaged(f"fifo-{stem}", file)
        path.unlink()
        os.mkfifo(path)
    for name, step in (("before", -5), ("after", 10**9)):
        path = damaged(f"{name}-position", "position.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "step": step}))
    path = damaged("other-lr", "recipe.toml")
    path.write_text(path.read_text().replace("lr = 0.", "lr = 1."))
    path = damaged("other-steps", "recipe.toml")
    path.write_text(path.read_text().replace("steps = 6", "steps = 5"))
    for name in ("sweep", "study"):
        (folder / name).mkdir()
        (folder / name / f"{name}.json").write_text("[" * DEEP)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

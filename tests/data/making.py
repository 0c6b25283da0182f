"""Small datasets of every kind, and transforms, for the tests of sources and loader."""

import gzip
import io
import json
import pickle
import struct
import tarfile

import numpy as np
import torch
from PIL import Image

from vitruvian.data.sources import Source
from vitruvian.errors import ImageError


def png(level=0):
    """A tiny image whose pixels all have one level."""
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (level % 256, level // 256, 7)).save(file, "PNG")
    return file.getvalue()


def level_of(data):
    red, green, _ = Image.open(io.BytesIO(data)).getpixel((0, 0))
    return red + 256 * green


def make_folder(root, classes=("cat", "dog"), each=3):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(each):
            (root / name / f"{index}.png").write_bytes(png(100 * number + index))
    return root


def add_member(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def make_shard(path, levels, *, classes=2, format=tarfile.USTAR_FORMAT):
    """Samples `0000.png` and `0000.cls` whose level is in `levels` and whose class follows from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for number, level in enumerate(levels):
            add_member(archive, f"{number:04d}.png", png(level))
            add_member(archive, f"{number:04d}.cls", str(level % classes).encode())
    return path


def make_shards(root, *, shards=5, each=4, sizes=True, split="train"):
    """`split-000.tar` and so on with levels from 0 up, the classes even and odd, and the files beside them."""
    counts = {}
    for shard in range(shards):
        count = each + shard % 3
        start = 50 * shard
        make_shard(root / f"{split}-{shard:03d}.tar", range(start, start + count))
        counts[f"{split}-{shard:03d}.tar"] = count
    (root / "classes.txt").write_text("even\nodd\n")
    if sizes:
        (root / "sizes.json").write_text(json.dumps(counts))
    return sum(counts.values())


def idx_bytes(values):
    values = np.asarray(values, np.uint8)
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def make_idx(folder, count=6, packed=True):
    folder.mkdir()
    images = np.arange(count * 6).reshape(count, 3, 2)
    for split in ("train", "t10k"):
        for name, values in (("images-idx3", images), ("labels-idx1", np.arange(count) % 3)):
            data = idx_bytes(values)
            if packed:
                (folder / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(data))
            else:
                (folder / f"{split}-{name}-ubyte").write_bytes(data)
    return images


def cifar_batch(count=4, start=0):
    """Pixels (count, 3072) and labels."""
    rng = np.random.default_rng(start)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), [(start + i) % 10 for i in range(count)]


CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def make_cifar_binary(folder):
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    for number, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"]):
        pixels, labels = cifar_batch(start=number)
        records = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def python2_pickle(content):
    """What Python 2 wrote: text as bytes, and arrays with the names that NumPy had then."""

    def dump(value):
        if isinstance(value, str):
            return b"U" + bytes([len(value)]) + value.encode()
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(map(dump, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(dump(key) + dump(item) for key, item in value.items()) + b"u"
        rows, columns = value.shape
        dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        raw = value.tobytes()
        return (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01("
            + dump(rows) + dump(columns) + b"t" + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
        )  # fmt: skip

    return b"\x80\x02" + dump(content) + b"."


def make_cifar_pickles(folder, dumps=python2_pickle):
    folder.mkdir()
    (folder / "batches.meta").write_bytes(dumps({"label_names": CIFAR10_NAMES}))
    for number, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"]):
        pixels, labels = cifar_batch(start=number)
        (folder / name).write_bytes(dumps({"data": pixels, "labels": labels}))
    return folder


def python3_pickle(content):
    return pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2)


class Numbers(Source):
    """Samples without images: sample i is an array of the number i, and some are broken."""

    def __init__(self, length, *, classes=4, broken=(), labels=None):
        self.name = "numbers"
        self.classes = tuple(map(str, range(classes)))
        self.length = length
        self.broken = frozenset(broken)
        self._labels = np.arange(length, dtype=np.int32) % classes if labels is None else np.asarray(labels, np.int32)

    def __len__(self):
        return self.length

    def label(self, index):
        return int(self._labels[index])

    def labels(self):
        return self._labels

    def weight(self, index):
        return 1 + index / 100

    def read(self, index):
        if index in self.broken:
            raise ImageError("broken on purpose")
        return np.full((2, 2), index % 256, np.uint8)

    def key(self, index):
        return f"number {index}"


def noisy_transform(image, rng):
    """The image plus what the generator gives: two results are equal only if both are."""
    return torch.from_numpy(image[None].astype(np.float32)) + float(rng.random())


def failing_transform(image, rng):
    raise ValueError("a mistake\nin the transform")


def decoded_transform(image, rng):
    return torch.tensor([[[float(level_of(image)) + float(rng.random())]]])

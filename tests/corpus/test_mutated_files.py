"""Commands on mutated copies of real small files of every kind: a result or one line, whatever the bytes are.

Each kind runs in a process of its own. An internal error, a traceback, a crash, a hang, a control character in the
output or more than a gigabyte of memory fails. The quick part tries a few mutations of each kind, the slow part many.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import bad_inputs
import numpy as np
import pytest
import torch

from forked import Forked, exit_code
from vitruvian.cli.app import main
from vitruvian.training.recipe import read_recipe, to_toml
from vitruvian.weights.checkpoint_files import METADATA_KEY, Description
from vitruvian.weights.load import load
from vitruvian.weights.save import save

QUICK_SECONDS, SLOW_SECONDS = 0.4, 1.5  # for each kind
MAX_KILOBYTES = 600 * 2**10  # beside what the process had when it was forked, up to 400 MB in a new one
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PIECES = [
    b"\0", b"\xff" * 8, b"\x1b[31m\x07", b"[" * 300, b'{"a":' * 300, b"9" * 400, b"9" * 5000, b"-1", b"1e999", b"null",
    b"NaN", b"../", b'"', b"\n", b",", b"\xed\xa0\x80", "٣".encode(), "²".encode(), b"[]", b"{}", b"\x80", b"\x85" * 99,
]  # fmt: skip


def shard(good: Path, path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(4):
            for name, content in ((f"{number}.png", bad_inputs.encoded("PNG", number)), (f"{number}.cls", b"ab"[:1])):
                member = tarfile.TarInfo(name if number else f"é/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.replace(b"a", b"ab"[number % 2 : number % 2 + 1])))


def table(good: Path, path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": bad_inputs.encoded("PNG", number), "path": None} for number in range(4)]
    features = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}}}
    content = pyarrow.table({"image": cells, "label": [0, 1, 0, 1]})
    parquet.write_table(content.replace_schema_metadata({"huggingface": json.dumps(features)}), path)


def manifest(good: Path, path: Path) -> None:
    rows = [f"good/data/{label}/{n}.png,{label},train,1.0" for label in ("dark", "light") for n in range(3)]
    path.write_text("path,label,split,weight\n" + "\n".join(rows) + "\n")


LISTED = [(f"good/data/{label}/{n}.png", label) for label in ("dark", "light") for n in range(3)]


def json_lines(good: Path, path: Path) -> None:
    path.write_text("".join(json.dumps({"path": image, "label": label}) + "\n" for image, label in LISTED))


def coco(good: Path, path: Path) -> None:
    content = {
        "images": [{"id": n, "file_name": image} for n, (image, _) in enumerate(LISTED)],
        "annotations": [{"image_id": n, "category_id": label == "dark"} for n, (_, label) in enumerate(LISTED)],
        "categories": [{"id": 0, "name": "light"}, {"id": 1, "name": "dark"}],
    }
    path.write_text(json.dumps(content))


def archive(good: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for number in range(4):
            file.writestr(f"photos/{'ab'[number % 2]}/{number}.png", bad_inputs.encoded("PNG", number))


def saved(good: Path, path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    cells = [{"bytes": bad_inputs.encoded("PNG", number), "path": None} for number in range(4)]
    rows = {"image": cells, "label": [0, 1, 0, 1]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(path.parent))


def heic(good: Path, path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.from_bytes("RGB", (16, 16), bytes(768)).save(path)


def digits(good: Path, path: Path) -> None:
    labels = path.with_name("train-labels-idx1-ubyte")
    labels.write_bytes(struct.pack(">II", 2049, 4) + bytes([0, 1, 0, 1]))
    path.write_bytes(struct.pack(">IIII", 2051, 4, 5, 5) + bytes(100))


def batch(good: Path, path: Path) -> None:
    names = {b"label_names": [b"a%d" % n for n in range(10)]}
    path.with_name("batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    content = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}
    path.write_bytes(pickle.dumps(content, protocol=2))


def old_pickle(good: Path, path: Path) -> None:
    save(load(good / "model"), path, family="torchvision")
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)


def folder_of(good: Path, path: Path) -> None:
    shutil.copytree(good / "model", path.parent, dirs_exist_ok=True)


def huggingface(good: Path, path: Path) -> None:
    save(load(good / "model"), path.parent, family="huggingface")


def recipe(good: Path, path: Path) -> None:
    path.write_text(to_toml(read_recipe("digits").to_json()))


def graph(good: Path, path: Path) -> None:
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    nodes = [("Flatten", ["x"], ["flat"]), ("MatMul", ["flat", "W"], ["logits"])]
    make, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    weight = onnx.helper.make_tensor("W", kind, [768, 2], [0.1] * 1536)
    inputs, outputs = [make("x", kind, ["batch", 3, 16, 16])], [make("logits", kind, ["batch", 2])]
    made = onnx.helper.make_graph([onnx.helper.make_node(*node) for node in nodes], "g", inputs, outputs, [weight])
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    model.metadata_props.add(key=METADATA_KEY, value=json.dumps(Description.of(load(good / "model")).to_json()))
    path.write_bytes(model.SerializeToString())


PREDICT, DOCTOR = "predict {good}/photo.png -m {file}", "doctor {file} --workers 0"
KINDS = {
    "w.pth": (old_pickle, PREDICT),
    "w.npz": (lambda good, path: save(load(good / "model"), path, family="google"), PREDICT),
    "w.safetensors": (lambda good, path: shutil.copy(good / "model/model.safetensors", path), PREDICT),
    "torchvision/w.pth": (lambda good, path: save(load(good / "model"), path, family="torchvision"), PREDICT),
    "native/config.json": (folder_of, "predict {good}/photo.png -m {folder}"),
    "hf/config.json": (huggingface, "convert {folder} {out} --to native"),
    "graph/g.onnx": (graph, PREDICT),
    "train.tar": (shard, DOCTOR),
    "train.parquet": (table, DOCTOR),
    "m.csv": (manifest, DOCTOR),
    "m.jsonl": (json_lines, DOCTOR),
    "m.json": (coco, DOCTOR),
    "a.zip": (archive, DOCTOR),
    "saved/state.json": (saved, "doctor {folder} --workers 0"),
    "saved/data-00000-of-00001.arrow": (saved, "doctor {folder} --workers 0"),
    "photo.heic": (heic, "predict {file} -m {good}/model"),
    "idx/train-images-idx3-ubyte": (digits, "doctor {folder} --workers 0"),
    "cifar/data_batch_1": (batch, "doctor {folder} --workers 0"),
    "r.toml": (recipe, "train {good}/nowhere --recipe {file}"),
    "photo.png": (lambda good, path: path.write_bytes(bad_inputs.encoded("PNG")), "predict {file} -m {good}/model"),
    "photo.jpg": (lambda good, path: path.write_bytes(bad_inputs.encoded("JPEG")), "predict {file} -m {good}/model"),
}  # fmt: skip
"""For each kind of file: how to make a good one, and the command that reads it."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    bad_inputs.make_good(folder / "good")
    return folder / "good"


def mutate(content: bytes, seed: int) -> bytes:
    """Change bytes, cut, repeat or insert a piece; half of the changes are near the start, where headers are."""
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(rng.choice((min(len(content), 600), len(content))) or 1)
        stop = place + rng.choice((0, 1, 1, 4, 8, 64))
        piece = rng.choice((rng.randbytes(1), rng.choice(PIECES), content[place : place + 40] * 2, b""))
        content = content[:place] + piece + content[stop:]
    return content


def fuzz(command: str, file: Path, good: Path, seconds: float) -> None:
    """Run the command on mutations of a file until the time is over, each announced on stderr."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole, started, seed = file.read_bytes(), time.monotonic(), 0
    names = {"good": good, "file": file, "folder": file.parent, "out": file.parent / "out"}
    while time.monotonic() - started < seconds or seed < 3:
        sys.argv = ["vit", *(word.format(**names) for word in command.split())]
        print(f"mutation {seed}", file=sys.stderr, flush=True)
        file.write_bytes(mutate(whole, seed) if seed else whole)
        code = exit_code(main)
        assert code in (0, 1, 2), (seed, code)
        shutil.rmtree(names["out"], ignore_errors=True)
        seed += 1
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < MAX_KILOBYTES, f"{kilobytes >> 10} MB more than at the start"


def check(good: Path, tmp_path: Path, kind: str, seconds: float) -> None:
    make, command = KINDS[kind]
    file = good.parent / kind if kind.startswith("m.") else tmp_path / kind  # its paths begin there
    file.parent.mkdir(exist_ok=True)
    env = {"VITRUVIAN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def work() -> None:
        os.chdir(tmp_path)
        make(good, file)
        fuzz(command, file, good, seconds)

    ran = Forked(work=work, env=env).wait(seconds + 60)
    assert (ran.code, "internal error" in ran.err, "Traceback" in ran.err) == (0, False, False), ran.err[-3000:]
    assert not CONTROL.search(ran.out + ran.err)
    first = ran.err.partition("mutation 1\n")[0]
    assert "error: " not in first or "nowhere: no such file" in first, first  # the file was good before it was mutated


@pytest.mark.parametrize("kind", KINDS)
def test_some_mutations_of_a_file_are_a_result_or_one_line(good, tmp_path, kind):
    check(good, tmp_path, kind, QUICK_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_of_a_file_are_a_result_or_one_line(good, tmp_path, kind):
    check(good, tmp_path, kind, SLOW_SECONDS)

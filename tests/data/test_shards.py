"""Tar shards on the local disk."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
from making import add_member, level_of, make_shard, make_shards, png

from vitruvian.data import columns
from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import decode
from vitruvian.data.formats import open_dataset
from vitruvian.data.shards import read_member
from vitruvian.data.stored import read_npy
from vitruvian.errors import DataError, ImageError


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            add_member(archive, name, data)
    return path


def test_samples_are_read_in_any_order(tmp_path):
    total = make_shards(tmp_path, shards=3, each=4)
    train = open_dataset(tmp_path).train
    assert len(train) == total == 15
    assert train.classes == ("even", "odd")
    assert train.key(4) == "train-001.tar:0000.png"
    assert [level_of(train.read(i)) for i in (14, 0, 4)] == [105, 0, 50]
    assert train.labels().tolist() == [level_of(train.read(i)) % 2 for i in range(total)]


@pytest.mark.parametrize("data", ["train-{000..002}.tar", "train-*.tar", "train-00{0,1,2}.tar", "train-00[0-2].tar"])
def test_a_pattern_names_the_shards(tmp_path, data):
    total = make_shards(tmp_path, shards=3)
    make_shard(tmp_path / "other-9.tar", [0, 1])
    assert len(open_dataset(tmp_path / data).train) == total


def test_splits_are_told_from_names_or_folders(tmp_path):
    make_shards(tmp_path / "a", shards=2)
    make_shards(tmp_path / "a", shards=1, split="set-val")
    assert list(open_dataset(tmp_path / "a").splits) == ["train", "val"]
    make_shard(tmp_path / "b/train/00.tar", [0, 1])
    make_shard(tmp_path / "b/test/00.tar", [0, 1])
    assert list(open_dataset(tmp_path / "b").splits) == ["train", "test"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_understood(tmp_path, format):
    name = "folder/" + "ä" * 90
    with tarfile.open(tmp_path / "x.tar", "w", format=format) as archive:
        for number in range(2):
            add_member(archive, f"{name[: 40 if format == tarfile.USTAR_FORMAT else None]}{number}.png", png(number))
            add_member(archive, f"{name[: 40 if format == tarfile.USTAR_FORMAT else None]}{number}.cls", b"%d" % number)
    train = open_dataset(tmp_path / "x.tar").train
    assert [level_of(train.read(i)) for i in (0, 1)] == [0, 1]
    assert "ä" in train.key(0)


def test_labels_come_from_cls_or_json_before_or_after_the_image(tmp_path):
    write_tar(
        tmp_path / "x.tar",
        [
            ("0.jpg", png()),
            ("0.json", json.dumps({"label": "cat", "weight": 2}).encode()),
            ("1.cls", b"dog\n"),
            ("1.webp", png()),
            ("2.json", b'{"class": "cat"}'),
            ("2.cls", b"emu"),
            ("2.seg.png", png()),
        ],
    )
    train = open_dataset(tmp_path / "x.tar").train
    assert train.classes == ("cat", "dog", "emu")
    assert train.labels().tolist() == [0, 1, 2]
    assert [train.weight(i) for i in range(3)] == [2.0, 1.0, 1.0]


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_are_read_as_numpy_writes_them(version):
    for array in (np.arange(24, dtype=np.uint8).reshape(4, 2, 3), np.eye(3, dtype=np.uint8)):
        for stored in (array, np.asfortranarray(array)):
            assert np.array_equal(read_npy(npy(stored, version)), array)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "magic"),
        (npy(np.eye(3, dtype=np.uint8))[:9], "header"),
        (npy(np.eye(3, dtype=np.uint8))[:-1], "buffer"),
        (npy(np.zeros((0, 4), np.uint8)), "expected numbers"),
        (npy(np.array([[None]])), "expected numbers"),
    ],
)
def test_a_broken_array_is_an_error_of_its_image(tmp_path, data, words):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ImageError, match=f"a.npy: broken array .*{words}"):
        read_member(OpenFile(tmp_path / "x"), 0, len(data), "a.npy")


def test_arrays_are_pixels(tmp_path):
    good = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    members = [("0.npy", npy(good)), ("0.cls", b"0"), ("1.npy", npy(good.astype(float))), ("1.cls", b"1")]
    train = open_dataset(write_tar(tmp_path / "x.tar", members)).train
    assert np.array_equal(train.read(0), good)
    with pytest.raises(ImageError, match="an array of NumPy"):  # only a model that reads stored channels takes it
        decode(train.read(1))


def test_incomplete_samples_are_counted(tmp_path):
    members = [("0.png", png()), ("0.cls", b"0"), ("1.cls", b"1"), ("2.png", png()), ("3.png", png()), ("3.cls", b"1")]
    data = open_dataset(write_tar(tmp_path / "x.tar", members))
    assert len(data.train) == 2
    assert data.notes == (
        "skipped 1 sample without an image, x.tar:1",
        "skipped 1 image without a label, x.tar:2.png",
    )


def test_a_source_survives_the_journey_to_a_worker(tmp_path):
    make_shards(tmp_path, shards=2)
    train = open_dataset(tmp_path).train
    train.read(0)
    assert pickle.loads(pickle.dumps(train)).read(3) == train.read(3)


def test_shards_without_labels_are_an_error(tmp_path):
    write_tar(tmp_path / "x.tar", [("0.png", png()), ("1.png", png())])
    with pytest.raises(DataError, match=r"no labeled images \(skipped 2 images without a label, .*0001.cls"):
        open_dataset(tmp_path / "x.tar")


@pytest.mark.parametrize("keep", [0, 100, 600, 1024 + 300, -1500])
def test_a_shard_cut_short_is_an_error(tmp_path, keep):
    path = make_shard(tmp_path / "x.tar", range(4))
    whole = path.read_bytes()
    size = 4 * 2 * 1024  # members of 4 samples: header and one block each
    assert len(whole) >= size
    path.write_bytes(whole[: keep if keep >= 0 else size + keep])
    with pytest.raises(DataError, match=r"x.tar: (not a complete tar file|damaged after byte)"):
        open_dataset(path)


def test_a_broken_header_is_not_taken_for_the_end(tmp_path):
    path = make_shard(tmp_path / "x.tar", range(4))
    data = bytearray(path.read_bytes())
    data[4096:4100] = b"oops"
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged after byte 4096"):
        open_dataset(path)


def test_a_compressed_shard_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w:gz") as archive:
        add_member(archive, "0.png", png())
    with pytest.raises(DataError, match="decompress compressed shards"):
        open_dataset(tmp_path / "x.tar")


def test_a_missing_shard_of_a_pattern_is_named(tmp_path):
    make_shards(tmp_path, shards=2)
    with pytest.raises(DataError, match=r"train-002.tar: no such file"):
        open_dataset(f"{tmp_path}/train-{{000..002}}.tar")
    with pytest.raises(DataError, match="no file matches this pattern"):
        open_dataset(f"{tmp_path}/nothing-*.tar")


def test_an_open_file_is_closed_with_its_object_also_while_python_shuts_down(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"abc")
    file = OpenFile(tmp_path / "file")
    assert file.read(1, 2) == b"bc"
    descriptor = file._descriptor
    monkeypatch.setattr(columns, "os", None)  # Python clears modules before the last objects
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)

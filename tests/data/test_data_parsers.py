"""Parsers of untrusted bytes: whatever they are given, they end with a result, a DataError or an ImageError."""

import io
import pickle
import struct
import tarfile
from functools import partial

import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from making import add_member, idx_bytes, make_cifar_binary, png, python2_pickle
from photos import encoded, photo

from vitruvian.data.augment import Box, decode_box, read_header
from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import decode
from vitruvian.data.formats import open_dataset
from vitruvian.data.names import parse_classes
from vitruvian.data.pixels import plain_pickle, read_idx_labels
from vitruvian.data.releases import read_matlab
from vitruvian.data.shards import read_member, read_samples
from vitruvian.errors import DataError, ImageError
from vitruvian.targets import KINDS

QUICK = settings(
    max_examples=60,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def damaged(whole):
    """Bytes of any kind, and a good file with some bytes changed, cut out or put in."""

    @st.composite
    def drawn(draw):
        content = bytearray(whole)
        for _ in range(draw(st.integers(1, 6))):
            place = draw(st.integers(0, len(content)))
            kind = draw(st.sampled_from(("change", "cut", "insert", "number")))
            if kind == "cut":
                del content[place:]
            elif kind == "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=40))
            elif kind == "number":
                content[place : place + 4] = struct.pack("<I", draw(st.sampled_from((0, 1, 2**31, 2**32 - 1))))
            elif place < len(content):
                content[place] = draw(st.integers(0, 255))
        return bytes(content)

    return st.one_of(drawn(), st.binary(max_size=600))


def ends_well(action, *arguments):
    """Run a parser; any error but ours fails the test."""
    try:
        return action(*arguments)
    except (DataError, ImageError) as error:
        text = str(error)
    assert text.isprintable()
    assert len(text) < 2000
    return None


ANY_TEXT = st.text(max_size=200)


def array_bytes():
    file = io.BytesIO()
    np.save(file, np.zeros((2, 2, 3), np.uint8))
    return file.getvalue()


def shard():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add_member(archive, "0.png", png(1))
        add_member(archive, "0.cls", b"1")
        add_member(archive, "n" * 120 + ".json", b'{"label": 3, "weight": 2}')
        add_member(archive, "ü.npy", b"x")
    return file.getvalue()


@pytest.fixture(scope="module")
def matlab(tmp_path_factory):
    path = tmp_path_factory.mktemp("matlab") / "x.mat"
    rows = np.array([(1.0, "n01", "a word")], [("ID", "O"), ("WNID", "O"), ("words", "O")])
    contents = []
    for packed in (False, True):
        scipy.io.savemat(path, {"a": np.eye(2), "s": rows, "c": np.array([["x", "yy"]], object)}, do_compression=packed)
        contents.append(path.read_bytes())
    return contents


@QUICK
@given(damaged(shard()))
def test_a_tar_index_of_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.tar"
    path.write_bytes(data)
    ends_well(lambda: list(read_samples(path, "any.tar")))


@QUICK
@given(damaged(idx_bytes(np.arange(24).reshape(4, 3, 2))), damaged(idx_bytes([0, 1, 2, 1])))
def test_idx_files_of_any_bytes(tmp_path_factory, images, labels):
    folder = tmp_path_factory.getbasetemp() / "idx"
    folder.mkdir(exist_ok=True)
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    ends_well(read_idx_labels, folder / "train-labels-idx1-ubyte")
    data = ends_well(open_dataset, folder)
    if data is not None:
        ends_well(data.train.read, 0)


@QUICK
@given(st.binary(max_size=300), st.binary(max_size=8000), st.integers(0, 3))
def test_cifar_files_of_any_bytes(tmp_path_factory, names, records, whole):
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    make_cifar_binary(folder)
    if whole != 1:
        (folder / "data_batch_1.bin").write_bytes(records[: 3073 * (len(records) // 3073)] if whole == 2 else records)
    if whole != 2:
        (folder / "batches.meta.txt").write_bytes(names)
    data = ends_well(open_dataset, folder)
    if data is not None:
        ends_well(data.splits["train"].read, 0)


@QUICK
@given(
    damaged(python2_pickle({"data": np.zeros((2, 4), np.uint8), "labels": [0, 1], "names": ["a"]}))
    | damaged(pickle.dumps({b"data": np.zeros((2, 4), np.uint8), b"labels": [0, 1]}, protocol=2))
    | damaged(pickle.dumps([{"a": {1.5, None}}, open], protocol=4))
)
def test_a_pickle_of_any_bytes(data):
    ends_well(plain_pickle, data, "x")


@pytest.mark.slow
@QUICK
@given(st.data())
def test_a_matlab_file_of_any_bytes(tmp_path_factory, matlab, data):
    path = tmp_path_factory.getbasetemp() / "any.mat"
    path.write_bytes(data.draw(st.one_of(*map(damaged, matlab))))
    ends_well(read_matlab, path)


@QUICK
@given(
    st.text(max_size=200) | st.text("pathlbe,;\t\"'\n\r\0 01.", max_size=200),
    st.sampled_from(["utf-8", "utf-16", "latin-1"]),
)
def test_a_manifest_of_any_text(tmp_path_factory, text, encoding):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(("path,label,split,weight\n" + text).encode(encoding, "replace"))
    ends_well(open_dataset, path)
    path.write_bytes(text.encode(encoding, "replace"))
    ends_well(open_dataset, path)
    for target in ("multi", "number:label"):
        ends_well(partial(open_dataset, path, target=target, accepts=KINDS))


@QUICK
@given(damaged(encoded(photo(0, (40, 30)), quality=80)) | damaged(encoded(photo(1, (24, 24)), progressive=True)))
def test_a_jpeg_header_of_any_bytes(data):
    header = read_header(data)
    if header is not None:
        rows, columns = header.size
        part = ends_well(decode_box, data, header, Box(0, 0, min(rows, 500), min(columns, 500)), (8, 8))
        assert part is None or part.dtype == np.uint8
    ends_well(decode, data)


@QUICK
@given(
    damaged(
        b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), }"
        + b" " * 59
        + b"\n"
        + bytes(12)
    )
)
def test_an_array_member_of_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.npy"
    path.write_bytes(data)
    pixels = ends_well(read_member, OpenFile(path), 0, len(data), "any.npy")
    assert pixels is None or pixels.dtype == np.uint8


@QUICK
@given(
    st.text(max_size=200) | st.from_regex(r'[\[{"0-9a-z:, \]}]{0,60}', fullmatch=True),
    st.sampled_from(["c.txt", "c.json"]),
)
def test_a_list_of_classes_of_any_text(text, name):
    ends_well(parse_classes, text, name)

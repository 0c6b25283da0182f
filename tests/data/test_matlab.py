"""MATLAB files: what scipy writes is read as scipy reads it."""

from contextlib import suppress

import numpy as np
import pytest
import scipy.io

from vitruvian.data.releases import read_matlab
from vitruvian.errors import DataError


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_of_every_type_are_read_as_scipy_reads_them(tmp_path, packed):
    rng = np.random.default_rng(0)
    arrays = {f"a_{kind}": rng.integers(0, 100, (3, 5)).astype(kind) for kind in
              ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")}  # fmt: skip
    arrays["short"] = np.array([[7]], np.uint8)
    scipy.io.savemat(tmp_path / "a.mat", arrays, do_compression=packed)
    expected = scipy.io.loadmat(tmp_path / "a.mat")
    found = read_matlab(tmp_path / "a.mat")
    assert found.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(found[name], expected[name])


def test_texts_cells_and_structures_are_read(tmp_path):
    rows = np.array([(1.0, "n01440764"), (2.0, "n01443537")], [("ILSVRC2012_ID", "O"), ("WNID", "O")]).reshape(-1, 1)
    cells = np.array(["a", "word"], object)
    scipy.io.savemat(tmp_path / "a.mat", {"synsets": rows, "text": "grüße", "cells": cells}, do_compression=True)
    found = read_matlab(tmp_path / "a.mat")
    assert [(row["ILSVRC2012_ID"].item(), row["WNID"]) for row in found["synsets"]] == [
        (1.0, "n01440764"),
        (2.0, "n01443537"),
    ]
    assert found["text"] == "grüße"
    assert found["cells"] == ["a", "word"]


def test_other_files_and_broken_ones_are_refused(tmp_path):
    path = tmp_path / "a.mat"
    path.write_bytes(b"no" * 100)
    with pytest.raises(DataError, match="not a MATLAB file of level 5"):
        read_matlab(path)
    scipy.io.savemat(path, {"x": np.arange(1000.0)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged MATLAB file"):
        read_matlab(path)
    with pytest.raises(DataError, match="No such file"):
        read_matlab(tmp_path / "none.mat")


@pytest.mark.parametrize("seed", range(50))
def test_damaged_bytes_give_a_data_error_or_values_and_nothing_else(tmp_path, seed):
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"x": np.arange(50.0), "t": "text", "c": np.array(["a", "b"], object)})
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    for place in rng.integers(128, len(content), 4):
        content[place] = rng.integers(256)
    path.write_bytes(content)
    with suppress(DataError):
        read_matlab(path)

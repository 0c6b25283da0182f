"""ReaL labels: by the number in an image's name, counted from 1."""

from __future__ import annotations

import numpy as np
import pytest

from vitruvian.errors import DataError
from vitruvian.evaluation.label_spaces import read_real, score_real


def test_an_answer_is_right_if_it_is_one_of_the_labels_and_images_without_are_left_out():
    keys = ["003/ILSVRC2012_val_00000002.JPEG", "a.jpg", "ILSVRC2012_val_00000001.jpg", "ILSVRC2012_val_00000003_x.jpg"]
    assert score_real(keys, np.array([7, 7, 7, 7]), [[], [5, 7], [8]]).tolist() == [True, False]


def test_names_without_numbers_and_numbers_without_labels_are_said():
    with pytest.raises(DataError, match="no image is called ILSVRC2012_val_ and 8 digits"):
        score_real(["a.jpg"], np.array([0]), [[1]])
    with pytest.raises(DataError, match="no image has a ReaL label"):
        score_real(["ILSVRC2012_val_00000001.jpg"], np.array([0]), [[]])
    with pytest.raises(DataError, match="the ReaL labels end at image 1"):
        score_real(["ILSVRC2012_val_00000002.jpg"], np.array([0]), [[1]])


@pytest.mark.parametrize("content", ["{}", "[1]", "[[1000]]", '[["tench"]]', "[[true]]"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(DataError, match=r"not ReaL labels; expected a list of class indices"):
        read_real(tmp_path / "real.json")


def test_a_missing_or_broken_file_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"real.json: cannot be read: No such file"):
        read_real(tmp_path / "real.json")
    (tmp_path / "real.json").write_text("[[")
    with pytest.raises(DataError, match="not valid JSON"):
        read_real(tmp_path / "real.json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[[1, 2], [3", "not valid JSON"),
        ("[" * 5000 + "]" * 5000, "not valid JSON: nested more than 100 deep"),
        ('{"a": 1}', "not ReaL labels"),
        ("[[99999999999999999999999999]]", "not ReaL labels"),
        ("[[NaN]]", "not ReaL labels"),
        ("[[true]]", "not ReaL labels"),
        ("[1]", "not ReaL labels"),
    ],
)
def test_a_file_of_another_kind_is_one_line_that_names_it(tmp_path, content, why):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(DataError, match=rf"real\.json: {why}[^\n]*$"):
        read_real(tmp_path / "real.json")

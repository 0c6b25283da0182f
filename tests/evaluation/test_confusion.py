"""The confusion matrix of reports, as a table or an image, and the pairs that are confused most."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from vitruvian.evaluation.report import confused_pairs, confusion_image, confusion_part

NASTY = '<script>alert("x")</script>'


def test_class_names_are_escaped():
    made = confusion_part(np.eye(2, dtype=int), [NASTY, NASTY])
    assert "<script" not in made
    assert made.count("&lt;script&gt;") == 8


def test_each_cell_of_a_small_confusion_matrix_has_its_number():
    made = confusion_part(np.array([[7, 0], [3, 11]]), ["cat", "dog"])
    assert re.findall(r"<td[^>]*>(.*?)</td>", made.partition("<tbody>")[2]) == ["7", "·", "3", "11"]
    assert re.findall(r"rgb\(var\((--\w+)\)", made) == ["--right", "--wrong", "--right"]


def test_the_most_confused_pairs_come_first_and_right_answers_never():
    confusion = np.array([[9, 1, 0], [0, 5, 5], [2, 0, 8]])
    pairs = list(confused_pairs(confusion, "abc"))
    assert [pair[:3] for pair in pairs] == [("b", "c", 5), ("c", "a", 2), ("a", "b", 1)]
    assert pairs[0][3] == "50%"


@pytest.mark.parametrize(("classes", "side"), [(31, 31), (512, 512), (1000, 500)])
def test_many_classes_become_an_image_of_limited_size(classes, side):
    confusion = np.diag(np.full(classes, 4))
    confusion[0, -1] = 4
    data = re.search(r"base64,([^\"]*)", confusion_image(confusion))[1]
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (side, side)
    assert image.getpixel((side // 2, side // 2)) == (0, 114, 178, 255)
    assert image.getpixel((side - 1, 0))[:3] == (213, 94, 0)
    assert image.getpixel((0, side - 1))[3] == 0
    assert "predicted class" in confusion_part(confusion, list(map(str, range(classes))))

"""ObjectNet's classes from the files that come with its images."""

from __future__ import annotations

import pytest
from mappings import make_mappings

from vitruvian.errors import DataError
from vitruvian.evaluation.label_spaces import mappings_beside, read_objectnet


@pytest.fixture
def mappings(tmp_path):
    return make_mappings(tmp_path)


def test_folders_get_the_numbers_of_all_their_classes_and_others_none(mappings):
    assert read_objectnet(mappings) == {"alarm_clock": (409, 530), "chair": (559,)}


def test_mappings_are_found_beside_the_images(mappings, tmp_path):
    (tmp_path / "images").mkdir()
    assert mappings_beside(str(tmp_path / "images")) == mappings
    assert mappings_beside(str(tmp_path)) is None
    assert mappings_beside("digits") is None


def test_files_that_do_not_fit_together_or_are_missing_are_one_line(mappings):
    (mappings / "imagenet_to_label_2012_v2").write_text("digital clock\nfolding chair\nsundial\n")
    with pytest.raises(DataError, match="contradict each other at 'analog clock'"):
        read_objectnet(mappings)
    (mappings / "objectnet_to_imagenet_1k.json").write_text("[]")
    with pytest.raises(DataError, match=r"objectnet_to_imagenet_1k.json: contains a JSON list, not an object"):
        read_objectnet(mappings)
    (mappings / "imagenet_to_label_2012_v2").unlink()
    with pytest.raises(DataError, match=r"imagenet_to_label_2012_v2: cannot be read: No such file"):
        read_objectnet(mappings)

"""Recognizing what is meant, patterns, lists of classes, and holding out."""

import numpy as np
import pytest
from making import Numbers, make_folder, make_shard, png

from vitruvian.data.formats import open_dataset
from vitruvian.data.names import expand_braces, parse_classes
from vitruvian.data.sources import hold_out
from vitruvian.errors import ConfigError, DataError


def test_a_path_that_is_not_there_says_so(tmp_path):
    with pytest.raises(DataError, match=r"digit: no such file or folder; did you mean digits\?"):
        open_dataset("digit")
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; the built-in dataset is called digits"):
        open_dataset(tmp_path / "nowhere")


def test_a_single_image_is_no_dataset(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(DataError, match=r"a.png: a single image; pass a folder with one folder per class"):
        open_dataset(tmp_path / "a.png")
    (tmp_path / "a.xyz").write_bytes(b"")
    with pytest.raises(DataError, match=r"a.xyz: not a known dataset format"):
        open_dataset(tmp_path / "a.xyz")


def test_a_pattern_over_several_kinds_is_an_error(tmp_path):
    make_shard(tmp_path / "a.tar", [1])
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(DataError, match="files of several kinds"):
        open_dataset(tmp_path / "a.*")
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(DataError, match=r"2 files; a pattern may match .tar or .parquet files, not .csv"):
        open_dataset(tmp_path / "*.csv")


def test_an_archive_among_class_folders_is_left_alone(tmp_path):
    make_folder(tmp_path)
    make_shard(tmp_path / "backup.tar", [1, 2])
    make_shard(tmp_path / "cat/backup.tar", [1, 2])
    data = open_dataset(tmp_path)
    assert len(data.train) == 6
    assert len(data.notes) == 2


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    make_folder(tmp_path / "a/train")
    with pytest.raises(DataError, match="no split 'val', only train"):
        open_dataset(tmp_path / "a", split="val")
    make_folder(tmp_path / "b/test")
    with pytest.raises(DataError, match="no split to train on, only test; call one 'train'"):
        _ = open_dataset(tmp_path / "b").train


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_folder_without_splits_has_none_of_any_name(tmp_path, split):
    make_folder(tmp_path)
    with pytest.raises(DataError, match=f"no split '{split}': this dataset has no splits; leave it out"):
        open_dataset(tmp_path, split=split)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{b,a}{1..2}", ["b1", "b2", "a1", "a2"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{plain}", ["{plain}"]),
    ],
)
def test_braces_stand_for_names(pattern, names):
    assert expand_braces(pattern) == names


def test_a_brace_may_not_stand_for_endless_names():
    with pytest.raises(DataError, match="more than 1000000 names"):
        expand_braces("{0..99999999}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.txt", "a\nb\n\n"),
        ("c.json", '["a", "b"]'),
        ("c.json", '{"0": "a", "1": "b"}'),
        ("c.json", '{"b": 1, "a": 0}'),
    ],
)
def test_a_list_of_classes_has_several_forms(name, text):
    assert parse_classes(text, name) == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.txt", "a\na\n", "'a' is listed twice"),
        ("c.txt", "\n", "no classes listed"),
        ("c.json", "{", "c.json: not valid JSON: Expecting"),
        ("c.json", "7", "neither a list"),
        ("c.json", '{"a": 1, "b": 2}', "not numbered from 0 to 1"),
    ],
)
def test_a_broken_list_of_classes_is_an_error(name, text, message):
    with pytest.raises(DataError, match=message):
        parse_classes(text, name)


def test_the_same_share_of_every_class_is_held_out():
    labels = np.repeat([0, 1, 2, 3], [100, 50, 2, 1])
    source = Numbers(153, labels=labels)
    train, held = hold_out(source, 0.2, seed=1)
    assert np.bincount(held.labels(), minlength=4).tolist() == [20, 10, 1, 0]
    everything = [part.original(i) for part in (train, held) for i in range(len(part))]
    assert sorted(everything) == list(range(153))
    assert held.read(3)[0, 0] == held.original(3)
    assert (held.key(3), held.label(3)) == (f"number {held.original(3)}", labels[held.original(3)])
    assert held.weight(3) == 1 + held.original(3) / 100


def test_what_is_held_out_depends_on_the_seed_alone():
    def held(seed):
        part = hold_out(Numbers(1000), 0.1, seed)[1]
        return [part.original(i) for i in range(len(part))]

    assert held(3) == held(3)
    assert held(3) != held(4)
    gaps = np.diff(held(3))
    assert gaps.min() < 5  # chosen at random, not every tenth
    assert gaps.max() > 20


def test_a_long_source_is_divided_like_a_short_one(monkeypatch):
    before = hold_out(Numbers(1000), 0.1, 0)[1].labels().tolist()
    monkeypatch.setattr("vitruvian.data.columns.CHUNK", 64)
    assert hold_out(Numbers(1000), 0.1, 0)[1].labels().tolist() == before


def test_an_impossible_share_is_an_error():
    with pytest.raises(ConfigError, match=r"1.5, is not between 0 and 1"):
        hold_out(Numbers(10), 1.5, 0)
    with pytest.raises(DataError, match="no class has two images"):
        hold_out(Numbers(4), 0.5, 0)

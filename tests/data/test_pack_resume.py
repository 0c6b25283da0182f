"""Packing that is stopped, damaged, or asked for where it must not be."""

import csv
import json
import resource
import signal
import time

import pytest
from photos import make_photos

from forked import Forked
from vitruvian.data.pack import PackSettings, pack
from vitruvian.errors import DataError

SETTINGS = PackSettings(format="pixels", shard_mb=1)


def tree(folder):
    """All files of a folder with their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def data(tmp_path):
    return make_photos(tmp_path / "photos", each=40, size=(96, 96), splits=("train", "test"))


@pytest.fixture
def whole(data, tmp_path):
    """The data packed without interruption."""
    pack(data, tmp_path / "whole", SETTINGS)
    return tree(tmp_path / "whole")


class Stopped(Exception):
    pass


def stop_after(count):
    def track(items, total):
        for number, item in enumerate(items):
            if number == count:
                raise Stopped
            yield item

    return track


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 33, 34, 79, 80, 81, 159])
def test_packing_stopped_anywhere_goes_on_to_the_same_bytes(data, whole, tmp_path, count):
    with pytest.raises(Stopped):
        pack(data, tmp_path / "packed", SETTINGS, track=stop_after(count))
    assert not json.loads((tmp_path / "packed" / "pack.json").read_text())["complete"]
    pack(data, tmp_path / "packed", SETTINGS)
    assert tree(tmp_path / "packed") == whole


def test_finished_shards_are_not_packed_again(data, tmp_path):
    with pytest.raises(Stopped):
        pack(data, tmp_path / "packed", SETTINGS, track=stop_after(70))
    totals = []
    pack(data, tmp_path / "packed", SETTINGS, track=lambda items, total: totals.append(total) or items)
    assert totals == [160 - 66]  # a shard holds 33
    pack(data, tmp_path / "packed", SETTINGS, track=lambda items, total: totals.append(total) or items)
    assert len(totals) == 1


@pytest.mark.slow
def test_packing_killed_with_sigkill_goes_on_to_the_same_bytes(data, whole, tmp_path):
    def slowly(items, total):
        for item in items:
            time.sleep(0.01)
            yield item

    process = Forked(work=lambda: pack(data, tmp_path / "packed", SETTINGS, track=slowly))
    process.until(lambda: list(tmp_path.glob("packed/train/*.tar")))
    assert process.kill().code == -signal.SIGKILL
    left = tree(tmp_path / "packed")
    assert not json.loads(left["pack.json"])["complete"]
    assert left["train/train-000000.tar"] == whole["train/train-000000.tar"]
    pack(data, tmp_path / "packed", SETTINGS)
    assert tree(tmp_path / "packed") == whole


@pytest.mark.slow
def test_workers_pack_the_same_bytes(data, whole, tmp_path):
    pack(data, tmp_path / "packed", SETTINGS, workers=2)
    assert tree(tmp_path / "packed") == whole


@pytest.mark.slow
def test_unreadable_files_are_listed_once_however_often_the_work_was_stopped(data, tmp_path):
    for number in (5, 33, 39):
        (data / "train" / "cat" / f"{number:03d}.jpg").write_bytes(b"")
    for count in (20, 50, 30):
        with pytest.raises(Stopped):
            pack(data, tmp_path / "packed", SETTINGS, track=stop_after(count))
    state = pack(data, tmp_path / "packed", SETTINGS)
    assert [skipped.index for skipped in state.splits["train"].skipped] == [5, 33, 39]
    pack(data, tmp_path / "whole", SETTINGS)
    assert tree(tmp_path / "packed") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_shard_and_those_after_it_are_packed_again(data, whole, tmp_path):
    pack(data, tmp_path / "packed", SETTINGS)
    shard = tmp_path / "packed" / "train" / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    pack(data, tmp_path / "packed", SETTINGS)
    assert tree(tmp_path / "packed") == whole


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_keeps_what_is_whole(data, whole, tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    pack(data, tmp_path / "first", SETTINGS.replace(shard_mb=2))
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (990_000, old[1])
    )  # the first shard of 2 MB does not fit, as on a full disk
    try:
        with pytest.raises(
            DataError, match=r"tar: cannot be written: File too large; the finished shards are kept; run the same"
        ):
            pack(data, tmp_path / "packed", SETTINGS.replace(shard_mb=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert sorted(tree(tmp_path / "packed")) == ["classes.json", "pack.json"]
    pack(data, tmp_path / "packed", SETTINGS.replace(shard_mb=2))
    assert tree(tmp_path / "packed") == tree(tmp_path / "first")


def test_other_settings_are_refused(data, tmp_path):
    pack(data, tmp_path / "packed", SETTINGS)
    with pytest.raises(DataError, match="was packed with side=256, not 128; shard_mb=1, not 2; name another folder"):
        pack(data, tmp_path / "packed", SETTINGS.replace(side=128, shard_mb=2))


def test_other_images_are_refused(data, tmp_path):
    pack(data, tmp_path / "packed", SETTINGS)
    (data / "test" / "cat" / "000.jpg").unlink()
    with pytest.raises(DataError, match=r"other images or labels in test \(80 then, 79 now\)"):
        pack(data, tmp_path / "packed", SETTINGS)


def test_a_folder_with_other_files_is_refused(data, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"mine: not empty \(it contains thesis.txt\) and not made by vit pack"):
        pack(data, tmp_path / "mine", SETTINGS)
    assert tree(tmp_path / "mine") == {"thesis.txt": b"years of work"}


def test_a_pack_file_of_another_kind_is_refused(data, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pack.json").write_text('{"name": "npm package"}')
    with pytest.raises(DataError, match=r"pack\.json: not written by vit pack"):
        pack(data, tmp_path / "mine", SETTINGS)


def test_a_folder_inside_the_data_is_refused(data):
    with pytest.raises(DataError, match="is inside the data to be packed"):
        pack(data, data / "packed", SETTINGS)


def test_a_split_that_no_reader_would_know_is_refused(data, tmp_path):
    with open(data / "list.csv", "w", newline="") as file:
        rows = [("path", "label", "split"), ("train/cat/000.jpg", "a", "../x"), ("train/dog/000.jpg", "b", "../x")]
        csv.writer(file).writerows(rows)
    with pytest.raises(DataError, match=r"cannot pack the split '\.\./x'; call it train, val or test"):
        pack(data / "list.csv", tmp_path / "packed", SETTINGS)
    assert not (tmp_path / "packed").exists()

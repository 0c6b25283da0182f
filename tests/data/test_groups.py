"""Groups of images: read from a column or the path, never divided by a split, and reported where given splits do."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitruvian.data.doctor import overlap
from vitruvian.data.doctor.overlap import split_notes
from vitruvian.data.doctor.scan import scan
from vitruvian.data.formats import open_dataset
from vitruvian.data.groups import assign_folds, assign_groups, group_numbers, hold_out_groups, values_by
from vitruvian.data.sources import Concat, Source
from vitruvian.errors import ConfigError, DataError
from vitruvian.progress import no_tracking


class Listed(Source):
    """Samples with these labels, in these groups."""

    def __init__(self, labels, groups):
        self.name, self.classes = "listed", tuple(map(str, range(max(labels) + 1)))
        self._labels, self.groups = np.array(labels, np.int32), groups

    def read(self, index):
        raise NotImplementedError

    def column_names(self):
        return ("group",)

    def column(self, name):
        return [str(group) for group in self.groups]


samples = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=2, max_size=60).filter(
    lambda rows: len({group for _, group in rows}) > 1
)


@given(samples, st.floats(0.01, 0.9), st.integers(0, 99))
@settings(deadline=None)
def test_no_group_is_on_both_sides_of_a_held_out_split(rows, share, seed):
    source = Listed(*zip(*rows))
    train, held, text = hold_out_groups(source, share, seed)
    assert len(train) + len(held) == len(source)
    assert min(len(train), len(held)) > 0
    assert not set(train.column("group")) & set(held.column("group"))
    assert text == f"{len(set(held.column('group')))} of {len(set(source.column('group')))} groups, held out"


@given(samples, st.integers(0, 99), st.data())
@settings(max_examples=60, deadline=None)
def test_every_group_is_in_one_fold_and_no_fold_is_empty(rows, seed, data):
    source = Listed(*zip(*rows))
    count = data.draw(st.integers(2, len(set(source.groups))))
    folds = assign_folds(source, count, seed)
    assert set(folds.tolist()) == set(range(count))
    for group in set(source.groups):
        assert len({fold for fold, other in zip(folds.tolist(), source.groups) if other == group}) == 1


def test_group_splits_are_stratified_and_depend_on_the_seed():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 200, 4000)
    labels = (rng.random(4000) < np.where(groups < 40, 0.9, 0.1)).astype(np.int32)  # 40 groups are mostly of class 1
    splits = []
    for seed in range(2):
        held = assign_groups(labels, groups, np.array([0.8, 0.2]), seed) == 1
        splits.append(held)
        for label in range(2):
            assert held[labels == label].mean() == pytest.approx(0.2, abs=0.01)  # within half a group
    assert (splits[0] != splits[1]).any()


def test_folds_without_groups_have_equally_many_images_of_each_class():
    labels = [0] * 23 + [1] * 7 + [2] * 11
    source = Listed(labels, [])
    source.column_names = lambda: ()
    folds = assign_folds(source, 5, seed=3)
    assert np.ptp(np.bincount(folds)) <= 1
    for label in range(3):
        assert np.ptp(np.bincount(folds[np.array(labels) == label], minlength=5)) <= 1
    assert (assign_folds(source, 5, seed=4) != folds).any()
    with pytest.raises(ConfigError, match="folds=42 is not between 2 and 41 images"):
        assign_folds(source, 42, seed=0)


def make_photos(root, *, copies=False):
    """Images of two classes by three cameras, some of which look alike, and manifests of them."""
    rng, rows = np.random.default_rng(0), []
    for label in ("cat", "dog"):
        for camera in range(3):
            for number in range(2):
                path = root / label / f"cam{camera}_{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                if not (copies and number):
                    pixels = np.asarray(Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8)).resize((32, 32)))
                Image.fromarray(pixels).save(path)
                split = "train" if number == 0 else "val"
                rows.append({"path": f"{label}/{path.name}", "label": label, "split": split, "camera": f"c{camera}"})
    return rows


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_groups_come_from_a_column_of_the_manifest(tmp_path, kind):
    rows = make_photos(tmp_path)
    path = tmp_path / f"photos.{kind}"
    if kind == "csv":
        write_csv(path, rows)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    dataset = open_dataset(path)
    assert values_by(dataset.train, "camera") == ["c0", "c1", "c2"] * 2
    both = Concat(list(dataset.splits.values()), name="both")
    assert group_numbers(both, "camera").tolist() == [0, 1, 2] * 4
    assert group_numbers(both) is None  # there is no column called group
    train, held, _ = hold_out_groups(both, 0.3, 0, "camera")
    assert not set(train.column("camera")) & set(held.column("camera"))
    with pytest.raises(DataError, match=r"no path matches 'camra', such as .*; did you mean the column 'camera'"):
        values_by(both, "camra")


def test_groups_come_from_a_regular_expression_on_the_path(tmp_path):
    make_photos(tmp_path)
    source = open_dataset(tmp_path).train
    assert values_by(source, r"cam(\d)_(\d)")[:2] == ["0/0", "0/1"]
    assert values_by(source, r"cam\d")[-1] == "cam2"
    with pytest.raises(DataError, match=r"8 of 12 paths do not match 'cam0', such as cat"):
        values_by(source, "cam0")
    with pytest.raises(ConfigError, match=r"'cam\(' is neither a column nor a regular expression"):
        values_by(source, "cam(")
    with pytest.raises(DataError, match="all 12 images are of one group, 'cam'; at least two are needed"):
        group_numbers(source, "cam")
    with pytest.raises(ConfigError, match="folds=4 is not between 2 and 3 groups"):
        assign_folds(source, 4, 0, r"cam\d")


def test_an_image_without_a_group_is_an_error(tmp_path):
    rows = [{**row, "group": "" if "cam1" in row["path"] else row["camera"]} for row in make_photos(tmp_path)]
    source = open_dataset(write_csv(tmp_path / "photos.csv", rows)).train
    with pytest.raises(DataError, match=r"2 images have no group, such as cat/cam1_0.png; give each image a group"):
        group_numbers(source)


def test_groups_and_near_duplicates_across_given_splits_are_reported(tmp_path, monkeypatch):
    rows = make_photos(tmp_path, copies=True)
    dataset = open_dataset(write_csv(tmp_path / "photos.csv", rows))
    first, second = split_notes(dataset.train, dataset.splits["val"], "the split 'val'", "camera")
    assert first.startswith("3 of 3 groups in the split 'val' are also trained on, such as 'c0'")
    assert second.startswith("6 images are near duplicates of a training image, such as cat/cam0_1.png")
    train, held, text = hold_out_groups(Concat(list(dataset.splits.values()), name="all"), 0.3, 0, "camera")
    assert list(split_notes(train, held, text, "camera")) == []
    monkeypatch.setattr(overlap, "MOST_COMPARED", len(train) + len(held) - 1)
    (note,) = split_notes(train, held, text, "camera")
    expected = "near duplicates across the split were not looked for, as there are more than 11 images; `vit doctor`"
    assert note == f"{expected} finds all"


def test_the_same_images_are_examined_once_by_the_runs_of_a_process(monkeypatch):
    splits = open_dataset("digits").splits
    first = scan(splits, workers=0, track=no_tracking)
    monkeypatch.setitem(scan.__globals__, "open_reduced", lambda *_: pytest.fail("decoded again"))
    second = scan(splits, workers=0, track=no_tracking)
    assert (first.records == second.records).all()
    assert (first.sketches == second.sketches).all()

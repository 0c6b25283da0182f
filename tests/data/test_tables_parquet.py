"""Parquet files as the `datasets` library writes them."""

import json
import pickle

import numpy as np
import pytest
from making import level_of, png

from vitruvian.data.formats import open_dataset
from vitruvian.data.order import epoch_order
from vitruvian.data.sources import hold_out
from vitruvian.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path, levels, labels, *, names=("even", "odd"), column="label", group=3, image="image"):
    table = pyarrow.table(
        {
            image: [{"bytes": png(level), "path": f"{level}.png"} for level in levels],
            column: labels,
        }
    )
    features = {image: {"_type": "Image"}, column: {"_type": "Value"}}
    if names:
        features[column] = {"names": list(names), "_type": "ClassLabel"}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=group)


def make(folder, *, count=10, files=2):
    for number in range(files):
        levels = range(number * count, (number + 1) * count)
        write(folder / f"data/train-{number:05d}-of-{files:05d}.parquet", levels, [level % 2 for level in levels])
    write(folder / "data/validation-00000-of-00001.parquet", [201, 202], [1, 0])


def test_rows_of_many_files_form_the_splits(tmp_path):
    make(tmp_path)
    data = open_dataset(tmp_path)
    assert data.classes == ("even", "odd")
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 20, "val": 2}
    assert [level_of(data.train.read(i)) for i in (19, 0, 10, 3)] == [19, 0, 10, 3]
    assert data.train.labels().tolist() == [0, 1] * 10
    assert data.train.key(13) == "train-00001-of-00002.parquet #3"
    assert level_of(pickle.loads(pickle.dumps(data.train)).read(13)) == 13


def test_a_file_or_a_pattern_may_be_given(tmp_path):
    make(tmp_path)
    assert len(open_dataset(tmp_path / "data/train-*.parquet").train) == 20
    assert len(open_dataset(tmp_path / "data/train-00000-of-00002.parquet").train) == 10


def test_the_order_keeps_to_a_few_row_groups(tmp_path):
    make(tmp_path)
    train = open_dataset(tmp_path).train
    assert train.blocks.sizes.tolist() == [3, 3, 3, 1] * 2
    assert sorted(epoch_order(np.arange(20), 20, 0, 0, train.blocks)) == list(range(20))


def test_what_is_held_out_leaves_the_blocks_smaller(tmp_path):
    make(tmp_path)
    train, held = hold_out(open_dataset(tmp_path).train, 0.3, 0)
    assert train.blocks.sizes.sum() == len(train) == 14
    assert held.blocks.sizes.sum() == len(held) == 6
    assert level_of(held.read(2)) == held.original(2)


def test_labels_without_names_and_other_columns(tmp_path):
    write(tmp_path / "a.parquet", [1, 2, 3], ["dog", "cat", "dog"], names=None, column="labels", image="img")
    assert open_dataset(tmp_path / "a.parquet").classes == ("cat", "dog")
    write(tmp_path / "b.parquet", [1, 2, 3], [7, 3, 10], names=None, column="fine_label")
    assert open_dataset(tmp_path / "b.parquet").classes == ("3", "7", "10")


def test_a_split_with_withheld_labels_is_left_out_and_named(tmp_path):
    make(tmp_path)
    write(tmp_path / "data/test-00000-of-00001.parquet", [1, 2], [-1, -1])
    data = open_dataset(tmp_path)
    assert list(data.splits) == ["train", "val"]
    assert data.notes == ("skipped 2 rows without a label, such as test-00000-of-00001.parquet #0",)


def test_a_row_without_label_does_not_shift_the_others(tmp_path):
    write(tmp_path / "a.parquet", range(6), [0, -1, 1, 0, None, 1])
    train = open_dataset(tmp_path / "a.parquet").train
    assert [level_of(train.read(i)) for i in range(4)] == [0, 2, 3, 5]
    assert train.labels().tolist() == [0, 1, 0, 1]


def test_images_may_lie_beside_the_file(tmp_path):
    (tmp_path / "x.png").write_bytes(png(77))
    rows = [{"bytes": None, "path": "x.png"}, {"bytes": png(1), "path": None}]
    parquet.write_table(pyarrow.table({"image": rows, "label": [0, 1]}), tmp_path / "a.parquet")
    assert level_of(open_dataset(tmp_path / "a.parquet").train.read(0)) == 77


def test_what_cannot_be_used_says_so(tmp_path):
    write(tmp_path / "a.parquet", [1], ["x"], column="caption", names=None)
    with pytest.raises(DataError, match="images without labels: no column label among caption"):
        open_dataset(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="not a Parquet file"):
        open_dataset(tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"number": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="no column path and no column label among number"):
        open_dataset(tmp_path / "c.parquet")

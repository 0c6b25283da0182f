"""JSON Lines, COCO JSON, other names of columns, and datasets that `save_to_disk` wrote."""

import json

import pytest
from making import level_of, png

from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError


def make_images(folder, count=3):
    folder.mkdir(parents=True, exist_ok=True)
    for level in range(count):
        (folder / f"{level}.png").write_bytes(png(level))


def write_jsonl(tmp_path, *rows, encoding="utf-8"):
    make_images(tmp_path / "images")
    path = tmp_path / "list.jsonl"
    path.write_bytes(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\r\n" for row in rows).encode(encoding)
    )
    return path


def coco(images=2, annotations=((1, 1), (2, 2)), categories=("ant", "bee")):
    return {
        "images": [{"id": i + 1, "file_name": f"{i}.png"} for i in range(images)],
        "annotations": [{"image_id": image, "category_id": category} for image, category in annotations],
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(categories)],
    }


def write_coco(tmp_path, content, images="images", name="instances_train.json"):
    make_images(tmp_path / images)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_json_lines_are_a_manifest(tmp_path):
    path = write_jsonl(
        tmp_path,
        {"path": "images/2.png", "label": "dog", "weight": 2.5},
        "\r\n",
        {"file_name": "images/0.png", "label": "cat", "split": "validation", "caption": ["x"]},
        encoding="utf-8-sig",
    )
    data = open_dataset(path)
    assert (data.classes, list(data.splits)) == (("cat", "dog"), ["train", "val"])
    assert (data.train.weight(0), level_of(data.train.read(0))) == (2.5, 2)


def test_a_column_of_paths_may_have_the_names_of_other_programs(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    make_images(tmp_path / "images")
    for column in ("file_name", "image_path", "image"):
        rows = {column: ["images/0.png", "images/1.png"], "label": ["a", "b"]}
        parquet.write_table(pyarrow.table(rows), tmp_path / f"{column}.parquet")
        assert [level_of(open_dataset(tmp_path / f"{column}.parquet").train.read(i)) for i in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1: not valid JSON"),
        (["[1]\n"], "line 1: contains a JSON list, not an object"),
        ([{"label": "a"}], "line 1: no column path among label"),
        (
            [{"path": "images/0.png", "label": "a"}, {"path": "images/0.png", "label": ["a", "b"]}],
            r"line 2: the label \['a', 'b'\] is a list; expected one",
        ),
        ([{"path": {}, "label": "a"}], "line 1: the path {} is a dict"),
        ([{"path": "../x.png", "label": "a"}], "line 1: the path ../x.png points outside"),
        (['{"path": "images/0.png", "label": ' + "9" * 10**6 + "}"], "line 1: not valid JSON"),
        (['{"path": "' + "x" * 2**20 + '", "label": "a"}'], "line 1: the line has more than 1 MB"),
        (["[" * 5000], "line 1: not valid JSON: nested"),
        ([{"path": "a\0b", "label": "a"}], "none of its first 1 images exists"),
        ([], "a manifest without rows"),
    ],
)
def test_broken_json_lines_say_where_and_what(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        open_dataset(write_jsonl(tmp_path, *rows))


def test_json_lines_in_utf_16_are_refused(tmp_path):
    with pytest.raises(DataError, match="line 1: not UTF-8 text"):
        open_dataset(write_jsonl(tmp_path, {"path": "images/0.png", "label": "a"}, encoding="utf-16"))


def test_two_columns_of_one_name_are_refused(tmp_path):
    make_images(tmp_path)
    (tmp_path / "a.csv").write_text("path,label,label\n0.png,a,b\n")
    with pytest.raises(DataError, match="two columns are called label"):
        open_dataset(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("images", "name"), [(".", "a.json"), ("images", "a.json"), (".", "list/a.json"), ("images", "list/a.json")]
)
def test_a_coco_file_with_one_category_per_image_is_a_dataset(tmp_path, images, name):
    data = open_dataset(write_coco(tmp_path, coco(annotations=[(1, 2), (2, 1), (1, 2)]), images, name))
    assert (data.classes, data.train.labels().tolist()) == (("ant", "bee"), [1, 0])
    assert [level_of(data.train.read(i)) for i in (0, 1)] == [0, 1]


def test_the_name_of_a_coco_file_states_the_split(tmp_path):
    assert list(open_dataset(write_coco(tmp_path, coco(), name="instances_val.json")).splits) == ["val"]


def test_images_and_categories_of_a_coco_file_that_are_not_used_are_counted(tmp_path):
    notes = open_dataset(write_coco(tmp_path, coco(3, categories=("ant", "bee", "cow")))).notes
    assert notes == ("skipped 1 category without an image, cow", "skipped 1 image without a category, 2.png")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (coco(annotations=[(1, 1), (1, 2)]), "several labels per image; this works with one class per image"),
        (coco(annotations=[(9, 1)]), "an annotation is about the image 9, which is not listed"),
        (coco(annotations=[(1, 9)]), "an annotation is about the category 9, which is not listed"),
        (coco(annotations=[([], {})]), "has no image_id or no category_id"),
        (coco(categories=("ant", "ant")), "two categories are called 'ant'"),
        (coco(annotations=()), "no image with a category"),
        ({"images": 3}, "no list of objects called images; expected COCO JSON"),
        ({**coco(), "images": [{"id": 1, "file_name": 3}]}, "in images has no id or no file_name"),
        ({**coco(), "images": [{"id": 1, "file_name": "/x.png"}] * 2}, "the id 1 is in images twice"),
        ({**coco(), "images": [{"id": i, "file_name": "../x.png"} for i in (1, 2)]}, "points outside its folder"),
        ({**coco(), "images": [{"id": i, "file_name": "a\0.png"} for i in (1, 2)]}, "first 2 images exists"),
        ("[]", "contains a JSON list, not an object"),
        ('{"images": [' + "9" * 10**6 + "]}", "not valid JSON"),
    ],
)
def test_a_coco_file_that_cannot_be_used_says_why(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        open_dataset(write_coco(tmp_path, content))


def save_to_disk(folder, levels, names=("ant", "bee")):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    rows = {"image": [{"bytes": png(level), "path": None} for level in levels], "label": [n % 2 for n in levels]}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(folder), num_shards=2)
    return made


def test_a_folder_of_save_to_disk_is_read_as_it_was_written(tmp_path):
    save_to_disk(tmp_path / "saved", [0, 1, 2])
    data = open_dataset(tmp_path / "saved")
    assert (data.classes, data.train.labels().tolist()) == (("ant", "bee"), [0, 1, 0])
    assert [level_of(data.train.read(i)) for i in range(3)] == [0, 1, 2]


def test_the_splits_of_a_saved_dictionary_are_splits(tmp_path):
    for split, levels in (("train", [0, 1]), ("validation", [2, 3, 4])):
        save_to_disk(tmp_path / "saved" / split, levels)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    data = open_dataset(tmp_path / "saved")
    assert {name: len(source) for name, source in data.splits.items()} == {"train": 2, "val": 3}
    assert level_of(data.splits["val"].read(2)) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "{}", "no list of data files"),
        ("state.json", '{"_data_files": [{"filename": "../x.arrow"}]}', "points outside its folder"),
        ("state.json", '{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow"),
        ("dataset_dict.json", '{"splits": [3]}', "no list of splits"),
        ("dataset_dict.json", '{"splits": ["../x"]}', "points outside its folder"),
        ("data-00000-of-00002.arrow", "x", "not an Arrow file"),
    ],
)
def test_a_damaged_folder_of_save_to_disk_says_what_is_wrong(tmp_path, name, content, message):
    save_to_disk(tmp_path / "saved", [0, 1, 2])
    (tmp_path / "saved" / name).write_text(content)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "saved")

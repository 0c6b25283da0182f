"""Several labels per image, numbers and classes in an order: how datasets state them, and how they are stored."""

import json

import numpy as np
import pytest
from PIL import Image

from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Concat, first_samples, hold_out
from vitruvian.errors import DataError, VitruvianError
from vitruvian.targets import KINDS, TargetTable, make_table, parse_labels, parse_target

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture
def images(tmp_path):
    for index in range(6):
        Image.new("RGB", (8, 8), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    return tmp_path


def manifest(folder, text, name="list.csv"):
    (folder / name).write_text(text)
    return folder / name


def opened(path, target="auto"):
    source = open_dataset(path, target=target, accepts=KINDS).train
    return source, source.targets.rows(np.asarray(source.labels()))


def test_labels_separated_by_semicolons_are_several_labels_if_asked_for(images):
    path = manifest(images, "path,label\n0.png,dog; cat\n1.png,cat\n2.png,\n3.png,tag10;tag9\n")
    source, rows = opened(path, "multi")
    assert source.target == "multi"
    assert source.classes == ("cat", "dog", "tag9", "tag10")
    assert rows.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert source.key(3) == "3.png"
    assert len(source.read(3)) > 0


def test_a_column_called_labels_and_lists_in_json_lines_need_no_option(images):
    path = manifest(images, "path,labels\n0.png,dog;cat\n1.png,cat\n")
    assert opened(path)[1].tolist() == [[1, 1], [1, 0]]
    lines = [
        {"path": "0.png", "label": ["dog", "cat"]},
        {"path": "1.png", "label": []},
        {"path": "2.png", "label": "cat"},
    ]
    path = manifest(images, "\n".join(map(json.dumps, lines)), "list.jsonl")
    assert opened(path)[1].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_columns_of_0_and_1_are_labels_and_empty_cells_are_unknown(images):
    source, rows = opened(manifest(images, "path,Cat,dog,split\n0.png,1,0,\n1.png,,1,\n2.png,,,\n3.png,0,0,val\n"))
    assert source.classes == ("Cat", "dog")
    assert len(source) == 2
    assert np.array_equal(rows, [[1, 0], [np.nan, 1]], equal_nan=True)
    notes = open_dataset(images / "list.csv", accepts=KINDS).notes
    assert notes == ("skipped 1 row without a target, line 4",)
    assert opened(images / "list.csv", "multi:dog")[0].classes == ("dog",)


def test_numbers_are_read_from_labels_columns_and_class_folders(images):
    path = manifest(images, "path,label,age,height\n0.png,3.5,40,\n1.png,-1e3,41,1.8\n2.png,,42,1.7\n")
    source, rows = opened(path, "number")
    assert source.classes == ("value",)
    assert rows.tolist() == [[3.5], [-1000]]
    source, rows = opened(path, "number:age,height")
    assert source.classes == ("age", "height")
    assert np.allclose(rows, [[40, np.nan], [41, 1.8], [42, 1.7]], equal_nan=True)
    known, mean, std = source.targets.statistics(np.asarray(source.labels()))
    assert known.tolist() == [3, 2]
    assert np.allclose(mean, [41, 1.75])
    assert np.allclose(std, [np.sqrt(2 / 3), 0.05])
    for index, name in enumerate(("1.5", "20")):
        (images / "folders" / name).mkdir(parents=True)
        (images / f"{index}.png").rename(images / "folders" / name / "a.png")
    assert opened(images / "folders", "number")[1].tolist() == [[1.5], [20]]


def test_ordinal_classes_have_the_order_of_the_class_file(images):
    path = manifest(images, "path,label\n0.png,small\n1.png,large\n2.png,medium\n")
    (images / "classes.txt").write_text("small\nmedium\nlarge\n")
    source, rows = opened(path, "ordinal")
    assert source.classes == ("level",)
    assert source.targets.levels == ("small", "medium", "large")
    assert rows.tolist() == [[0], [2], [1]]
    assert open_dataset(path, target="ordinal", accepts=KINDS).notes == (
        "the order of the 3 classes is small, medium, large",
    )


def test_a_coco_file_with_several_categories_per_image_has_several_labels(images):
    content = {
        "images": [{"id": i, "file_name": f"{i}.png"} for i in range(3)],
        "annotations": [{"image_id": i, "category_id": c} for i, c in ((0, 1), (0, 2), (0, 1), (1, 2))],
        "categories": [{"id": 1, "name": "ant"}, {"id": 2, "name": "bee"}],
    }
    path = manifest(images, json.dumps(content), "train.json")
    for target in ("auto", "multi"):
        source, rows = opened(path, target)
        assert source.classes == ("ant", "bee")
        assert rows.tolist() == [[1, 1], [0, 1], [0, 0]]
    with pytest.raises(DataError, match=r"0.png has several categories, ant and bee; use target='multi'"):
        open_dataset(path, target="single")


@pytest.mark.parametrize("form", ["Sequence", "List", "old"])
def test_lists_of_class_labels_of_hugging_face_are_several_labels(images, form):
    feature = {"names": ["ant", "bee", "cat", "dog"], "_type": "ClassLabel"}
    listed = [feature] if form == "old" else {"feature": feature, "_type": form}
    features = {"info": {"features": {"image": {"_type": "Image"}, "labels": listed}}}
    pixels = [{"bytes": (images / f"{i}.png").read_bytes(), "path": None} for i in range(3)]
    table = pyarrow.table({"image": pixels, "labels": [[2, 0], [], [1]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(table, images / "train.parquet")
    source, rows = opened(images / "train.parquet")
    assert source.classes == ("ant", "bee", "cat")
    assert rows.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    notes = open_dataset(images / "train.parquet", accepts=KINDS).notes
    assert notes == ("skipped 1 label without an image: dog",)
    table = pyarrow.table({"image": pixels, "age": [1.5, None, 3]})
    pyarrow.parquet.write_table(table, images / "train.parquet")
    assert opened(images / "train.parquet", "number:age")[1].tolist() == [[1.5], [3]]


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("path,age\n0.png,nan\n", "number:age", "list.csv: 'nan' in the column 'age' is not a finite number; leave"),
        ("path,age\n0.png,1e308\n", "number:age", "list.csv: '1e308' in the column 'age' is too large for float32"),
        ("path,age\n0.png,1e999\n", "number:age", "'1e999' in the column 'age' is not a finite number"),
        ("path,age\n0.png,old\n", "number:age", "'old' in the column 'age' is not a finite number"),
        ('path,age\n0.png,"1,5"\n', "number:age", "line 2: '1,5' in the column 'age' is not a number with a decimal"),
        ("path,age\n0.png,1\n", "number:weight", "no column weight among path, age"),
        ("path,label\n0.png,cat\n", "number", "'cat' as a label is not a finite number"),
        ("path,a,b\n0.png,1,0\n1.png,2,0\n", "auto", "the value '2' in the column 'a' .* is not 0, 1 or empty; for"),
        ("path,a,b\n0.png,,\n", "multi", "a manifest without rows; expected path, a, b"),
        ("path,label\n0.png,;\n1.png,\n", "multi", "list.csv: no image has a label"),
        ("path,label\n0.png,a\n1.png,b\n", "ordinal:label", "target='ordinal:label' has columns, which only"),
        ("path,label\n0.png,a\n1.png,b\n", "number:", "target='number:' names no columns"),
        ("path,label\n0.png,a\n1.png,b\n", "numbers", "unknown target 'numbers'"),
        ("path,labels\n0.png,a\n", "number", "'a' as a label is not a finite number"),
    ],
)  # fmt: skip
def test_wrong_targets_are_refused_in_one_line(images, text, target, message):
    with pytest.raises(VitruvianError, match=message) as error:
        open_dataset(manifest(images, text), target=target, accepts=KINDS)
    assert "\n" not in str(error.value)


def test_a_label_with_a_newline_is_a_label_and_one_with_a_semicolon_is_refused(images):
    lines = [{"path": "0.png", "label": ["a\nb"]}, {"path": "1.png", "label": ["c"]}]
    assert opened(manifest(images, "\n".join(map(json.dumps, lines)), "l.jsonl"))[0].classes == ("a\nb", "c")
    lines[1]["label"] = ["c;d"]
    with pytest.raises(DataError, match="line 2: the label 'c;d' contains ';'; rename it"):
        opened(manifest(images, "\n".join(map(json.dumps, lines)), "m.jsonl"))


def test_what_needs_one_class_per_image_refuses_other_targets(images):
    path = manifest(images, "path,labels\n0.png,dog;cat\n1.png,cat\n")
    with pytest.raises(DataError, match="the data has several labels per image; this works with one class per image"):
        open_dataset(path)
    with pytest.raises(DataError, match="the data has several labels per image"):
        open_dataset(open_dataset(path, accepts=KINDS))


def test_100_000_labels_take_little_memory():
    table = parse_labels([";".join(map(str, range(i, i + 5))) for i in range(100_000)], None)
    assert len(table.names) == 100_004
    assert len(table.values) == 500_000
    assert table.rows(np.array([7])).nonzero()[1].tolist() == [7, 8, 9, 10, 11]
    assert table.statistics(np.arange(100_000))[1].sum() == pytest.approx(5)


def test_rows_equal_the_dense_table():
    generator = np.random.default_rng(0)
    dense = generator.choice([0, 0, 1, np.nan], (20, 7)).astype(np.float32)
    rows = [{int(c): float(row[c]) for c in np.flatnonzero(row != 0)} for row in dense]
    table = make_table("multi", list("abcdefg"), rows)
    labels = generator.integers(20, size=50)
    assert np.array_equal(table.rows(labels), dense[labels], equal_nan=True)
    known, mean, std = table.statistics(labels)
    assert np.array_equal(known, (~np.isnan(dense[labels])).sum(0))
    assert np.allclose([mean, std], [np.nanmean(dense[labels], 0), np.nanstd(dense[labels], 0)])


def test_splits_have_their_share_of_the_rarest_label_and_of_all_numbers(images):
    lines = ["path,labels"] + [f"{i % 6}.png,{'rare;' * (i % 10 == 0)}common" for i in range(200)]
    source, _ = opened(manifest(images, "\n".join(lines)))
    rest, held = hold_out(source, 0.1, seed=0)
    assert held.targets is source.targets
    assert len(held) == 20
    assert held.targets.rows(np.asarray(held.labels()))[:, 1].sum() == 2
    assert len(first_samples(source, 50, seed=1)) == 50
    assert len(Concat([rest, held], name="all").targets) == len(source.targets)
    lines = ["path,age"] + [f"{i % 6}.png,{i}" for i in range(200)]
    source, _rows = opened(manifest(images, "\n".join(lines)), "number:age")
    ages = source.targets.rows(np.asarray(hold_out(source, 0.1, seed=0)[1].labels()))[:, 0]
    assert np.histogram(ages, bins=10, range=(0, 200))[0].tolist() == [2] * 10


def test_the_kinds_of_targets_are_parsed_with_columns():
    assert parse_target("number: age, weight").columns == ("age", "weight")
    assert all(kind.losses and kind.metrics for kind in KINDS.values())
    assert isinstance(parse_labels(["a;b"], None), TargetTable)


def test_the_targets_of_an_image_can_be_shown_as_text(images):
    source, _ = opened(manifest(images, "path,labels\n0.png,dog;cat\n1.png,\n"))
    assert [source.label_text(index) for index in range(2)] == ["cat;dog", ""]
    source, _ = opened(manifest(images, "path,a,b\n0.png,1.5,\n1.png,,2\n"), "number")
    assert source.label_text(0) == "1.5,"

"""CSV and Parquet manifests."""

import os

import pytest
from making import level_of, png

from vitruvian.data import index
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError


def make_manifest(tmp_path, text, name="list.csv"):
    (tmp_path / "images").mkdir(parents=True, exist_ok=True)
    for level in range(3):
        (tmp_path / f"images/{level}.png").write_bytes(png(level))
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_rows_give_paths_labels_splits_and_weights(tmp_path):
    path = make_manifest(
        tmp_path,
        "path,label,split,weight\n"
        "images/2.png,dog,train,2.5\n"
        "images/0.png,cat,validation,\n"
        f"{tmp_path}/images/1.png,cat,train,1\n",
    )
    data = open_dataset(path)
    assert data.classes == ("cat", "dog")
    assert list(data.splits) == ["train", "val"]
    assert data.train.labels().tolist() == [1, 0]
    assert [data.train.weight(i) for i in (0, 1)] == [2.5, 1.0]
    assert [level_of(data.train.read(i)) for i in (0, 1)] == [2, 1]
    assert data.train.key(0) == "images/2.png"


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_columns_may_be_in_any_order_and_parted_by_other_marks(tmp_path, name, mark):
    text = f"\ufeffNote{mark}Label{mark}path\n{mark}b{mark}images/0.png\n\nx{mark}a{mark}images/1.png\n"
    assert open_dataset(make_manifest(tmp_path, text, name)).train.labels().tolist() == [1, 0]


def test_numbers_are_labels_in_their_order(tmp_path):
    rows = "".join(f"images/0.png,{label}\n" for label in (10, 9, 2))
    assert open_dataset(make_manifest(tmp_path, "path,label\n" + rows)).classes == ("2", "9", "10")


def test_a_list_of_classes_beside_names_the_numbers(tmp_path):
    (tmp_path / "classes.txt").write_text("ant\nbee\ncow\n")
    path = make_manifest(tmp_path, "path,label\nimages/0.png,2\nimages/1.png,bee\n")
    data = open_dataset(path)
    assert data.classes == ("ant", "bee", "cow")
    assert data.train.labels().tolist() == [2, 1]


def test_a_parquet_manifest_is_read_like_a_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    make_manifest(tmp_path, "")
    table = {"path": ["images/1.png", "images/2.png"], "label": [7, 3], "weight": [0.5, None]}
    parquet.write_table(pyarrow.table(table), tmp_path / "list.parquet")
    train = open_dataset(tmp_path / "list.parquet").train
    assert train.classes == ("3", "7")
    assert [train.label(0), train.weight(0), train.weight(1)] == [1, 0.5, 1.0]
    assert level_of(train.read(1)) == 2


@pytest.mark.parametrize("path", ["../secret.png", "/etc/passwd", "images/../../secret.png"])
def test_no_row_leads_out_of_the_manifests_folder(tmp_path, path):
    rows = f"path,label\nimages/0.png,a\n{path},b\n"
    manifest = make_manifest(tmp_path / "set", rows)
    with pytest.raises(DataError, match=f"list.csv, line 3: the path {path} points outside .*set; move the manifest"):
        open_dataset(manifest)


def test_rows_may_lead_to_the_folder_that_the_user_names_for_data(tmp_path, monkeypatch):
    make_manifest(tmp_path / "disk", "")
    paths = f"{tmp_path}/disk/images/1.png", "../disk/images/2.png"
    manifest = make_manifest(tmp_path / "set", f"path,label\n{paths[0]},a\n{paths[1]},b\n")
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path / "disk"))
    assert [level_of(open_dataset(manifest).train.read(index)) for index in (0, 1)] == [1, 2]
    monkeypatch.delenv("VITRUVIAN_DATA")
    with pytest.raises(DataError, match="set VITRUVIAN_DATA to one"):
        open_dataset(manifest)


def test_a_manifest_is_compiled_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path = make_manifest(tmp_path, "path,label\nimages/0.png,a\nimages/1.png,b\n")
    calls = []
    original = index.write_index
    monkeypatch.setattr(index, "write_index", lambda *a, **k: (calls.append(1), original(*a, **k)))
    assert len(open_dataset(path).train) == len(open_dataset(path).train) == 2
    assert len(calls) == 1
    path.write_text(path.read_text() + "images/2.png,b\n")
    assert len(open_dataset(path).train) == 3
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "file/inside"))
    path = make_manifest(tmp_path, "path,label\nimages/0.png,a\nimages/1.png,b\n")
    assert len(open_dataset(path).train) == 2


def test_a_failed_compilation_leaves_nothing_behind(tmp_path, cache):
    path = make_manifest(tmp_path, "path,label\nimages/0.png,a\nimages/1.png,\n")
    with pytest.raises(
        DataError,
        match=r"list.csv, line 3: no label; every row needs both, unless the target is several labels \(multi\)",
    ):
        open_dataset(path)
    assert [name for _, _, names in os.walk(cache) for name in names] == []


def test_an_index_of_an_earlier_state_is_removed_after_a_day(tmp_path, cache):
    path = make_manifest(tmp_path, "path,label\nimages/0.png,a\nimages/1.png,b\n")
    open_dataset(path)
    (group,) = (cache / "index").iterdir()
    (first,) = group.iterdir()
    os.utime(first, (0, 0))
    path.write_text(path.read_text() + "images/2.png,b\n")
    open_dataset(path)
    assert not first.exists()
    assert len(list(group.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\nx,a\n", "no column path among file, label"),
        ("paths,labels\nx,a\n", "no column path and no column label among paths, labels; did you mean 'paths'"),
        ("", "no column path and no column label among none"),
        ("path,label\n", "a manifest without rows"),
        ("path,label\nimages/0.png\n", "line 2: no label"),
        ("path,label\n,a\n", "line 2: no path"),
        ("path,label,weight\nimages/0.png,a,heavy\n", "line 2: the weight 'heavy' is not a non-negative number"),
        ("path,label,weight\nimages/0.png,a,-1\n", "line 2: the weight '-1' is not a non-negative number"),
        ("path,label\nimages/0.png,a\n", "its only image is of one class, 'a'"),
        ("path,label\nno/0.png,a\nno/1.png,b\n", "none of its first 2 images exists, such as no/0.png"),
    ],
)
def test_a_broken_manifest_says_where_and_what(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as error:
        open_dataset(make_manifest(tmp_path, text))
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = make_manifest(tmp_path, "")
    path.write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(DataError, match=r"not a UTF-8 table after line 1 .*; save it as CSV UTF-8"):
        open_dataset(path)


def test_a_label_outside_the_list_of_classes_is_an_error(tmp_path):
    (tmp_path / "classes.json").write_text('{"ant": 0, "bee": 1}')
    path = make_manifest(tmp_path, "path,label\nimages/0.png,cow\n")
    with pytest.raises(DataError, match="label 'cow' is neither one of the 2 listed class names"):
        open_dataset(path)


def test_a_path_that_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    path = make_manifest(tmp_path, "path,label\nimages/0.png,a\npipe,b\n")
    with pytest.raises(Exception, match="not a regular file"):
        open_dataset(path).train.read(1)


@pytest.mark.parametrize("tags", ["red;flower", "red|flower", '"cat, dog"'])
def test_labels_that_look_like_tags_are_reported(tmp_path, tags):
    path = make_manifest(tmp_path, f"path,label\nimages/0.png,cat\nimages/1.png,{tags}\n")
    assert open_dataset(path).notes == (
        f"1 label is a list of tags, such as {tags.strip(chr(34))!r}: each combination is a separate class; "
        "to train on several labels per image, separate them by semicolons and use --target multi",
    )


def test_a_class_name_with_a_comma_is_no_list_of_tags(tmp_path):
    path = make_manifest(tmp_path, 'path,label\nimages/0.png,cat\nimages/1.png,"tench, Tinca tinca"\n')
    assert not open_dataset(path).notes


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "polars"])
def test_a_data_frame_is_read_like_a_manifest(tmp_path, monkeypatch, library):
    make_manifest(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    columns = {
        "image": ["images/2.png", f"{tmp_path}/images/0.png"],
        "label": ["dog", "cat"],
        "split": ["val", "train"],
    }
    make = pytest.importorskip(library)
    frame = make.table(columns) if library == "pyarrow" else make.DataFrame(columns)
    data = open_dataset(frame)
    monkeypatch.chdir("/")  # paths are relative to the folder in which it was opened
    assert data.classes == ("cat", "dog")
    assert [level_of(data.splits[name].read(0)) for name in ("train", "val")] == [0, 2]
    assert data.train.column("label") == ["cat"]
    assert data.notes == ()


def test_data_frames_of_numbers_and_categories_keep_their_meaning(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    make_manifest(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"path": ["images/2.png", "images/0.png"], "age": [1.5, None]})
    train = open_dataset(frame, target="number", accepts=("number",)).train
    assert (len(train), train.classes, train.label_text(0)) == (1, ("age",), "1.5")
    frame = pandas.DataFrame({"path": ["images/2.png", "images/0.png"], "label": pandas.Categorical(["b", "a"])})
    assert open_dataset(frame.set_index("label").reset_index()).train.labels().tolist() == [1, 0]


def test_the_index_of_a_pandas_frame_is_no_target(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    make_manifest(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"path": [f"images/{i}.png" for i in (2, 1, 0)], "age": [1.5, 7, 3]})
    for rows in (frame[frame.age < 5], frame.set_index(pandas.Index([5, 6, 8], name="id"))):  # row labels remain
        assert open_dataset(rows, target="number", accepts=("number",)).train.classes == ("age",)
    assert len(open_dataset(frame.set_index("path"), target="number", accepts=("number",)).train) == 3


def test_a_data_frame_without_paths_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"the data frame: no column path among label"):
        open_dataset(pandas.DataFrame({"label": ["a"]}))
    with pytest.raises(DataError, match=r"the data frame"):
        open_dataset(pandas.DataFrame({"path": [object()], "label": ["a"]}))
    with pytest.raises(DataError, match=r"row 2: no path; every row needs both"):
        open_dataset(pandas.DataFrame({"path": ["a.png", None], "label": ["a", "b"]}))
    with pytest.raises(DataError, match=r"none of its first 1 images exists"):
        open_dataset(pandas.DataFrame({"path": ["no.png"], "label": ["a"]}))

"""Class folders, and the images in a list of files and folders."""

import os
from pathlib import Path

import numpy as np
import pytest
from making import level_of, make_folder, png

from vitruvian.data import folder
from vitruvian.data.folder import find_images
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError


def test_a_folder_for_each_class_is_a_training_split(tmp_path):
    data = open_dataset(make_folder(tmp_path / "photos"))
    assert data.classes == ("cat", "dog")
    assert list(data.splits) == ["train"]
    assert data.validation is None
    assert data.notes == ()
    assert data.train.labels().tolist() == [0, 0, 0, 1, 1, 1]
    assert [data.train.key(i) for i in (0, 5)] == ["cat/0.png", "dog/2.png"]
    assert level_of(data.train.read(5)) == 102
    assert data.train.weight(0) == 1.0


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Validation", "dev"])
def test_folders_for_the_splits_may_lie_above(tmp_path, name):
    for split in ("train", name, "test"):
        make_folder(tmp_path / split)
    data = open_dataset(tmp_path)
    assert list(data.splits) == ["train", "val", "test"]
    assert data.validation is data.splits["val"]
    assert data.train.key(0) == "train/cat/0.png"
    assert list(open_dataset(tmp_path, split=name).splits) == ["val"]


def test_without_validation_the_test_split_is_taken(tmp_path):
    for split in ("train", "test"):
        make_folder(tmp_path / split)
    data = open_dataset(tmp_path)
    assert data.validation is data.splits["test"]


def test_a_split_may_lack_a_class(tmp_path):
    make_folder(tmp_path / "train", ["a", "b", "c"])
    make_folder(tmp_path / "val", ["c"])
    data = open_dataset(tmp_path)
    assert set(data.splits["val"].labels()) == {2}


def test_classes_are_sorted_as_people_count(tmp_path):
    data = open_dataset(make_folder(tmp_path, ["class10", "class9", "Class1", "été", "zoo"]))
    assert data.classes == ("Class1", "class9", "class10", "zoo", "été")


def test_an_accent_is_the_same_class_however_it_is_composed(tmp_path):
    make_folder(tmp_path / "train", ["caf\u00e9", "bar"])
    make_folder(tmp_path / "val", ["cafe\u0301", "bar"])
    assert open_dataset(tmp_path).classes == ("bar", "caf\u00e9")


def test_images_may_lie_deeper_and_be_links(tmp_path):
    make_folder(tmp_path / "photos", each=1)
    (tmp_path / "photos/cat/2024/may").mkdir(parents=True)
    (tmp_path / "photos/cat/2024/may/x.JPG").write_bytes(png(5))
    (tmp_path / "photos/dog/link.png").symlink_to(tmp_path / "photos/cat/0.png")
    data = open_dataset(tmp_path / "photos")
    assert [data.train.key(i) for i in range(4)] == ["cat/0.png", "cat/2024/may/x.JPG", "dog/0.png", "dog/link.png"]


def test_a_link_from_a_class_to_the_whole_or_to_another_class_gives_no_image_a_second_label(tmp_path):
    make_folder(tmp_path, each=1)
    (tmp_path / "cat/again").symlink_to("..")
    (tmp_path / "cat/other").symlink_to("../dog")
    data = open_dataset(tmp_path)
    assert [data.train.key(i) for i in range(len(data.train))] == ["cat/0.png", "dog/0.png"]
    assert "2 links to a folder that is already listed" in "\n".join(data.notes)


def test_what_is_not_an_image_is_counted_and_named(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "cat/readme.txt").write_text("x")
    (tmp_path / "cat/.hidden.png").write_bytes(png())
    (tmp_path / "loose.png").write_bytes(png())
    (tmp_path / "empty").mkdir()
    (tmp_path / "dog/loop").symlink_to(tmp_path / "dog")
    (tmp_path / "dog/gone.png").symlink_to(tmp_path / "nowhere.png")
    data = open_dataset(tmp_path)
    assert len(data.train) == 6
    text = "\n".join(data.notes)
    for line in (
        "1 non-image file (.txt), ",
        "1 hidden file, ",
        "1 file outside the class folders, loose.png",
        "1 class folder without an image, empty",
        "1 link to a folder that is already listed",
        "1 non-regular file (broken link, pipe or device)",
    ):
        assert line in text


def test_a_class_may_be_called_train(tmp_path):
    data = open_dataset(make_folder(tmp_path, ["train", "plane"]))
    assert data.classes == ("plane", "train")


def test_names_that_are_not_text_are_kept(tmp_path):
    make_folder(tmp_path)
    with open(os.fsencode(tmp_path) + b"/cat/\xff.png", "wb") as file:
        file.write(png(9))
    data = open_dataset(tmp_path)
    assert level_of(data.train.read(3)) == 9


def test_a_sample_outside_is_an_error(tmp_path):
    train = open_dataset(make_folder(tmp_path)).train
    for index in (-1, 6):
        with pytest.raises(IndexError):
            train.read(index)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda root: (root / "a.png").write_bytes(png()), "1 images without labels; put each into a folder"),
        (lambda root: make_folder(root, ["cat"]), "all 3 images are of one class, 'cat'; at least two"),
        (lambda root: None, "no images in class folders \\(the folder is empty\\)"),
        (lambda root: (root / "cat").mkdir(), "1 class folder without an image, cat"),
        (lambda root: make_folder(root, ["train", "val"]), "no class folders in train and val"),
        (lambda root: (root / "list.csv").write_text("path,label\n"), "pass .*list.csv"),
        (lambda root: [make_folder(root / n) for n in ("val", "valid")], "val and valid are the same split"),
    ],
)
def test_a_folder_without_classes_says_what_is_wrong(tmp_path, make, text):
    make(tmp_path)
    with pytest.raises(DataError, match=text) as error:
        open_dataset(tmp_path)
    assert "\n" not in str(error.value)


def test_labels_can_be_counted(tmp_path):
    train = open_dataset(make_folder(tmp_path, each=2)).train
    assert np.bincount(train.labels()).tolist() == [2, 2]


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_folders_give_their_images_sorted_and_files_come_as_given(tmp_path):
    make(tmp_path, "b.JPG", "a.png", "sub/c.webp", "notes.txt", ".hidden.jpg", ".cache/d.jpg", "README")
    inside = [str(tmp_path / name) for name in ("a.png", "b.JPG", "sub/c.webp")]
    assert find_images([tmp_path]) == inside
    assert find_images(["./z.txt", tmp_path / "sub", "missing.jpg"]) == ["./z.txt", inside[2], "missing.jpg"]


def test_links_are_followed_and_circles_end(tmp_path):
    make(tmp_path, "real/a.jpg")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "circle").symlink_to(tmp_path / "real")
    assert find_images([tmp_path / "set"]) == [str(tmp_path / "set" / "linked" / "a.jpg")]


def test_a_folder_without_images_is_an_error(tmp_path):
    make(tmp_path, "notes.txt")
    with pytest.raises(DataError, match=r": no images in this folder or below it \(extensions \.apng .* \.webp\)"):
        find_images([tmp_path])


def test_files_that_are_not_read_are_counted_by_kind(tmp_path, capsys, monkeypatch):
    make(tmp_path, "a.jpg", "b.heic", "c.HEIC", "notes.txt")
    monkeypatch.setattr(folder, "EXTENSIONS", folder.EXTENSIONS - folder.HEIF_EXTENSIONS)
    assert find_images([tmp_path]) == [str(tmp_path / "a.jpg")]
    heic, other = capsys.readouterr().err.splitlines()
    assert (
        heic == f"note: skipped 2 HEIC photos (pip install pillow-heif, or convert to JPEG), such as {tmp_path}/b.heic"
    )
    assert other == f"note: skipped 1 non-image file (.txt), {tmp_path}/notes.txt"


def test_a_folder_of_heic_photos_says_what_to_do(tmp_path, monkeypatch):
    make(tmp_path, "b.heic")
    monkeypatch.setattr(folder, "EXTENSIONS", folder.EXTENSIONS - folder.HEIF_EXTENSIONS)
    with pytest.raises(DataError, match=r"; skipped 1 HEIC photo \(pip install pillow-heif"):
        find_images([tmp_path])

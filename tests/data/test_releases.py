"""Tasks by name, on small folders in the layout in which their data is distributed."""

import io
import tarfile

import numpy as np
import pytest
from layouts import (
    make_cifar,
    make_cifar_python,
    make_flowers,
    make_imagenet,
    make_mafw,
    make_objectnet,
    make_omni,
    make_pets,
    make_variants,
    make_vizwiz,
    make_vtab,
    make_watermark,
)
from making import level_of, make_folder, python3_pickle

from vitruvian.catalog import imagenet_ids
from vitruvian.data.formats import open_dataset
from vitruvian.data.releases import open_release
from vitruvian.errors import DataError
from vitruvian.tasks import all_tasks


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def contents(source):
    return [(source.key(i), source.classes[source.label(i)]) for i in range(len(source))]


@pytest.mark.parametrize("name", all_tasks())
def test_a_task_without_its_data_says_what_to_download_and_where(root, name):
    with pytest.raises(DataError) as error:
        open_dataset(name)
    text = str(error.value)
    assert text.startswith(f"the task {name} has no ")
    assert str(root / all_tasks()[name].folder) in text
    assert all_tasks()[name].download in text
    assert "VITRUVIAN_DATA" in text
    assert "\n" not in text


@pytest.mark.parametrize("layout", sorted({task.layout for task in all_tasks().values()}))
def test_every_layout_has_an_opener(tmp_path, layout):
    task = next(task for task in all_tasks().values() if task.layout == layout)
    with pytest.raises((DataError, OSError)):
        open_release(task, tmp_path / "nothing", tmp_path, folders=lambda folder: open_dataset(folder))


def test_flowers_are_read_from_the_release(root):
    make_flowers(root)
    data = open_dataset("Oxford Flowers-102")
    assert data.classes == ("1", "2", "3")
    assert contents(data.train) == [
        ("jpg/image_00008.jpg", "2"),
        ("jpg/image_00001.jpg", "1"),
        ("jpg/image_00002.jpg", "2"),
        ("jpg/image_00005.jpg", "3"),
    ]
    assert [data.splits["test"].label(i) for i in range(4)] == [0, 1, 2, 0]
    assert level_of(data.train.read(0)) == 8


def test_pets_are_read_from_the_release_in_its_order_of_classes(root):
    make_pets(root)
    data = open_dataset("pets")
    assert data.classes == ("Abyssinian", "american_bulldog", "Bengal")
    assert contents(data.splits["test"]) == [
        ("images/american_bulldog_9.jpg", "american_bulldog"),
        ("images/Bengal_2.jpg", "Bengal"),
    ]
    assert "pets: 3 images in train, the release has 3,680" in data.notes
    assert "pets: 3 classes, the release has 37" in data.notes


def test_a_broken_list_of_pets_names_the_line(root):
    make_pets(root)
    (root / "pets" / "annotations" / "test.txt").write_text("Bengal_2 3 1 1\nBengal_3\n")
    with pytest.raises(DataError, match=r"test\.txt, line 2: .* is not a name and the index of its class"):
        open_dataset("pets")


@pytest.mark.parametrize("make", [make_cifar, make_cifar_python])
def test_cifar_is_read_in_both_formats(root, make):
    make(root)
    data = open_dataset("CIFAR-10")
    assert (len(data.train), len(data.splits["test"]), len(data.classes)) == (8, 4, 10)


def test_cifar_100_is_read_from_the_archive_itself(root):
    (root / "cifar100").mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = {"meta": {"fine_label_names": [f"class {n}" for n in range(100)]}}
    for name in ("train", "test"):
        pixels = rng.integers(0, 256, (5, 3072), dtype=np.uint8)
        files[name] = {"data": pixels, "fine_labels": [99, 1, 2, 3, 4], "coarse_labels": [0] * 5}
    with tarfile.open(root / "cifar100" / "cifar-100-python.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            content = python3_pickle(
                {k: [w.encode() for w in v] if k.endswith("names") else v for k, v in content.items()}
            )
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = open_dataset("cifar100")
    assert len(data.classes) == 100
    assert data.train.label(0) == 99


@pytest.mark.parametrize("flat", [False, True])
def test_imagenet_has_the_published_order_of_classes_sorted_or_flat(root, flat):
    make_imagenet(root, flat=flat)
    data = open_dataset("imagenet")
    assert data.classes == imagenet_ids()
    val = data.splits["val"]
    found = {val.key(i)[-13:-5]: val.label(i) for i in range(len(val))}
    assert found == {"00000001": 2, "00000002": 0, "00000003": 2}
    assert sorted(data.train.labels().tolist()) == [0, 2]


def test_flat_validation_images_need_the_development_kit(root):
    make_imagenet(root, flat=True)
    (root / "imagenet" / "ILSVRC2012_devkit_t12" / "data" / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"are in one folder, so .*ground_truth\.txt and .*meta\.mat are needed"):
        open_dataset("imagenet")


def test_a_folder_that_is_no_class_of_imagenet_is_an_error(root):
    make_imagenet(root)
    (root / "imagenet" / "train" / "cats").mkdir()
    with pytest.raises(DataError, match="cats: not the WordNet id of one of ImageNet's 1000 classes"):
        open_dataset("imagenet")


def test_real_is_the_validation_split_alone_and_needs_its_labels(root):
    make_imagenet(root)
    assert list(open_dataset("ReaL").splits) == ["val"]
    (root / "imagenet" / "real.json").unlink()
    with pytest.raises(DataError, match=r"the task imagenet-real has no real\.json in"):
        open_dataset("imagenet-real")


def test_variants_of_imagenet_are_for_testing(root):
    make_variants(root)
    ids = imagenet_ids()
    for name in ("imagenet-a", "imagenet-r"):
        assert open_dataset(name).classes == (ids[6], ids[11])
    test = open_dataset("imagenet-v2").splits["test"]
    assert test.classes == ids
    assert [test.label(i) for i in range(3)] == [0, 9, 10]


def test_imagenet_w_draws_the_watermark_over_the_released_view(root):
    make_watermark(root)
    test = open_dataset("imagenet-w").splits["test"]
    pixels = test.read(0)
    assert pixels.shape == (224, 224, 3)
    plain = int(np.bincount(pixels.ravel()).argmax())
    marked = np.argwhere(pixels[:, :, 0] != plain)
    top, left = marked.min(axis=0)
    assert 0.4 * 224 <= top < 0.6 * 224  # the text begins at two fifths of the height
    assert left < 0.1 * 224
    brightest = pixels.max()
    assert abs(int(brightest) - (plain + 255) / 2) <= 2  # white at half opacity


def test_objectnet_loses_its_border_and_its_classes_are_its_folders(root):
    make_objectnet(root)
    test = open_dataset("objectnet").splits["test"]
    assert test.classes == ("air_freshener", "banana")
    assert test.read(1).shape == (4, 6, 3)
    assert test.read(1).max() == 10  # nothing red is left


def test_vizwiz_takes_the_first_label_that_is_a_category(root):
    make_vizwiz(root)
    test = open_dataset("VizWiz-Classification").splits["test"]
    assert [label for _, label in contents(test)] == [imagenet_ids()[n] for n in (440, 508, 440)]


def test_vizwiz_without_labels_says_who_has_them(root):
    make_vizwiz(root, labels=False)
    with pytest.raises(
        DataError, match="lists 3 images without labels, like the public file; the labels are on the evaluation server"
    ):
        open_dataset("vizwiz")


def test_a_clip_of_mafw_is_its_middle_frame(root):
    make_mafw(root)
    data = open_dataset("mafw")
    assert len(data.classes) == 11
    assert contents(data.train) == [
        ("data/frames/00001/002.jpg", "anger"),
        ("data/frames/00002/002.jpg", "surprise"),
    ]
    with pytest.raises(DataError, match="mafw-2 has no"):
        open_dataset("mafw-2")


@pytest.mark.parametrize("downloaded", [False, True])
def test_a_realm_of_omnibenchmark_is_read_in_both_layouts(root, downloaded):
    make_omni(root, downloaded=downloaded)
    data = open_dataset("omnibenchmark-car")
    assert list(data.splits) == ["train", "val", "test"]
    assert data.classes == ("3", "7")
    assert [label for _, label in contents(data.train)] == ["3", "7", "3"]
    data.train.read(2)


@pytest.mark.parametrize("name", [name for name in all_tasks() if name.startswith("vtab")])
def test_every_vtab_task_is_read_from_its_lists(root, name):
    task = all_tasks()[name]
    make_vtab(root, task.folder.rpartition("/")[2], task.classes)
    data = open_dataset(name)
    assert [len(source) for source in data.splits.values()] == [8, 4, 6]
    assert len(data.classes) == task.classes
    assert data.train.key(3) == "images/train/000003.jpg"
    assert level_of(data.train.read(3)) == 3


def test_a_list_whose_images_are_elsewhere_says_so(root):
    make_vtab(root)
    path = root / "vtab-1k" / "kitti" / "test.txt"
    path.write_text("images/1.jpg 0\n")
    with pytest.raises(DataError, match=r"test\.txt: its first image, images/1\.jpg, is not in"):
        open_dataset("vtab-kitti")
    path.write_text("../../../secret.jpg 0\n")
    with pytest.raises(DataError, match=r"the path \.\./\.\./\.\./secret\.jpg points outside"):
        open_dataset("vtab-kitti")
    path.write_text("alone\n")
    with pytest.raises(DataError, match=r"test\.txt, line 1: 'alone' is not a path and a label"):
        open_dataset("vtab-kitti")


def test_a_label_beyond_the_classes_is_an_error(root):
    make_vtab(root)
    path = root / "vtab-1k" / "kitti" / "test.txt"
    path.write_text("images/test/000000.jpg 4\n")
    with pytest.raises(DataError, match="label '4' is neither one of the 4 listed class names"):
        open_dataset("vtab-kitti")


def test_a_folder_here_comes_before_a_task_of_the_same_name(root, tmp_path):
    make_folder(tmp_path / "pets")
    assert open_dataset("pets").classes == ("cat", "dog")

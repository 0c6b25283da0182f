"""Datasets and transforms of other libraries."""

import random

import numpy as np
import pytest
import torch
from making import png
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Loader
from vitruvian.data.sources import hold_out
from vitruvian.data.transform import as_transform
from vitruvian.errors import ConfigError, DataError
from vitruvian.targets import KINDS


class Pictures(torch.utils.data.Dataset):
    """Gray levels from 0 up, the class of item i is i % 3; `form` makes the image of a level."""

    def __init__(self, length=9, *, form=lambda level: Image.new("L", (4, 3), level), label=lambda index: index % 3):
        self.length, self.form, self.of = length, form, label

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.form(index), self.of(index)


def level(index):
    return Image.new("L", (4, 3), index)


class Noisy(torch.utils.data.Dataset):
    """A dataset with random transforms of its own, from all three global generators."""

    classes = ("a", "b")

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = (random.randrange(256), np.random.randint(256), int(torch.randint(256, ())))  # noqa: NPY002
        return torch.tensor([*drawn, index], dtype=torch.uint8).view(1, 2, 2), index % 2


def noisy_transform(image):
    draws = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])  # noqa: NPY002
    return draws.view(3, 1, 1) + float(np.asarray(image).mean())


def plain_sample(image, rng):
    return torch.from_numpy(image[None].astype(np.float32))


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (lambda level: Image.new("L", (4, 3), level), (3, 4)),
        (lambda level: Image.new("RGB", (4, 3), (level, level, level)), (3, 4, 3)),
        (lambda level: Image.new("RGBA", (4, 3), (level, level, level, 255)), (3, 4, 3)),
        (lambda level: np.full((3, 4), level, np.uint8), (3, 4)),
        (lambda level: np.full((3, 4, 3), level, np.uint8), (3, 4, 3)),
        (lambda level: np.full((3, 4, 1), level / 255, np.float32), (3, 4)),
        (lambda level: torch.full((3, 3, 4), level, dtype=torch.uint8), (3, 4, 3)),
        (lambda level: torch.full((1, 3, 4), level / 255), (3, 4)),
    ],
)
def test_an_image_of_any_kind_becomes_the_same_levels(form, wanted):
    source = open_dataset(Pictures(form=form)).train
    pixels = source.read(7)
    assert (pixels.shape, pixels.dtype, int(pixels.max()), int(pixels.min())) == (wanted, np.uint8, 7, 7)


def test_an_item_may_be_a_dictionary_with_the_bytes_of_a_file():
    class Files(Pictures):
        def __getitem__(self, index):
            return {"image": png(index), "label": torch.tensor(index % 3), "id": index}

    source = open_dataset(Files()).train
    assert (source.read(4), source.label(4)) == (png(4), 1)


def test_classes_and_labels_come_from_the_dataset_without_reading_images():
    class Listed(Pictures):
        classes = ("cat", "dog", ("fox", "vixen"))
        targets = torch.arange(9) % 3

        def __getitem__(self, index):
            raise AssertionError("an image was read")

    source = open_dataset(ConcatDataset([Listed(), Subset(Listed(), [2, 1])])).train
    assert source.classes == ("cat", "dog", "fox, vixen")
    assert source.labels().tolist() == [0, 1, 2] * 3 + [2, 1]
    assert source.label(9) == 2


def test_without_names_the_classes_are_numbered_or_called_like_the_labels():
    assert open_dataset(Pictures()).classes == ("0", "1", "2")
    named = open_dataset(Pictures(label=lambda index: ["dog", "cat"][index % 2])).train
    assert (named.classes, named.labels().tolist()[:3]) == (("cat", "dog"), [1, 0, 1])


def test_a_mapping_gives_the_splits_and_numbered_classes_are_shared():
    data = open_dataset({"train": Pictures(), "validation": Pictures(2)})
    assert list(data.splits) == ["train", "val"]
    assert data.validation.classes == ("0", "1", "2")
    assert open_dataset(data) is data
    assert len(open_dataset(data.train).train) == 9


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "None is not a dataset; pass a path, a name"),
        ({}, "is not a dataset; pass a path"),
        (
            type("Stream", (IterableDataset,), {"__iter__": iter})(),
            "Stream without __len__; expected a map-style",
        ),
        (
            Pictures(form=lambda level: torch.full((3, 2, 2), -1.0)),
            r"values from -1 to -1; expected floats from 0 to 1",
        ),
        (Pictures(form=lambda level: np.zeros((2, 2), np.int64)), "values of type int64; expected uint8"),
        (Pictures(form=lambda level: torch.zeros(5, 2, 2)), r"Tensor of shape \(5, 2, 2\); expected a PIL image"),
        (Pictures(label=lambda index: [0] if index else 1), r"some images have a list of labels, others one label"),
        (Pictures(label=lambda index: [[0, 1]]), r"\('0', '1'\) in the list of labels is not one of the classes"),
        (Pictures(label=lambda index: [-1]), "-1 in the list of labels is not one of the classes"),
        (Pictures(label=lambda index: ["a;b"]), "the label 'a;b' contains ';'"),
        (
            type("Named", (Pictures,), {"classes": ("a", "b")})(label=lambda index: [2]),
            "2 in the list of labels is not one of the 2 classes",
        ),
        (
            type("Flags", (Pictures,), {"classes": ("a", "b")})(label=lambda index: torch.zeros(3)),
            "3 values of 0 and 1, but 2 classes",
        ),
        (Pictures(label=lambda index: 0.5), "the label '0.5' is not a class index or name"),
        (Pictures(label=lambda index: index - 1), "label -1, but there are 8 classes"),
        (type("Bare", (Pictures,), {"__getitem__": lambda self, i: i})(), r"a int; expected \(image, label\)"),
        (
            type("Odd", (Pictures,), {"__getitem__": lambda self, i: {"x": i}})(),
            "the keys are x; expected `image`",
        ),
        (type("Few", (Pictures,), {"classes": ("a", "b")})(), "label 2, but there are 2 classes"),
        (type("Wrong", (Pictures,), {"targets": [1] * 9})(), "the label is 0, but 1 in the list of all labels"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(data, text):
    with pytest.raises(DataError, match=text):
        read_all(data)


def several(dataset):
    """The names of the labels, and the targets of all images."""
    data = open_dataset(dataset, accepts=KINDS)
    assert data.target == "multi"
    return data.train.targets.names, data.train.targets.rows(data.train.labels()).tolist()


def test_lists_of_labels_and_arrays_of_flags_are_several_labels():
    lists = [[0, 2], [], [2]]
    flags = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    seen = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]  # no image has the second label
    names = ("cat", "dog", "owl")
    named = type("Named", (Pictures,), {"classes": names})
    assert several(Pictures(3, label=lambda index: lists[index])) == (("0", "2"), seen)
    assert several(named(3, label=lambda index: lists[index])) == (("cat", "owl"), seen)
    assert several(named(3, label=lambda index: torch.tensor(flags[index]))) == (("cat", "owl"), seen)
    assert several(named(3, label=lambda index: [names[k] for k in lists[index]])) == (("cat", "owl"), seen)
    (note,) = open_dataset(named(3, label=lambda index: lists[index]), accepts=KINDS).notes
    assert note == "skipped 1 label without an image: dog"
    targets = type("Targets", (Pictures,), {"targets": torch.tensor(flags), "classes": names})
    assert several(targets(3, label=lambda index: torch.tensor(flags[index]))) == (("cat", "owl"), seen)


def test_splits_with_lists_of_labels_share_their_classes():
    data = open_dataset(
        {"train": Pictures(label=lambda index: [index % 3]), "test": Pictures(label=lambda index: [3])}, accepts=KINDS
    )
    assert data.train.targets is data.splits["test"].targets
    assert data.train.targets.names == ("0", "1", "2", "3")
    with pytest.raises(DataError, match="the data has several labels per image; this works with one class per image"):
        open_dataset(Pictures(label=lambda index: [index % 3]))


def test_opening_a_dataset_leaves_the_random_state_of_its_caller_alone():
    before = random.getstate(), torch.get_rng_state()
    open_dataset(Noisy())
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())


def read_all(data):
    train = open_dataset(data).train
    return [train.read(index) for index, _ in enumerate(train.labels())]


def batches(dataset, transform, *, workers=0, start=0, epoch=3):
    with Loader(dataset, transform=transform, batch_size=4, training=True, seed=1, workers=workers) as loader:
        return [batch.pixels for batch in loader.batches(epoch, start)]


@pytest.mark.parametrize(("transform", "noisy"), [(plain_sample, True), (as_transform(noisy_transform), False)])
@pytest.mark.slow
def test_random_datasets_and_transforms_repeat_with_any_workers_and_from_any_batch(transform, noisy):
    source = open_dataset(Noisy() if noisy else Subset(Noisy(), range(12))).train
    torch.manual_seed(5)
    whole = batches(source, transform)
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(())), "the global generator was moved"
    torch.manual_seed(6)
    random.seed(7)
    assert all(map(torch.equal, whole, batches(source, transform, workers=2)))
    assert all(map(torch.equal, whole[2:], batches(source, transform, start=2)))
    assert not any(map(torch.equal, whole, batches(source, transform, epoch=4)))


def test_a_part_of_a_random_dataset_is_seeded_too():
    part, _ = hold_out(open_dataset(Noisy()).train, 0.3, seed=0)
    first = batches(part, plain_sample)
    random.seed(7)
    assert all(map(torch.equal, first, batches(part, plain_sample)))


def test_a_transform_with_generators_of_its_own_is_seeded_through_its_method():
    class Own:
        def set_random_seed(self, seed):
            self.rng = np.random.default_rng(seed)

        def __call__(self, image):
            return torch.full((1, 2, 2), float(self.rng.random()))

    source = open_dataset(Noisy()).train
    assert all(map(torch.equal, batches(source, as_transform(Own())), batches(source, as_transform(Own()))))


@pytest.mark.parametrize(
    ("made", "kind"), [(torch.zeros(3, 2, 2, dtype=torch.uint8), r"torch.uint8 \(3, 2, 2\)"), (np.zeros(3), "ndarray")]
)
def test_a_transform_that_gives_no_float_tensor_is_an_error(made, kind):
    with pytest.raises(ConfigError, match=rf"the transform returned {kind}, expected a float tensor"):
        as_transform(lambda image: made)(png(3), np.random.default_rng(0))


def test_what_cannot_be_sent_to_workers_is_said_clearly():
    source = open_dataset(Noisy()).train
    with pytest.raises(DataError, match=r"the dataset or the transform cannot be sent to data workers .*use workers=0"):
        batches(source, as_transform(lambda image: torch.zeros(1, 1, 1)), workers=1)


class ClassLabel:
    names = ("cat", "dog")


class Column(dict):
    """As much of a Hugging Face dataset as is used: features, columns and items."""

    def __init__(self, labels):
        self.features = {
            "image": type("Image", (), {"__init__": lambda self, decode=True: None})(),
            "label": ClassLabel(),
        }
        self.column, self.format, self.decoded = labels, {"type": None}, True

    def __len__(self):
        return len(self.column)

    def __getitem__(self, item):
        if item == "label":
            return self.column
        image = Image.new("L", (4, 3), item) if self.decoded else {"bytes": png(item), "path": None}
        return {"image": image, "label": self.column[item]}

    def with_format(self, kind):
        return self

    def cast_column(self, name, feature):
        copy = Column(self.column)
        copy.decoded = False
        return copy


def test_a_hugging_face_dataset_gives_the_bytes_of_its_files_and_names_its_classes():
    data = open_dataset({"train": Column([0, 1, 1]), "test": Column([-1, -1])})
    assert (data.classes, list(data.splits)) == (("cat", "dog"), ["train"])
    assert "whose labels are withheld (-1)" in data.notes[0]
    assert (data.train.read(2), data.train.label(2)) == (png(2), 1)


@pytest.mark.slow
def test_real_hugging_face_datasets_are_taken():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": png(level), "path": None} for level in range(4)], "label": [0, 1, 1, 0]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    data = open_dataset(datasets.DatasetDict(train=dataset, validation=dataset.select([1, 2])))
    assert (data.classes, len(data.validation)) == (("cat", "dog"), 2)
    assert (data.train.read(3), data.train.labels().tolist()) == (png(3), [0, 1, 1, 0])
    features["label"] = datasets.Sequence(datasets.ClassLabel(names=["cat", "dog"]))
    listed = datasets.Dataset.from_dict(rows | {"label": [[0], [], [0, 1], [1]]}, features=features)
    assert several(listed) == (("cat", "dog"), [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    seen = open_dataset(dataset.with_transform(lambda batch: batch)).train
    assert seen.read(1).shape == (3, 4, 3)

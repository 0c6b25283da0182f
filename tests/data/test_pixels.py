"""CIFAR, IDX files and the built-in digits: sources of pixels."""

import hashlib
import pickle
import tarfile

import numpy as np
import pytest
from making import (
    CIFAR10_NAMES,
    cifar_batch,
    make_cifar_binary,
    make_cifar_pickles,
    make_idx,
    python2_pickle,
    python3_pickle,
)

from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError


def check_cifar10(data):
    assert data.classes == tuple(CIFAR10_NAMES)
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 8, "test": 4}
    assert data.train.labels().tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    pixels, _ = cifar_batch(start=1)
    planes = pixels[2].reshape(3, 32, 32)
    assert np.array_equal(data.train.read(6), planes.transpose(1, 2, 0))
    assert data.train.label(6) == 3


def test_cifar10_binary_version(tmp_path):
    folder = make_cifar_binary(tmp_path / "cifar-10-batches-bin")
    check_cifar10(open_dataset(folder))
    check_cifar10(open_dataset(tmp_path))
    assert open_dataset(folder).notes == ("only 2 of the 5 files of the split train are present",)


@pytest.mark.parametrize("dumps", [python2_pickle, python3_pickle])
def test_cifar10_pickles(tmp_path, dumps):
    check_cifar10(open_dataset(make_cifar_pickles(tmp_path / "cifar-10-batches-py", dumps)))


@pytest.mark.parametrize("make", [make_cifar_binary, make_cifar_pickles])
def test_cifar10_in_its_archive(tmp_path, make):
    make(tmp_path / "inside")
    with tarfile.open(tmp_path / "cifar-10.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "inside", "cifar-10")
    check_cifar10(open_dataset(tmp_path / "cifar-10.tar.gz"))


def test_cifar100_learns_the_fine_labels(tmp_path):
    names = [f"fine {number}" for number in range(100)]
    pixels, _ = cifar_batch()
    batch = {"data": pixels, "coarse_labels": [1, 2, 3, 4], "fine_labels": [10, 20, 30, 99]}
    (tmp_path / "py").mkdir()
    for name, content in (("meta", {"fine_label_names": names}), ("train", batch), ("test", batch)):
        (tmp_path / "py" / name).write_bytes(python2_pickle(content))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/fine_label_names.txt").write_text("\n".join(names))
    labels = np.array([batch["coarse_labels"], batch["fine_labels"]], np.uint8).T
    (tmp_path / "bin/train.bin").write_bytes(np.concatenate([labels, pixels], axis=1).tobytes())
    for folder in ("py", "bin"):
        train = open_dataset(tmp_path / folder).train
        assert train.labels().tolist() == [10, 20, 30, 99]
        assert np.array_equal(train.read(3), pixels[3].reshape(3, 32, 32).transpose(1, 2, 0))


class Attack:
    def __reduce__(self):
        return print, ("this must not run",)


class OtherArray(np.ndarray):
    pass


@pytest.mark.parametrize("content", [Attack(), np.array([Attack()]), np.array(["text"]), np.zeros(2).view(OtherArray)])
def test_a_pickle_that_asks_for_more_than_data_is_refused(tmp_path, capsys, content):
    folder = make_cifar_pickles(tmp_path / "py")
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": content, b"labels": [1]}))
    with pytest.raises(DataError, match="data_batch_1: not a pickle of plain data"):
        open_dataset(folder)
    assert capsys.readouterr().out == ""


def test_a_broken_cifar_file_is_an_error(tmp_path):
    folder = make_cifar_binary(tmp_path / "bin")
    (folder / "data_batch_1.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match="3072 bytes are not a whole number of records of 3073"):
        open_dataset(folder)
    (folder / "data_batch_1.bin").write_bytes(bytes([10] * 3073))
    with pytest.raises(DataError, match="label 10, but only 10 classes"):
        open_dataset(folder)


def test_pickles_of_other_content_are_errors(tmp_path):
    folder = make_cifar_pickles(tmp_path / "py")
    (folder / "data_batch_1").write_bytes(python2_pickle({"labels": [1]}))
    with pytest.raises(DataError, match="data_batch_1: not a batch of CIFAR images"):
        open_dataset(folder)
    (folder / "batches.meta").write_bytes(python2_pickle([1, 2]))
    with pytest.raises(DataError, match=r"batches.meta: no CIFAR class names"):
        open_dataset(folder)


def test_a_foreign_archive_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(__file__, "a.py")
    with pytest.raises(DataError, match="not an archive of CIFAR-10 or CIFAR-100; unpack it"):
        open_dataset(tmp_path / "x.tar.gz")
    (tmp_path / "y.tar.gz").write_bytes((tmp_path / "x.tar.gz").read_bytes()[:50])
    with pytest.raises(DataError, match="damaged archive"):
        open_dataset(tmp_path / "y.tar.gz")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_gzipped_or_not(tmp_path, packed):
    images = make_idx(tmp_path / "mnist", packed=packed)
    data = open_dataset(tmp_path / "mnist")
    assert list(data.splits) == ["train", "test"]
    assert data.classes == ("0", "1", "2")
    assert np.array_equal(data.train.read(4), images[4])
    assert data.train.label(4) == 1
    assert data.train.key(4).endswith("mnist (train) #4")


def test_broken_idx_files_are_errors(tmp_path):
    make_idx(tmp_path / "mnist", packed=False)
    labels = tmp_path / "mnist/train-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="5 labels, the header states 6"):
        open_dataset(tmp_path / "mnist")
    labels.write_bytes(b"something else")
    with pytest.raises(DataError, match="not an IDX file of bytes with 1 dimensions"):
        open_dataset(tmp_path / "mnist")
    labels.unlink()
    with pytest.raises(DataError, match="the file of labels, train-labels-idx1-ubyte, is missing"):
        open_dataset(tmp_path / "mnist")


def test_a_truncated_gzip_file_is_an_error(tmp_path):
    make_idx(tmp_path / "mnist")
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="damaged gzip file"):
        open_dataset(tmp_path / "mnist")


def test_the_digits_are_scikit_learns():
    data = open_dataset("digits")
    assert data.classes == tuple("0123456789")
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 1438, "test": 359}
    sizes = np.bincount(data.train.labels()) + np.bincount(data.splits["test"].labels())
    assert sizes.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as its documentation says
    whole = data.train.source
    pixels = np.stack([whole.read(index) for index in range(len(whole))])
    assert (pixels.shape, pixels.max(), len(np.unique(pixels))) == ((1797, 8, 8), 255, 17)
    # Sum of load_digits().images: 561718.
    assert np.rint(pixels / (255 / 16)).sum() == 561718


def test_the_digits_held_out_are_always_the_same():
    held = open_dataset("digits").splits["test"]
    numbers = np.array([held.original(index) for index in range(len(held))], "<i8")
    assert hashlib.sha256(numbers.tobytes()).hexdigest()[:16] == "eae14d008b27d2f7"

"""What is in a packed dataset."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest
import typer
from photos import encoded, make_photos, photo
from PIL import Image
from typer.testing import CliRunner

from vitruvian.cli.data import pack as pack_command
from vitruvian.data import pack as packing
from vitruvian.data.decode import decode
from vitruvian.data.formats import open_dataset
from vitruvian.data.pack import PackSettings, label_texts, pack, sample_name
from vitruvian.errors import ConfigError, DataError

JPEG = PackSettings(format="jpeg")
PIXELS = PackSettings(format="pixels")


def levels(image):
    return image if isinstance(image, np.ndarray) else np.asarray(Image.open(io.BytesIO(image)))


@pytest.mark.parametrize("settings", [JPEG, PIXELS])
def test_splits_labels_order_and_classes_stay(tmp_path, settings):
    data = open_dataset(make_photos(tmp_path / "photos", each=5, classes=("b", "a", "c"), splits=("train", "test")))
    pack(data, tmp_path / "packed", settings)
    packed = open_dataset(tmp_path / "packed")
    assert packed.classes == data.classes
    assert list(packed.splits) == ["train", "test"]
    for split, source in data.splits.items():
        assert packed.splits[split].labels().tolist() == source.labels().tolist()
        for index in range(len(source)):
            difference = levels(packed.splits[split].read(index)).astype(float) - np.asarray(decode(source.read(index)))
            assert np.abs(difference).mean() < 1  # strangers differ by 70


def test_the_shorter_side_becomes_the_side_and_smaller_images_stay(tmp_path):
    data = make_photos(tmp_path / "photos", each=1)
    sizes = {"wide": (300, 200), "high": (200, 500), "small": (90, 40)}
    for name, size in sizes.items():
        (data / "cat" / f"{name}.jpg").write_bytes(encoded(photo(50, size)))
    pack(data, tmp_path / "packed", PackSettings(side=100))
    packed = open_dataset(tmp_path / "packed").train
    found = {packed.key(index).split("-")[-1]: levels(packed.read(index)).shape for index in range(len(packed))}
    assert found["wide.npy"] == (100, 150, 3)
    assert found["high.npy"] == (250, 100, 3)
    assert found["small.npy"] == (40, 90, 3)


def test_a_reduced_image_has_no_jagged_edges(tmp_path):
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    data = make_photos(tmp_path / "photos", each=1)
    (data / "cat" / "stripes.png").write_bytes(encoded(Image.fromarray(stripes), "PNG"))
    pack(data, tmp_path / "packed", PackSettings(side=90))
    packed = open_dataset(tmp_path / "packed").train
    assert np.abs(packed.read(1).astype(float) - 127.5).max() < 20  # without a filter: 0 and 255


def test_images_are_stored_upright_and_gray_ones_gray(tmp_path):
    data = make_photos(tmp_path / "photos", each=1, size=(200, 150))
    exif = Image.Exif()
    exif[0x0112] = 6
    (data / "cat" / "turned.jpg").write_bytes(encoded(photo(50, (200, 150)), exif=exif))
    (data / "cat" / "gray.jpg").write_bytes(encoded(photo(51, (200, 150)).convert("L")))
    for settings in (JPEG, PIXELS):
        pack(data, tmp_path / settings.format, settings)
        packed = open_dataset(tmp_path / settings.format).train
        assert [levels(packed.read(index)).shape for index in range(4)] == [
            (150, 200, 3), (150, 200), (200, 150, 3), (150, 200, 3)
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("settings", [JPEG, PIXELS])
def test_pixel_arrays_stay_exactly_as_they_are(tmp_path, settings):
    pack("digits", tmp_path / "packed", settings)
    packed, data = open_dataset(tmp_path / "packed"), open_dataset("digits")
    assert len(packed.train) == len(data.train)
    for index in range(0, len(data.train), 50):
        assert np.array_equal(levels(packed.train.read(index)), data.train.read(index))


def test_small_images_are_kept_exactly(tmp_path):
    data = make_photos(tmp_path / "photos", each=1, size=(32, 32))
    pack(data, tmp_path / "packed", JPEG)
    for index, name in enumerate(("cat", "dog")):
        before = np.asarray(Image.open(data / name / "000.jpg"))
        assert np.array_equal(levels(open_dataset(tmp_path / "packed").train.read(index)), before)


def test_pixels_are_chosen_while_they_fit_in_memory(tmp_path, monkeypatch):
    data = open_dataset(make_photos(tmp_path / "photos", each=3))
    assert packing.estimate_pixel_bytes(data, 256) == 6 * 96 * 72 * 3
    assert packing.estimate_pixel_bytes(data, 36) == 6 * 48 * 36 * 3
    assert packing.choose_format(data, PackSettings()) == PIXELS
    monkeypatch.setattr(packing, "MAX_PIXEL_BYTES", 6 * 96 * 72 * 3 - 1)
    assert packing.choose_format(data, PackSettings()) == JPEG


def test_what_cannot_be_read_is_left_out_and_listed(tmp_path):
    data = make_photos(tmp_path / "photos", each=4)
    (data / "cat" / "001.jpg").write_bytes(b"")
    (data / "dog" / "zzz.jpg").write_bytes(b"words")
    pack(data, tmp_path / "packed")
    assert open_dataset(tmp_path / "packed").train.labels().tolist() == [0, 0, 0, 1, 1, 1, 1]
    listed = json.loads((tmp_path / "packed" / "pack.json").read_text())["splits"]["train"]["skipped"]
    assert [(item["index"], item["key"]) for item in listed] == [(1, "cat/001.jpg"), (8, "dog/zzz.jpg")]
    assert listed[0]["reason"] == "the file is empty"


def test_a_split_of_nothing_but_broken_files_is_one_line(tmp_path):
    data = make_photos(tmp_path / "photos", each=1)
    for name in ("cat", "dog"):
        (data / name / "000.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="train: none of its 2 images can be read; run `vit doctor` for the reasons"):
        pack(data, tmp_path / "packed")


def test_shards_keep_to_their_size_and_are_described(tmp_path):
    data = make_photos(tmp_path / "photos", each=40, size=(96, 96))
    state = pack(data, tmp_path / "packed", PackSettings(format="pixels", shard_mb=1))
    shards = sorted((tmp_path / "packed" / "train").glob("*.tar"))
    assert [shard.name for shard in shards] == [f"train-{number:06d}.tar" for number in range(3)]
    assert all(900_000 < shard.stat().st_size <= 1_000_000 for shard in shards[:2])
    counts = json.loads((tmp_path / "packed" / "train" / "sizes.json").read_text())
    assert counts == {shard.file: shard.images for shard in state.splits["train"].shards}
    assert sum(counts.values()) == 80
    lines = [json.loads(line) for shard in shards for line in shard.with_suffix(".jsonl").read_text().splitlines()]
    assert lines[79] == {"file": "00000079-039.npy", "label": 1, "index": 79, "key": "dog/039.jpg"}
    assert [line["index"] for line in lines] == list(range(80))


def test_a_packed_data_set_can_be_streamed(tmp_path):
    pytest.importorskip("fsspec")
    data = make_photos(tmp_path / "photos", each=4)
    pack(data, tmp_path / "packed")
    streamed = open_dataset(f"file://{tmp_path}/packed/train").train
    assert [streamed.label(index) for index in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # its own
def test_the_webdataset_library_reads_it(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    data = make_photos(tmp_path / "photos", each=3, size=(200, 150))
    pack(data, tmp_path / "packed", JPEG)
    shard = str(tmp_path / "packed" / "train" / "train-000000.tar")
    samples = list(webdataset.WebDataset(shard, shardshuffle=False).decode("pil").to_tuple("jpg", "cls"))
    assert [label for _, label in samples] == [0, 0, 0, 1, 1, 1]
    assert samples[0][0].size == (200, 150)


def test_members_have_plain_names_and_no_time_or_owner(tmp_path):
    data = make_photos(tmp_path / "photos", each=1)
    (data / "cat" / "my holiday.2024.jpg").write_bytes(encoded(photo(50)))
    pack(data, tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / "train" / "train-000000.tar") as archive:
        members = archive.getmembers()
    assert [member.name for member in members][2:4] == ["00000001-my_holiday_2024.npy", "00000001-my_holiday_2024.cls"]
    assert {(member.mtime, member.uid, member.mode) for member in members} == {(0, 0, 0o644)}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("a/b/Bär 1.jpg", "00000007-B_r_1"),
        ("digits #5", "00000007-digits_5"),
        ("x" * 300 + ".png", "00000007-" + "x" * 40),
        ("..", "00000007"),
        ("\udcff.jpg", "00000007"),
    ],
)
def test_names_of_samples_have_no_dots(key, name):
    assert sample_name(7, key) == name


@pytest.mark.parametrize(
    ("classes", "texts"),
    [(("cat", "dog"), ("0", "1")), (("0", "1"), ("0", "1")), (("1", "2", "10"), ("1", "2", "10"))],
)
def test_labels_are_numbers_unless_names_would_be_mistaken_for_them(classes, texts):
    assert label_texts(classes) == texts


def test_classes_called_1_2_and_10_stay_apart(tmp_path):
    data = open_dataset(make_photos(tmp_path / "photos", each=2, classes=("1", "2", "10")))
    pack(data, tmp_path / "packed")
    packed = open_dataset(tmp_path / "packed")
    assert packed.classes == data.classes
    assert packed.train.labels().tolist() == data.train.labels().tolist()


def test_weights_that_are_lost_are_told(tmp_path):
    data = make_photos(tmp_path / "photos", each=1)
    with open(data / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "weight"), ("cat/000.jpg", "a", 2), ("dog/000.jpg", "b", 1)])
    assert pack(data / "list.csv", tmp_path / "packed").notes == [
        "sample weights are dropped: shards cannot store them"
    ]


def test_what_the_dataset_leaves_out_is_told_when_it_is_packed(tmp_path):
    photos = make_photos(tmp_path / "photos", each=1)
    (photos / "cat" / "gone.jpg").symlink_to("nowhere.jpg")
    (note,) = pack(photos, tmp_path / "packed").notes
    assert "non-regular file (broken link, pipe or device)" in note


def test_a_file_in_place_of_the_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match="file: exists and is not a folder; name another folder"):
        pack("digits", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "text"


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="side=4 is not between 8 and 8192"):
        PackSettings(side=4)
    with pytest.raises(ConfigError, match="format='png' is not one of auto, jpeg, pixels"):
        PackSettings(format="png")


def test_the_command_tells_what_it_did(tmp_path):
    data = make_photos(tmp_path / "photos", each=3, size=(200, 150))
    (data / "cat" / "x.jpg").write_bytes(b"")
    app = typer.Typer()
    app.command()(pack_command)
    arguments = [str(data), str(tmp_path / "packed"), "--side", "100", "--format", "jpeg", "--workers", "0"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == "train: 6 images in 1 shard, 0.0 MB as jpeg\n"
    assert result.stderr == f"skipped 1 unreadable image, listed in {tmp_path}/packed/pack.json\n"

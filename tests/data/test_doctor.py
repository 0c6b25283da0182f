"""What the doctor finds in datasets with one thing wrong at a time."""

import numpy as np
import pytest
from photos import encoded, make_photos, photo
from PIL import Image

from vitruvian.data.doctor import diagnose
from vitruvian.errors import DataError


@pytest.fixture
def data(tmp_path):
    return make_photos(tmp_path / "photos", each=20)


def found(data):
    """Level, count and text of each finding that is not fine, by check."""
    findings = diagnose(data).findings
    return {f.check: (f.level, f.count, f.text) for f in findings if f.level not in ("ok", "unchecked")}


def fine(data):
    return {finding.check: finding.text for finding in diagnose(data).at("ok")}


def test_a_sound_data_set_is_healthy_and_told_so(tmp_path):
    data = make_photos(tmp_path / "photos", each=20, splits=("train", "test"))
    diagnosis = diagnose(data)
    assert diagnosis.healthy
    assert diagnosis.splits == {"train": 40, "test": 40}
    assert {finding.level for finding in diagnosis.findings} == {"ok", "unchecked"}
    assert fine(data) == {
        "readable": "all 80 images can be read",
        "no-leak": "no image is in two of train, test",
        "no-copies": "no duplicates or near duplicates",
        "classes": "2 classes of 20 to 20 images in train, all in every split",
        "kinds": "no transparency, CMYK, 16-bit, animated, EXIF-rotated or blank images",
        "sizes": "no unusual sizes: shorter sides of 72 pixels",
    }


WHOLE_JPEG = encoded(photo(900))
WHOLE_PNG = encoded(photo(900), "PNG")


@pytest.mark.parametrize(
    ("name", "content", "check", "text"),
    [
        ("x.jpg", b"", "empty", "1 file is empty"),
        ("x.jpg", WHOLE_JPEG[: len(WHOLE_JPEG) // 2], "truncated", "1 file is truncated"),
        ("x.png", WHOLE_PNG[: len(WHOLE_PNG) // 2], "truncated", "1 file is truncated"),
        ("x.jpg", b"<html>not found</html>", "not-an-image", "1 file is not an image"),
        ("x.jpg", b"just some words", "not-an-image", "1 file is not an image"),
        ("x.png", WHOLE_PNG[:60] + bytes(40) + WHOLE_PNG[100:], "broken", "1 file cannot be decoded"),
    ],
)
def test_a_file_that_cannot_be_read_hurts(data, name, content, check, text):
    (data / "cat" / name).write_bytes(content)
    assert found(data) == {check: ("problem", 1, text)}


def test_the_reason_and_the_file_are_told(data):
    (data / "cat" / "x.jpg").write_bytes(b"")
    (example,) = diagnose(data).at("problem")[0].examples
    assert (example.note, example.images[0].key, example.images[0].label) == (
        "the file is empty",
        "cat/x.jpg",
        "cat",
    )


def test_what_is_left_out_and_empty_class_folders_are_told(data):
    (data / "cat" / "notes.txt").write_text("hello")
    (data / "bird").mkdir()
    level, _, text = found(data)["skipped"]
    assert (level, "non-image file" in text) == ("warning", True)
    level, _, text = found(data)["empty-class"]
    assert (level, "bird" in text) == ("problem", True)


def turned(image):
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(image, exif=exif)


def ending_gray(image):
    pixels = np.asarray(image).copy()
    pixels[-24:] = 128
    return encoded(Image.fromarray(pixels))


def deep(image):
    return encoded(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257), "PNG")


def animated(image):
    return encoded(image, "GIF", save_all=True, append_images=[photo(901)])


def transparent(image):
    layer = image.convert("RGBA")
    layer.paste((0, 0, 0, 0), (0, 0, 30, 30))
    return encoded(layer, "PNG")


@pytest.mark.parametrize(
    ("check", "make", "text"),
    [
        ("cmyk", lambda image: encoded(image.convert("CMYK")), "1 image is CMYK (print colors)"),
        ("deep", deep, "1 image has more than 8 bits per channel"),
        ("alpha", transparent, "1 image has transparent parts"),
        ("turned", turned, "1 image is rotated by EXIF"),
        ("animated", animated, "1 image has several frames"),
        ("damaged", ending_gray, "1 image ends in uniform gray, as if data were missing"),
        ("gray", lambda image: encoded(image.convert("L")), "1 image is gray among colored ones"),
        ("blank", lambda _: encoded(Image.new("RGB", (90, 90), "red")), "1 image has a single color"),
        (
            "tiny",
            lambda image: encoded(image.resize((30, 24))),
            "1 image is tiny: under 32 pixels (median 72)",
        ),
        ("long", lambda image: encoded(image.resize((400, 90))), "1 image has an aspect ratio of 4 or more"),
    ],
)
def test_an_odd_image_is_worth_a_look(data, check, make, text):
    (data / "cat" / "odd.png").write_bytes(make(photo(900)))
    assert found(data)[check] == ("warning", 1, text)
    assert diagnose(data).healthy


def test_the_size_of_a_turned_image_is_that_of_the_upright_one(data):
    (data / "cat" / "odd.jpg").write_bytes(turned(photo(900, (96, 72))))
    (finding,) = diagnose(data).at("warning")
    assert finding.examples[0].note == "72x96 pixels"


def test_gray_images_among_gray_ones_are_not_odd(tmp_path):
    for number in range(40):
        path = tmp_path / "photos" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(number).convert("L"), "PNG"))
    assert found(tmp_path / "photos") == {}


@pytest.mark.parametrize(
    ("cats", "dogs", "wanted"),
    [
        (4, 20, {"tiny-class": ("problem", 1, "1 class has fewer than 5 images in train")}),
        (5, 20, {"small-class": ("warning", 1, "1 class has fewer than 20 images in train")}),
        (20, 199, {}),
    ],
)
def test_small_classes_are_told_by_the_stated_limits(tmp_path, cats, dogs, wanted):
    make_photos(tmp_path / "a", classes=("dog",), each=dogs)
    make_photos(tmp_path / "b", classes=("cat",), each=cats, size=(90, 70))
    (tmp_path / "b" / "cat").rename(tmp_path / "a" / "cat")
    assert {check: what for check, what in found(tmp_path / "a").items() if "class" in check} == wanted


@pytest.mark.parametrize(("dogs", "level"), [(9, None), (10, "warning"), (99, "warning"), (100, "problem")])
def test_unbalanced_classes_are_told_by_the_stated_limits(tmp_path, dogs, level):
    make_photos(tmp_path / "photos", classes=("dog",), each=dogs, size=(16, 16))
    make_photos(tmp_path / "more", classes=("cat",), each=1, size=(18, 16))
    (tmp_path / "more" / "cat").rename(tmp_path / "photos" / "cat")
    assert found(tmp_path / "photos").get("unbalanced", (None,))[0] == level


def test_classes_of_one_split_only_are_told(tmp_path):
    data = make_photos(tmp_path / "photos", each=20, splits=("train", "test"), classes=("ant", "bee", "cat"))
    for path in (data / "train" / "ant", data / "test" / "bee"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    classes = found(data)
    assert classes["unlearned-class"] == ("problem", 1, "1 class is in test but not in train")
    assert classes["empty-class"] == ("problem", 1, "1 class has no image in train")
    assert classes["unmeasured-class"] == ("warning", 1, "1 class is in train but not in test")


def test_data_without_any_readable_image_is_told(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "x.jpg").write_bytes(b"")
    assert found(tmp_path / "photos")["nothing"] == ("problem", 0, "no image can be read")


def test_one_class_and_no_labels_are_one_line(tmp_path):
    make_photos(tmp_path / "one", classes=("cat",), each=2)
    with pytest.raises(DataError, match="one class"):
        diagnose(tmp_path / "one")
    with pytest.raises(DataError, match="without labels"):
        diagnose(tmp_path / "one" / "cat")


@pytest.mark.slow
def test_more_workers_find_the_same(tmp_path):
    data = make_photos(tmp_path / "photos", each=40)
    (data / "cat" / "x.jpg").write_bytes(b"")
    (data / "dog" / "y.jpg").write_bytes((data / "cat" / "003.jpg").read_bytes())
    alone, together = (diagnose(data, workers=workers).to_json() | {"seconds": 0} for workers in (0, 2))
    assert alone == together

"""Images of one dataset that are also in others."""

import csv
import io
import json

import pytest
from photos import encoded, make_photos, photo
from PIL import Image, ImageEnhance, ImageOps
from typer.testing import CliRunner

from vitruvian.cli.app import app
from vitruvian.data.doctor.overlap import find_overlap, write_clean
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError, FileError

CHANGES = {
    "same.jpg": (lambda content: content, "exact copy"),
    "same.png": (lambda content: encoded(Image.open(io.BytesIO(content)), "PNG"), "exact copy"),
    "again.jpg": (lambda content: encoded(Image.open(io.BytesIO(content)), quality=40), "near duplicate"),
    "half.jpg": (lambda content: encoded(Image.open(io.BytesIO(content)).resize((48, 36))), "near duplicate"),
    "twice.png": (lambda content: encoded(Image.open(io.BytesIO(content)).resize((192, 144)), "PNG"), "near duplicate"),
    "dark.jpg": (
        lambda content: encoded(ImageEnhance.Brightness(Image.open(io.BytesIO(content))).enhance(0.9)),
        "near duplicate",
    ),
    "mirrored.jpg": (lambda content: encoded(ImageOps.mirror(Image.open(io.BytesIO(content)))), "mirror image"),
    "mirrored_half.jpg": (
        lambda content: encoded(ImageOps.mirror(Image.open(io.BytesIO(content)).resize((48, 36))), quality=60),
        "mirror image",
    ),
}


@pytest.fixture
def folders(tmp_path):
    """`large` with changed copies of the test images of `pets`, one of its training images, and one of `birds`."""
    large = make_photos(tmp_path / "large", each=10)
    pets = tmp_path / "pets"
    for number in range(20):
        path = pets / ("test" if number < 12 else "train") / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(1000 + number)))
    birds = tmp_path / "birds"
    birds.mkdir()
    for number in range(4):
        (birds / f"{number}.jpg").write_bytes(encoded(photo(2000 + number)))
    for number, (name, (change, _)) in enumerate(CHANGES.items()):
        (large / "dog" / name).write_bytes(
            change((pets / "test" / ("cat", "dog")[number % 2] / f"{number}.jpg").read_bytes())
        )
    (large / "dog" / "trained.jpg").write_bytes((pets / "train" / "dog" / "15.jpg").read_bytes())
    (large / "cat" / "bird.jpg").write_bytes((birds / "2.jpg").read_bytes())
    return large, pets, birds


def test_changed_copies_of_test_images_are_found_and_nothing_else(folders):
    large, pets, birds = folders
    overlap = find_overlap(large, [pets, birds])
    found = {match.image.key: (match.against, match.copy.key, match.note) for match in overlap.matches}
    expected = {
        f"dog/{name}": (str(pets), f"test/{('cat', 'dog')[number % 2]}/{number}.jpg", note)
        for number, (name, (_, note)) in enumerate(CHANGES.items())
    }
    assert found == expected | {"cat/bird.jpg": (str(birds), "2.jpg", "exact copy")}
    assert overlap.against == {str(pets): 12, str(birds): 4}
    assert (overlap.images, overlap.unreadable) == (30, 0)


def test_the_clean_manifest_has_all_other_images_and_can_be_opened(folders, tmp_path):
    large, pets, birds = folders
    overlap = find_overlap(large, [pets, birds])
    assert write_clean(large, overlap, tmp_path / "clean.csv") == 21
    rows = list(csv.DictReader((tmp_path / "clean.csv").read_text().splitlines()))
    removed = {f"large/{match.image.key}" for match in overlap.matches}
    every = {f"large/{path.relative_to(large)}" for path in large.rglob("*.*")}
    assert {row["path"] for row in rows} == every - removed
    assert find_overlap(tmp_path / "clean.csv", [pets, birds]).matches == ()
    assert len(open_dataset(tmp_path / "clean.csv").train) == 21


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments), "--workers", "0"])


def test_the_command_reports_matches_and_writes_the_manifest(folders, tmp_path):
    large, pets, birds = folders
    result = run(large, "--against", pets, birds)
    assert result.exit_code == 1
    assert "30 images, 9 also in other datasets" in result.stdout
    assert f"{pets}: 8, compared with 12 images (exact copy 2, near duplicate 4, mirror image 2)" in result.stdout
    result = run(large, "--against", pets, "--against", birds, "--out", tmp_path / "clean.csv")
    assert result.exit_code == 0
    assert "wrote" in result.stderr
    assert "21 images; 9 images left out" in result.stderr
    result = run(tmp_path / "clean.csv", "--against", pets, "--json")
    assert (result.exit_code, json.loads(result.stdout)["matches"]) == (0, [])


def test_wrong_calls_are_refused(folders, tmp_path):
    large, pets, _ = folders
    with pytest.raises(DataError, match="no dataset to compare with"):
        find_overlap(large, [])
    with pytest.raises(FileError, match="inside the data"):
        write_clean(large, find_overlap(large, [pets]), large / "clean.csv")
    assert run(large, pets).exit_code == 2
    assert run(large, "--against", pets, "--review", tmp_path / "x.html").exit_code == 2

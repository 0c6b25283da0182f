"""What the doctor says about several labels per image and about numbers."""

import csv

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitruvian.cli.app import app
from vitruvian.data.doctor import diagnose


@pytest.fixture
def listed(tmp_path):
    """60 images of red or blue light; labels red, light (implied by red), some wrong; numbers with a typing error."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(60):
        is_red = index % 2 == 0
        color = np.array([200, 30, 30] if is_red else [30, 30, 200]) + generator.integers(-20, 20, (16, 16, 3))
        Image.fromarray(color.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{index}.png")
        red = int(is_red) if index != 10 else 0  # a wrong label
        value = (10 if is_red else 20) + generator.random()
        rows.append(
            (f"{index}.png", red, "" if index == 5 else int(red or index % 3 == 0), 1000 if index == 7 else value)
        )
    with open(tmp_path / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "red", "light", "size"), *rows])
    return tmp_path / "list.csv"


def findings(data, target):
    return {finding.check: finding for finding in diagnose(data, target=target).findings}


def test_unknown_implied_and_doubtful_labels_are_found(listed):
    found = findings(listed, "multi:red,light")
    assert found["unknown"].text == "unknown for some images: light (2%)"
    assert "red never without light" in found["implied"].text
    assert found["label"].text == "1 label is doubtful: red"
    assert found["label"].examples[0].images[0].key == "10.png"
    assert "10 of 10 nearest images" in found["label"].examples[0].note
    assert found["no-label"].level == "warning"


def test_images_without_features_are_not_compared(listed):
    vectors = np.tile(np.eye(2, 8, dtype=np.float32), (30, 1))  # red and blue images
    vectors[20:] = np.nan
    vectors[40:, 0] = 0  # not finite in some of its values only
    with np.errstate(all="raise"):
        diagnosis = diagnose(listed, target="multi:red,light", vectors=vectors)
    doubtful = next(finding for finding in diagnosis.findings if finding.check == "label")
    assert [example.images[0].key for example in doubtful.examples] == ["10.png"]


def test_columns_of_numbers_are_found_without_a_target(listed):
    rows = [line.rsplit(",", 1) for line in listed.read_text().splitlines()]
    (listed.parent / "sizes.csv").write_text("\n".join(f"{row[0].split(',')[0]},{row[1]}" for row in rows))
    diagnosis = diagnose(listed.parent / "sizes.csv")
    assert "far" in {finding.check for finding in diagnosis.findings}
    assert any("no column 'label': the targets are the numbers in size" in f.text for f in diagnosis.findings)


@pytest.mark.parametrize("target", ["multi:red,light", "number:size"])
def test_drop_writes_a_manifest_of_labels_or_numbers_without_duplicates(listed, target, monkeypatch):
    folder = listed.parent
    with open(listed, "a", newline="") as file:
        csv.writer(file).writerow(("copy.png", 1, 1, 10))
        csv.writer(file).writerow(("copy.png", 1, 1, 10))
    Image.new("RGB", (16, 16), (0, 200, 0)).save(folder / "copy.png")
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(
        app, ["doctor", "list.csv", "--target", target, "--drop", "duplicates", "--out", "c.csv"]
    )
    assert result.exit_code == 0, result.output
    before, after = listed.read_text().splitlines(), (folder / "c.csv").read_text().splitlines()
    assert after[0] == before[0]
    assert [line for line in after if "copy" in line] == ["copy.png,1,1,10"]


def test_far_and_doubtful_numbers_are_found(listed):
    found = findings(listed, "number:size")
    assert found["far"].examples[0].images[0].key == "7.png"
    assert found["number"].count >= 1
    assert found["number"].examples[0].images[0].key == "7.png"

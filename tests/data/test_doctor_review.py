"""The page of doubtful labels in a real browser, and the manifest with its corrections."""

from __future__ import annotations

import csv
import json
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from vitruvian.cli.app import main
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.corrections import apply_corrections
from vitruvian.data.doctor.doctor_report import review_page, suspicious_labels
from vitruvian.data.doctor.overlap import find_overlap, write_clean
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError, FileError

STRANGE = "b </script><b>&"
"""A class whose name would end the page's data early."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of dark and bright noise, 14 images each; the first of `a` is bright, so looks like one of `b`."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    rng = np.random.default_rng(0)
    for label, level in (("a", 0), (STRANGE, 1)):
        (folder / label.replace("/", "-")).mkdir(parents=True)
        for number in range(14):
            stripes = np.indices((40, 40))[level if number or level else 1] // 5 % 2 * 150
            pixels = (stripes[..., None] + rng.integers(0, 90, (40, 40, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label.replace("/", "-") / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def diagnosis(photos):
    return diagnose(photos)


def corrections(folder, *entries):
    path = folder / "corrections.json"
    content = [dict(zip(("split", "index", "key", "was", "label"), entry)) for entry in entries]
    path.write_text(json.dumps({"format": 1, "data": "photos", "corrections": content}))
    return path


def tree(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_doubtful_label_is_on_the_page_and_the_others_are_not(photos, diagnosis):
    (found,) = suspicious_labels(diagnosis)
    assert found[0].key == "a/00.png"
    assert found[1][0].label.startswith("b ")
    page = review_page(diagnosis, open_dataset(photos))
    assert page.count('<article id="item') == 1
    assert page.count("</script>") == 2  # the data and the script; no name ends them early


def test_of_two_labels_of_one_image_that_which_its_neighbors_contradict_is_doubted(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    other = next(path.name for path in folder.iterdir() if path.name != "a")
    shutil.copy(folder / "a" / "03.png", folder / other / "99.png")
    keys = [image.key for image, _, _ in suspicious_labels(diagnose(folder))]
    assert keys == [f"{other}/99.png", "a/00.png"]


def test_corrections_become_a_manifest_and_the_data_stay_as_they_are(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    before = tree(folder)
    strange = open_dataset(folder).classes[1]
    path = corrections(
        tmp_path,
        ("train", 0, "a/00.png", "a", strange),
        ("train", 1, "a/01.png", "a", "a"),
        ("train", 2, "a/02.png", "a", None),
    )
    done = apply_corrections(folder, path, tmp_path / "corrected.csv")
    assert (done.images, done.changed, done.confirmed, done.excluded) == (27, 1, 1, 1)
    new = open_dataset(tmp_path / "corrected.csv").train
    labels = {new.key(i): new.classes[new.label(i)] for i in range(len(new))}
    assert labels["photos/a/00.png"] == strange
    assert labels["photos/a/01.png"] == "a"
    assert "photos/a/02.png" not in labels
    assert tree(folder) == before
    again = corrections(tmp_path, ("train", 3, new.key(3), "a", strange))  # and of a manifest
    apply_corrections(tmp_path / "corrected.csv", again, tmp_path / "twice.csv")
    assert len(open_dataset(tmp_path / "twice.csv").train) == 27


@pytest.mark.parametrize("extension", [".csv", ".jsonl"])
def test_the_other_columns_of_a_manifest_are_kept(photos, tmp_path, extension):
    folder = shutil.copytree(photos, tmp_path / "photos")
    rows = [
        {"file_name": f"photos/a/{i:02}.png", "label": "xy"[i % 2], "group": f"g{i // 2}", "age": 30 + i / 2,
         "note": "one, two", "split": "val" if i == 1 else "train", "weight": 2}
        for i in range(8)
    ]  # fmt: skip
    lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    manifest = tmp_path / f"mine{extension}"
    manifest.write_text("\n".join(lines if extension == ".csv" else map(json.dumps, rows)))
    path = corrections(tmp_path, ("train", 1, "photos/a/02.png", "x", "y"), ("train", 2, "photos/a/03.png", "y", None))
    out = folder.parent / "clean.csv"
    assert apply_corrections(manifest, path, out).images == 7
    with open(out, newline="") as file:
        written = list(csv.DictReader(file))
    expected = [{"path": row["file_name"], **{k: str(v) for k, v in row.items() if k != "file_name"}} for row in rows]
    assert written == [{**row, "label": "y"} if i == 2 else row for i, row in enumerate(expected) if i != 3]


@pytest.mark.parametrize(
    ("rows", "header"),
    [
        ([{"label": ["red", "round"]}, {"label": []}, {"label": ["round", "red"]}], "path,labels"),
        ([{"red": 1, "round": 0}, {"red": 0, "round": 1}, {"red": None, "round": 1}], "path,red,round"),
    ],
)
def test_images_with_several_labels_keep_them_without_those_of_a_test_set(photos, rows, header):
    manifest, out = photos.parent / "tags.jsonl", photos.parent / "clean.csv"
    keys = [f"photos/a/{number:02}.png" for number in range(1, 4)]
    manifest.write_text("\n".join(json.dumps({"path": key, **row}) for key, row in zip(keys, rows)))
    (photos.parent / "test").mkdir(exist_ok=True)
    shutil.copy(photos / "a" / "01.png", photos.parent / "test")
    assert write_clean(manifest, find_overlap(manifest, [photos.parent / "test"]), out) == 2
    assert out.read_text().splitlines()[0] == header
    before, after = (open_dataset(path, accepts=["multi"]).train for path in (manifest, out))
    assert after.classes == before.classes
    assert [after.label_text(i) for i in range(2)] == [before.label_text(i) for i in (1, 2)]
    assert np.array_equal(*(s.targets.rows(s.labels()[n:]) for s, n in ((before, 1), (after, 0))), equal_nan=True)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (("train", 0, "a/01.png", "a", "a"), r"image 0 of train is a/00\.png labeled a; the data has changed"),
        (("train", 0, "a/00.png", "b", "a"), "a/00.png labeled b, but image 0"),
        (("train", 0, "a/00.png", "a", "zebra"), "no class 'zebra'"),
        (("train", 999, "a/00.png", "a", "a"), "correction 1 is not about an image"),
        (("test", 0, "a/00.png", "a", "a"), "correction 1 is not about an image"),
        (("train", 0, "a/00.png", "a"), "correction 1 is not about an image"),
    ],
)
def test_corrections_of_other_data_are_refused(photos, tmp_path, entry, text):
    with pytest.raises(DataError, match=text):
        apply_corrections(photos, corrections(tmp_path, entry), photos.parent / "corrected.csv")
    assert not (photos.parent / "corrected.csv").exists()


def test_a_manifest_that_would_change_the_data_or_reach_no_image_is_refused(photos, tmp_path):
    path = corrections(tmp_path)
    with pytest.raises(FileError, match="inside the data"):
        apply_corrections(photos, path, photos / "corrected.csv")
    with pytest.raises(FileError, match="not the name of a manifest"):
        apply_corrections(photos, path, photos.parent / "corrected.txt")
    with pytest.raises(FileError, match="is not below it; write the manifest to a folder above, such as"):
        apply_corrections(photos, path, tmp_path / "corrected.csv")
    manifest = photos.parent / "own.csv"
    manifest.write_text("path,label\nphotos/a/00.png,x\nphotos/a/01.png,y\n")
    with pytest.raises(FileError, match="this is the data itself"):
        apply_corrections(manifest, path, manifest)
    with pytest.raises(DataError, match="the images are not files"):
        apply_corrections("digits", path, photos.parent / "digits.csv")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(DataError, match="not an object"):
        apply_corrections(photos, tmp_path / "bad.json", photos.parent / "x.csv")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="not the corrections of a page"):
        apply_corrections(photos, tmp_path / "bad.json", photos.parent / "x.csv")


@pytest.fixture
def vit(monkeypatch):
    def vit(*words):
        monkeypatch.setattr("sys.argv", ["vit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0

    return vit


@pytest.fixture
def reviewed(browser, visit, vit, photos, tmp_path, monkeypatch):
    """The folder with two images of `a` again in the other class, undecided, and their review page in the browser."""
    monkeypatch.setattr("vitruvian.data.doctor.checks.decide_twins", lambda *_: {})
    folder = shutil.copytree(photos, tmp_path / "photos")
    other = next(path.name for path in folder.iterdir() if path.name != "a")
    for number in range(2):
        shutil.copy(folder / "a" / f"0{number + 3}.png", folder / other / f"9{number}.png")
    assert vit("doctor", folder, "--review", tmp_path / "review.html", "--workers", 0) == 1  # a conflict hurts
    visit((tmp_path / "review.html").as_uri(), width=1100)
    return folder


@pytest.fixture
def press(browser):
    from selenium.webdriver.common.action_chains import ActionChains

    return lambda *keys: ActionChains(browser).send_keys(*keys).perform()


@pytest.fixture
def decided(browser, press):
    """Downloads the corrections: the label of each decided image, by its position on the page."""

    def decided():
        path = browser.downloads / "corrections.json"
        path.unlink(missing_ok=True)
        press("d")
        for _ in range(100):
            if path.exists() and path.stat().st_size:
                break
            time.sleep(0.1)
        return json.loads(path.read_text())["corrections"]

    return decided


def focus(browser, name):
    browser.execute_script("document.getElementById(arguments[0]).focus()", name)


@pytest.mark.slow
def test_labels_are_decided_with_the_keyboard_and_applied(browser, reviewed, press, decided, vit, tmp_path, capsys):
    from selenium.webdriver.common.keys import Keys

    before = tree(reviewed)
    place = browser.find_element("id", "place")
    assert place.text == "1 of 5"
    press("s", "x", Keys.ENTER, "c", "a", Keys.ENTER)
    assert place.text == "5 of 5"
    press("u")
    press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    first, second, third, fourth = decided()
    assert browser.get_log("browser") == []
    assert first["label"] != first["was"]
    assert second["label"] is None
    assert third["label"] == third["was"]
    assert fourth["label"] == "a" != fourth["was"]
    made = browser.downloads / "corrections.json"
    assert vit("doctor", reviewed, "--apply", made, "--out", tmp_path / "corrected.csv") == 0
    assert "2 labels changed, 1 confirmed, 1 image excluded" in capsys.readouterr().out
    new = open_dataset(tmp_path / "corrected.csv").train
    assert len(new) == 29
    assert tree(reviewed) == before


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ENTER", "SPACE"])
def test_a_focused_button_is_pressed_by_its_keys(browser, reviewed, press, decided, key):
    from selenium.webdriver.common.keys import Keys

    for button in ("drop", "keep", "next", "take"):
        focus(browser, button)
        press(getattr(Keys, key))
        assert browser.switch_to.active_element.get_attribute("id") == button
    excluded, kept, accepted = decided()
    assert excluded["label"] is None
    assert kept["label"] == kept["was"]
    assert accepted["label"] != accepted["was"]


@pytest.mark.slow
def test_moving_through_the_classes_decides_nothing(browser, reviewed, press, decided):
    from selenium.webdriver.common.keys import Keys

    place = browser.find_element("id", "place")
    press("c", Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_DOWN)
    assert place.text == "1 of 5"
    press(Keys.ESCAPE, Keys.ARROW_RIGHT)
    assert place.text == "2 of 5"
    assert decided() == []
    press(Keys.ARROW_LEFT, "c", Keys.ARROW_DOWN, Keys.ENTER, Keys.ARROW_RIGHT)  # the item after the next one
    browser.execute_script("document.getElementById('other').value = 'a'")
    browser.find_element("id", "assign").click()
    one, two = decided()
    assert one["was"] == "a" != one["label"]
    assert two["label"] == "a"


@pytest.mark.slow
def test_accepting_the_suggestions_for_two_copies_gives_them_one_label(browser, reviewed, press, decided):
    from selenium.webdriver.common.keys import Keys

    press("s")
    assert "its copy now has this label, too" in browser.find_element("id", "item1").text
    press("s", Keys.ARROW_LEFT, "u")  # and again without the second decision
    first = decided()[0]
    assert first["label"] != first["was"]
    press("s", "s", "s")
    copies = decided()[:4]
    for one, two in (copies[:2], copies[2:]):
        assert one["was"] != two["was"]
        assert one["label"] == two["label"] == two["was"]
    press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, "x")
    assert "its copy is excluded" in browser.find_element("id", "item1").text

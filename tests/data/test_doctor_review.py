"""The page of doubtful labels in a real browser, and the manifest with its corrections."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from vitruvian.cli.app import main
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.corrections import apply_corrections
from vitruvian.data.doctor.doctor_report import review_page, suspicious_labels
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError, FileError

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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


def test_two_labels_of_one_image_are_both_doubted(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    other = next(path.name for path in folder.iterdir() if path.name != "a")
    shutil.copy(folder / "a" / "03.png", folder / other / "99.png")
    keys = [image.key for image, _, _ in suspicious_labels(diagnose(folder))]
    assert set(keys[:2]) == {"a/03.png", f"{other}/99.png"}
    assert len(keys) == len(set(keys))


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


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium and chromedriver are not here")
def test_labels_are_decided_with_the_keyboard_and_applied(photos, tmp_path, monkeypatch, capsys):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    folder = shutil.copytree(photos, tmp_path / "photos")
    other = next(path.name for path in folder.iterdir() if path.name != "a")
    for number in range(2):
        shutil.copy(folder / "a" / f"0{number + 3}.png", folder / other / f"9{number}.png")
    before = tree(folder)

    def vit(*words):
        monkeypatch.setattr("sys.argv", ["vit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0

    assert vit("doctor", folder, "--review", tmp_path / "review.html", "--workers", 0) == 1  # a conflict hurts
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1100,900",
    ):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(tmp_path)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        browser.get((tmp_path / "review.html").as_uri())

        def press(*keys):
            ActionChains(browser).send_keys(*keys).perform()

        place = browser.find_element("id", "place")
        assert place.text == "1 of 5"
        press("s", "x", Keys.ENTER, "c", "a", Keys.ENTER)
        for _ in range(50):  # the list of classes reports its change in its own time
            if place.text.startswith("5 of 5"):
                break
            time.sleep(0.1)
        press("u")
        press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
        shot = os.environ.get("VITRUVIAN_SCREENSHOT")
        if shot:
            browser.save_screenshot(shot)
        press("d")
        made = tmp_path / "corrections.json"
        for _ in range(100):
            if made.exists() and made.stat().st_size:
                break
            time.sleep(0.1)
        assert browser.get_log("browser") == []
    finally:
        browser.quit()
    decided = json.loads(made.read_text())["corrections"]
    first, second, third, fourth = decided
    assert first["label"] != first["was"]
    assert second["label"] is None
    assert third["label"] == third["was"]
    assert fourth["label"] == "a" != fourth["was"]
    assert vit("doctor", folder, "--apply", made, "--out", tmp_path / "corrected.csv") == 0
    assert "2 labels changed, 1 confirmed, 1 image excluded" in capsys.readouterr().out
    new = open_dataset(tmp_path / "corrected.csv").train
    assert len(new) == 29
    assert tree(folder) == before

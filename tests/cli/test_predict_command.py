"""`vit predict`."""

from __future__ import annotations

import csv
import io
import json
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
from PIL import Image

from vitruvian.cli.predict import folder_name


def test_json_is_one_object_a_image_with_exactly_these_keys(vit, weights, photos):
    code, out, err = vit("predict", photos, "--model", weights, "--top", 2, "--json")
    assert (code, err) == (0, "")
    first, second = map(json.loads, out.splitlines())
    assert (first["path"], second["path"]) == (str(photos / "a.png"), str(photos / "b.jpg"))
    assert list(first) == ["path", "predictions"]
    assert [list(answer) for answer in first["predictions"]] == [["label", "index", "probability"]] * 2
    best = first["predictions"][0]
    assert ("dark", "gray", "light")[best["index"]] == best["label"]
    assert 1 / 3 <= best["probability"] <= 1


def test_people_get_aligned_labels_and_percentages_without_color_codes(vit, weights, photos):
    code, out, _ = vit("predict", photos / "a.png", "--model", weights)
    assert code == 0
    path, *rows = out.splitlines()
    assert path == str(photos / "a.png")
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1
    assert all(row.endswith("%") for row in rows)
    assert "\x1b" not in out


def test_bad_images_are_reported_and_the_others_answered(vit, weights, photos):
    (photos / "empty.jpg").touch()
    (photos / "text.png").write_text("hello")
    shutil.copy(photos / "b.jpg", photos / "z.jpg")
    code, out, err = vit("predict", photos, photos / "gone.jpg", "--model", weights)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("/")] == [
        str(photos / name) for name in ("a.png", "b.jpg", "z.jpg")
    ]
    lines = err.splitlines()
    assert lines[0] == f"error: {photos / 'empty.jpg'}: the file is empty"
    assert lines[1].startswith(f"error: {photos / 'text.png'}: not an image")
    assert lines[2] == f"error: {photos / 'gone.jpg'}: no such file"
    assert lines[3:] == ["3 of 6 images could not be read"]


def test_json_has_errors_in_their_place(vit, weights, photos):
    (photos / "aa.jpg").touch()
    code, out, _ = vit("predict", photos, "--model", weights, "--json", "--batch-size", 1)
    assert code == 1
    _, error, last = map(json.loads, out.splitlines())
    assert error == {"path": str(photos / "aa.jpg"), "error": f"{photos / 'aa.jpg'}: the file is empty"}
    assert "predictions" in last


def test_pillows_own_remarks_on_odd_files_stay_off_the_terminal(tmp_path):
    path = tmp_path / "odd.tif"
    Image.new("RGB", (20, 20)).save(path)
    samples = struct.pack("<HHI", 277, 3, 1)  # the tag SamplesPerPixel, one short integer
    path.write_bytes(path.read_bytes().replace(samples + b"\x03\0", samples + b"\xff\0"))
    code = """if True:
        import sys
        from vitruvian.cli.options import import_torch
        from vitruvian.data.decode import decode
        import_torch()
        try:
            decode(sys.argv[1])
        except Exception as error:
            print(error)
        """
    ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.startswith(f"{path}: broken TIFF image: ")
    assert ran.stderr == ""


@pytest.mark.parametrize("name", ["with space.png", "ünï↯.png", "two\nlines.png", "\udcff.png", "--top.png"])
def test_odd_file_names_are_shown_in_one_line_and_told_exactly(vit, weights, photos, name, monkeypatch):
    shutil.copy(photos / "a.png", photos / name)
    monkeypatch.chdir(photos)
    code, out, _ = vit("predict", "--model", weights, "--json", "--", name)
    assert code == 0
    assert json.loads(out)["path"] == name
    code, out, _ = vit("predict", "--model", weights, "--", name)
    assert code == 0
    assert len(out.splitlines()) == 4


def test_a_terminal_that_knows_only_ascii_gets_escapes(vit, weights, photos, monkeypatch):
    shutil.copy(photos / "a.png", photos / "ü.png")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert vit("predict", photos / "ü.png", "--model", weights).code == 0
    assert b"\\xfc.png\n" in terminal.buffer.getvalue()


def test_another_image_size_can_be_asked_for(vit, weights, photos):
    assert vit("predict", photos, "--model", weights, "--image-size", "24x16").code == 0
    code, _, err = vit("predict", photos, "--model", weights, "--image-size", "20")
    assert code == 1
    assert "image of 20x20 pixels is not divisible by the patch of 8" in err


def test_an_unknown_model_is_answered_with_near_ones(vit, photos):
    code, out, err = vit("predict", photos, "--model", "vit_bse_patch16_224")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "vit_base_patch16_224" in err


@pytest.mark.slow
def test_imagenet_images_are_named_as_well_as_published(vit, shared):
    folders = sorted((shared / "data" / "imagenet-val-1000").iterdir())[::20]
    weights = shared / "weights" / "vit_ti16_imagenet1k.safetensors"
    code, out, _ = vit("predict", *folders, "--model", weights, "--json", "--top", 1)
    assert code == 0
    predictions = [json.loads(line) for line in out.splitlines()]
    right = sum(int(p["path"].split("/")[-2]) == p["predictions"][0]["index"] for p in predictions)
    assert len(predictions) == 50
    assert abs(right - 43) <= 1  # 753 of all 1000; another CPU may sum near ties the other way


def test_the_extension_of_out_decides_the_format(vit, weights, photos, tmp_path):
    (photos / "aa.jpg").touch()
    for name in ("all.csv", "all.jsonl", "all.parquet"):
        code, out, err = vit("predict", photos, "--model", weights, "--top", 2, "--out", tmp_path / name)
        assert (code, out) == (1, f"wrote predictions for 3 images to {tmp_path / name}\n")
        assert err.splitlines() == [f"error: {photos / 'aa.jpg'}: the file is empty", "1 of 3 images could not be read"]
    first, broken, last = csv.DictReader((tmp_path / "all.csv").read_text().splitlines())
    assert list(first) == ["path", "rejected", "label_1", "probability_1", "label_2", "probability_2", "error"]
    assert (first["path"], first["error"], first["rejected"]) == (str(photos / "a.png"), "", "False")
    assert (broken["label_1"], broken["error"]) == ("", f"{photos / 'aa.jpg'}: the file is empty")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == [str(photos / name) for name in ("a.png", "aa.jpg", "b.jpg")]
    assert rows[2]["predictions"][0]["label"] == last["label_1"]
    assert pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "all.parquet").to_pylist() == rows


def test_images_are_sorted_into_a_folder_per_class(vit, weights, photos, tmp_path):
    (photos / "other").mkdir()
    shutil.copy(photos / "a.png", photos / "other" / "a.png")
    code, out, _ = vit("predict", photos, "--model", weights, "--sort-into", tmp_path / "sorted", "--json")
    assert code == 0
    assert out.splitlines()[-1] == f"copied 3 images into class folders in {tmp_path / 'sorted'}"
    labels = {row["path"]: row["predictions"][0]["label"] for row in map(json.loads, out.splitlines()[:-1])}
    copies = sorted(str(path.relative_to(tmp_path / "sorted")) for path in (tmp_path / "sorted").rglob("*.*"))
    label, other = labels[str(photos / "a.png")], labels[str(photos / "b.jpg")]
    assert copies == sorted([f"{label}/a.png", f"{label}/a-2.png", f"{other}/b.jpg"])
    again = vit("predict", photos, "--model", weights, "--sort-into", tmp_path / "sorted")
    assert (again.code, "exists and is not empty" in again.err) == (2, True)


def test_a_label_cannot_leave_the_folder_that_images_are_sorted_into():
    assert [folder_name(label) for label in ("../up", "a/b", "..", "", "red fox")] == [
        "_up",
        "a_b",
        "_",
        "_",
        "red fox",
    ]


def test_parts_are_merged_into_a_table_by_its_extension(vit, weights, photos, tmp_path):
    job = ("predict", photos, "--model", weights, "--out", tmp_path / "parts")
    for name in ("all.csv", "all.jsonl"):
        code, out, _ = vit(*job, "--merge", tmp_path / name)
        assert code == 0
        assert f"and {tmp_path / name}: 2 images in 1 part, each once; 0 with an error" in out
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert [row["key"] for row in rows] == ["a.png", "b.jpg"]
    same = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["predictions"][0]["label"] for row in same] == [row["label_1"] for row in rows]
    code, _, err = vit(*job, "--merge", "all.xlsx")
    assert (code, "'all.xlsx' is not a .csv, .jsonl or .parquet file" in err) == (2, True)
    code, _, err = vit("predict", photos, "--model", weights, "--merge", "all.csv")
    assert (code, "--merge need a folder as --out" in err) == (2, True)
    code, _, err = vit("embed", photos, "--model", weights, "--out", tmp_path / "v.csv")
    assert (code, "use --out vectors --merge" in err) == (2, True)


def test_the_last_of_several_shards_verifies_and_merges_all_parts(vit, weights, photos, tmp_path):
    job = ("embed", photos, "--model", weights, "--out", tmp_path / "parts", "--piece", 1, "--batch-size", 1)
    merged = tmp_path / "all.csv"
    code, out, _ = vit(*job, "--merge", merged, "--shard", "2/2")
    assert (code, merged.exists()) == (0, False)
    assert "1 of 2 parts are missing: the last shard verifies them" in out
    code, out, _ = vit(*job, "--merge", merged, "--shard", "1/2", "--json")
    assert (code, json.loads(out)["images"], json.loads(out)["parts"]) == (0, 2, 2)
    assert [row["key"] for row in csv.DictReader(merged.read_text().splitlines())] == ["a.png", "b.jpg"]


@pytest.mark.parametrize("name", ["all.txt", "all.xlsx", "all.json"])
def test_a_file_that_is_no_table_is_refused(vit, weights, photos, tmp_path, name):
    ran = vit("predict", photos, "--model", weights, "--out", tmp_path / name)
    assert ran.code == 2
    assert "is not .csv, .jsonl or .parquet, nor a folder" in " ".join(ran.err.split())
    assert not (tmp_path / name).exists()


def test_images_of_an_archive_have_the_names_in_it(vit, weights, photos, tmp_path):
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(photos / "a.png", "all/cat/1.png")
        archive.writestr("all/cat/2.png", b"broken")
    code, out, err = vit("predict", path, "--model", weights)
    assert code == 1
    assert out.startswith(f"{path}/all/cat/1.png\n")
    assert f"error: {path}/all/cat/2.png: " in err


def test_unreadable_images_fail_a_job_as_they_fail_a_table(vit, weights, photos, tmp_path):
    (tmp_path / "all").mkdir()
    for number in range(5):
        shutil.copy(photos / "a.png", tmp_path / "all" / f"{number}.png")
    assert vit("predict", tmp_path / "all", "--model", weights, "--out", tmp_path / "good")[0] == 0
    (tmp_path / "all" / "5.png").write_bytes(b"broken")
    for out in ("bad", "bad.csv"):
        assert vit("predict", tmp_path / "all", "--model", weights, "--out", tmp_path / out)[0] == 1
    code, out, _ = vit("embed", tmp_path / "all", "--model", weights, "--out", tmp_path / "vectors")
    assert code == 1
    assert "1 with an error" in out

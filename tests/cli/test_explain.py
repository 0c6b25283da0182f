"""`vit explain`."""

import json

import numpy as np
import pytest


@pytest.mark.slow
def test_people_get_the_answer_and_the_files_of_each_image(vit, weights, photos, tmp_path):
    code, out, err = vit("explain", photos, "--model", weights, "--out", tmp_path / "out", "--deletion")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{photos / 'a.png'}: ")
    assert [line.split(":")[0] for line in lines[1:4]] == [
        "  gradient-weighted attention",
        "  attention rollout, all layers",
        "  attention of layer 0, mean of heads",
    ]
    assert f"{tmp_path / 'out' / '1-a-rollout.png'} (deletion 0." in lines[2]
    assert lines[-1] == f"page: {tmp_path / 'out' / 'explain.html'}"
    assert (tmp_path / "out" / "2-b-gradient.png").exists()


def test_json_is_one_object_a_image_with_exactly_these_keys(vit, weights, photos, tmp_path):
    (photos / "c.jpg").touch()
    arguments = ("--map", "gradient", "--map", "rollout", "--class", "light", "--json")
    code, out, err = vit("explain", photos, "--model", weights, "--out", tmp_path / "out", *arguments)
    assert code == 1
    assert err == "1 of 3 images could not be read\n"
    first, _, last = map(json.loads, out.splitlines())
    assert list(first) == ["path", "predictions", "maps", "arrays", "deletion"]
    assert [(each["map"], each["class"]) for each in first["maps"]] == [("gradient", 2), ("rollout", None)]
    assert first["maps"][0]["file"] == str(tmp_path / "out" / "1-a-gradient.png")
    assert last == {"path": str(photos / "c.jpg"), "error": f"{photos / 'c.jpg'}: the file is empty"}


def test_where_no_image_can_be_read_nothing_is_written(vit, weights, tmp_path):
    (tmp_path / "a.jpg").touch()
    code, out, err = vit("explain", tmp_path / "a.jpg", "--model", weights, "--out", tmp_path / "out")
    assert (code, out, err) == (1, "", f"error: {tmp_path / 'a.jpg'}: the file is empty\n")
    assert not (tmp_path / "out").exists()


def test_figures_need_no_images(vit, weights, tmp_path):
    code, out, err = vit("explain", "--model", weights, "--figures", "--count", 3, "--out", tmp_path, "--json")
    assert (code, err) == (0, "")
    figures = [json.loads(line) for line in out.splitlines()]
    assert [figure["figure"] for figure in figures] == ["filters", "positions", "attention-distance"]
    assert all(list(figure) == ["figure", "files", "note"] for figure in figures)
    assert (tmp_path / "figures.html").exists()


def test_figures_are_taken_over_images_that_are_given(vit, weights, photos, tmp_path):
    code, out, _ = vit("explain", photos, "--model", weights, "--figures", "--out", tmp_path / "out")
    assert code == 0
    assert "averaged over 2 images." in out
    assert out.splitlines()[-1] == f"page: {tmp_path / 'out' / 'figures.html'}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give images to explain, or --figures for the model itself"),
        (["--figures", "--layer", "0"], "plots the model; --map, --labels, --class, --layer,"),
        (["a.png", "--map", "gradcam"], "Invalid value for '--map'"),
        (["a.png", "--patch", "7"], "'7' is not ROW,COLUMN such as 7,3"),
        (["a.png", "--head", "-1"], "Invalid value for '--head'"),
        (["a.png", "--top", "0"], "Invalid value for '--top'"),
    ],
)
def test_wrong_usage_exits_with_2(vit, weights, arguments, text):
    code, out, err = vit("explain", *arguments, "--model", weights)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layer", 4], "error: layer 4 does not exist: the model has layers 0 to 0\n"),
        (["--head", 9], "error: head 9 does not exist: the model has heads 0 to 1\n"),
        (["--patch", "0,2"], "error: patch 0,2 does not exist: the grid has rows 0 to 1 and columns 0 to 1\n"),
        (["--class", "lihgt"], "error: unknown class 'lihgt'; did you mean light?\n"),
        (["--class", "tiger"], "error: unknown class 'tiger' (the model has dark, gray, light)\n"),
        (["--class", 3], "error: class 3 does not exist: the model has classes 0 to 2\n"),
    ],
)
def test_what_the_model_does_not_have_is_one_line(vit, weights, photos, tmp_path, arguments, text):
    assert vit("explain", photos, "--model", weights, "--out", tmp_path / "out", *arguments) == (1, "", text)
    assert not (tmp_path / "out").exists()


def test_a_broken_image_is_left_out_of_the_figures_and_told(vit, weights, photos, tmp_path):
    (photos / "c.jpg").write_text("hello")
    code, out, err = vit("explain", photos, "--model", weights, "--figures", "--out", tmp_path / "out")
    assert code == 1
    assert "averaged over 2 images." in out
    assert err.startswith(f"error: {photos / 'c.jpg'}: not an image")
    assert err.count("\n") == 1
    assert "Skipped: " in (tmp_path / "out" / "figures.html").read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_is_one_line(vit, weights, photos, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = vit("explain", photos, "--model", weights, "--out", tmp_path / "file")
    assert code == 1
    assert "cannot be written" in err
    assert err.count("\n") == 1


def test_components_have_colors_per_patch_and_a_sentence_on_the_page(vit, weights, photos, tmp_path):
    code, out, err = vit("explain", photos, "--model", weights, "--map", "pca", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "  principal components of the patches after layer 0" in out.splitlines()[1]
    with np.load(tmp_path / "out" / "1-a.npz") as arrays:
        assert arrays["pca"].shape[2] == 3
    page = (tmp_path / "out" / "explain.html").read_text("utf-8")
    assert "patches with similar tokens have similar colors" in page
    assert "Rollout:" not in page

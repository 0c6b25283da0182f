"""`vit finetune` as a new user meets it: what is wrong is said in a line."""

import json

import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path):
    """Two classes, with one image that is none."""
    folder = tmp_path / "data"
    for split, count in (("train", 8), ("test", 3)):
        for label, level in (("dark", 20), ("light", 220)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (20, 20), (level + number,) * 3).save(folder / split / label / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["data"], "Missing option '--from'"),
        (
            ["data", "--from", "w", "--lrs", "fast"],
            "Invalid value for --lrs: 'fast' is not a list of positive numbers, such as 0.001,0.003",
        ),
        (["data", "--from", "w", "--lrs", "-1"], "'-1' is not a list of positive numbers"),
        (["data", "--from", "w", "--lrs", ""], "'' is not a list of positive numbers"),
        (["data", "--from", "w", "--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_wrong_usage_exits_with_2(vit, arguments, text):
    code, out, err = vit("finetune", *arguments)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--task", "petz"], "unknown task 'petz'; did you mean pets"),
        (["--recipe", "finetune-smal"], "unknown recipe 'finetune-smal'; did you mean finetune-small"),
        (["--set", "epoch=1"], "unknown setting 'epoch'; did you mean epochs?"),
        (["--image-size", "17"], "image of 17x17 pixels is not divisible by the patch of 8"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_1(vit, images, weights, tmp_path, arguments, text):
    code, out, err = vit("finetune", images, "--from", weights, "--out", tmp_path / "sweep", *arguments)
    assert (code, out) == (1, "")
    assert f"error: {text}" in err or text in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "sweep").exists()


def test_a_start_without_weights_leaves_no_folder(vit, images, tmp_path):
    (tmp_path / "notes.safetensors").write_text("no weights")
    code, _, err = vit("finetune", images, "--from", tmp_path / "notes.safetensors", "--out", tmp_path / "sweep")
    assert code == 1
    assert err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_task_without_images_says_what_to_download(vit, weights, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_DATA", "elsewhere")  # and back afterwards, as the option sets it
    code, _, err = vit("finetune", "pets", "--from", weights, "--data-root", tmp_path / "root")
    assert code == 1
    assert err.startswith("error: the task pets has no images/*.jpg and")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_quick_sweep_ends_with_a_number_and_a_model(vit, images, weights, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path))
    arguments = [images, "--from", weights, "--out", tmp_path / "sweep", "--quick", "--set", "workers=0"]
    changes = ("--set", "batch_size=4", "--image-size", "32", "--steps", "3")
    code, out, err = vit("finetune", *arguments, *changes)
    assert code == 0, err
    assert "test-lr-0.0003-seed-0" in out
    assert "(one run)\nmeasured on the split 'test'" in out
    assert "test split" not in err
    code, out, err = vit("finetune", *arguments, *changes, "--json")
    assert json.loads(out)["top1"]["count"] == 1
    assert "(already done)" in err
    model = tmp_path / "sweep" / "test-lr-0.0003-seed-0"
    assert json.loads((model / "model" / "config.json").read_text())["preprocess"]["image_size"] == [32, 32]
    code, out, err = vit("predict", images / "test" / "dark" / "0.png", "--model", tmp_path / "sweep")
    assert code == 0
    assert "has 1 finished trial; using test-lr-0.0003-seed-0" in err
    assert out == vit("predict", images / "test" / "dark" / "0.png", "--model", model).out


def test_broken_images_and_empty_folders_are_said(vit, images, weights, tmp_path):
    for path in (images / "train" / "dark").iterdir():
        path.write_bytes(b"not an image")
    arguments = ["--from", weights, "--quick", "--steps", "1", "--set", "workers=0", "--set", "batch_size=4"]
    code, _, err = vit("finetune", images, "--out", tmp_path / "sweep", *arguments)
    assert code == 1
    assert "error: " in err
    assert "Traceback" not in err
    (tmp_path / "empty").mkdir()
    code, _, err = vit("finetune", tmp_path / "empty", "--out", tmp_path / "other", *arguments)
    assert code == 1
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'empty'}: no images in class folders")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_images_that_could_not_be_read_are_counted(vit, images, weights, tmp_path):
    for split in ("train", "test"):
        (images / split / "dark" / "broken.png").write_bytes(b"no image")
    out = tmp_path / "sweep"
    arguments = ["--quick", "--steps", "10", "--set", "workers=0", "--set", "batch_size=4"]
    code, _, err = vit("finetune", images, "--from", weights, "--out", out, *arguments)
    assert code == 0
    assert f"2 images could not be read; unreadable.json in the folders of {out} lists them" in err

"""`vit segment`."""

import json

import numpy as np
import pytest
from PIL import Image

import vitruvian as vt
from vitruvian.config import ResNetConfig
from vitruvian.model.build import build


@pytest.fixture
def scene(tmp_path):
    """Images of a bright and a dark half, and masks of them."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for index in range(3):
        mask = np.zeros((32, 32), np.uint8)
        mask[:, :16] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / f"{index}.png")
        Image.fromarray(200 - 150 * mask).convert("RGB").save(tmp_path / "images" / f"{index}.jpg")
    return tmp_path


@pytest.mark.slow
def test_a_segmenter_is_trained_and_used(vit, weights, scene):
    (scene / "images" / "other.jpg").write_bytes((scene / "images" / "0.jpg").read_bytes())
    words = ["segment", scene / "images", "--masks", scene / "masks", "--classes", "background,dark"]
    code, out, err = vit(*words, "--model", weights, "--out", scene / "segmenter")
    assert code == 0, err
    assert [line.split("  ")[0] for line in out.splitlines()[1:4]] == ["background", "dark", "mean of the classes"]
    assert "mean IoU by masks to train on: " in out
    assert "1 image without a mask left out" in err
    code, out, err = vit("segment", scene / "images" / "0.jpg", "--model", scene / "segmenter", "--out", scene / "out")
    assert code == 0, err
    assert out.splitlines()[0].startswith(f"{scene / 'images' / '0.jpg'}: background ")
    assert (scene / "out" / "masks" / "0.png").is_file()
    assert not (scene / "out" / "polygons.json").exists()
    polygons = ["segment", scene / "images", "--model", scene / "segmenter", "--out", scene / "out", "--polygons"]
    assert vit(*polygons)[0] == 0
    written = json.loads((scene / "out" / "polygons.json").read_text())
    assert [image["file_name"] for image in written["images"]] == ["0.jpg", "1.jpg", "2.jpg", "other.jpg"]
    assert written["categories"] == [{"id": 2, "name": "dark"}]
    (scene / "broken.jpg").touch()
    code, out, err = vit(
        "segment", scene / "broken.jpg", "--model", scene / "segmenter", "--out", scene / "x", "--json"
    )
    assert (code, json.loads(out)["error"]) == (1, f"{scene / 'broken.jpg'}: the file is empty")
    code, _, err = vit(*words, "--model", scene / "segmenter", "--out", scene / "y")
    assert code == 2
    assert "is a segmenter; --masks needs the weights of a ViT" in err


def test_a_folder_with_other_files_is_kept(vit, weights, scene):
    before = {path: path.read_bytes() for path in scene.rglob("*.png")}
    words = ["segment", scene / "images", "--masks", scene / "masks", "--model", weights, "--out"]
    assert vit(*words, scene / "segmenter")[0] == 0
    assert vit(*words, scene / "segmenter")[0] == 0  # replaces its own result
    for arguments in ([*words, scene], ["segment", scene / "images", "--model", scene / "segmenter", "--out", scene]):
        code, _, err = vit(*arguments)
        assert (code, err) == (1, f"error: {scene}: already exists; choose another folder\n")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_wrong_use_is_one_line(vit, weights, scene):
    images, out = scene / "images", ["--out", scene / "out"]
    code, _, err = vit("segment", images, "--model", weights, *out)
    assert code == 2
    assert "is no segmenter; --masks trains one" in err
    code, _, err = vit("segment", images, "--model", weights, *out, "--masks", scene / "masks", "--layers", "a")
    assert code == 2
    assert "'a' is not a list of layers such as 5,8,11" in err
    code, _, err = vit("segment", images, "--model", weights, *out, "--masks", scene / "masks", "--polygons")
    assert code == 2
    assert "is about predictions; leave out --masks" in err
    code, _, err = vit("segment", images, "--model", weights, *out, "--masks", scene / "nothing")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "no masks (*.png)" in err
    vt.save(build(ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=2)), scene / "resnet")
    code, _, err = vit("segment", images, "--model", scene / "resnet", *out, "--masks", scene / "masks")
    assert (code, err.count("\n")) == (1, 1)
    assert "this model has no patch tokens" in err

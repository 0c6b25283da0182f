"""`vit anomaly`."""

import json

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def parts(tmp_path):
    """Gray images, good ones and some with a bright half."""
    for name in ("train", "test/good", "test/broken", "masks"):
        (tmp_path / name).mkdir(parents=True)
    for index in range(3):
        mask = np.zeros((32, 32), np.uint8)
        mask[:, :16] = 255
        for name in ("train", "test/good", "test/broken"):
            pixels = np.where((name == "test/broken") & (mask > 0), 255, 90 + index).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{name[-4:]}{index}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"oken{index}.png")
    return tmp_path


@pytest.mark.slow
def test_a_detector_is_made_used_and_measured(vit, weights, parts):
    code, out, err = vit("anomaly", "--good", parts / "train", "--model", weights, "--out", parts / "detector")
    assert code == 0, err
    assert out.startswith("threshold ")
    assert "3 good images are too few for 5% false alarms" in err
    used = ["anomaly", parts / "test", "--model", parts / "detector"]
    code, out, err = vit(*used, "--out", parts / "out", "--masks", parts / "masks")
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith(f"{parts / 'test' / 'broken' / 'oken0.png'}: ")
    assert lines[-1].startswith("image AUROC 100.0 % (95% interval: 100.0 to 100.0), pixel AUROC ")
    assert len(list((parts / "out" / "overlays").iterdir())) == 6
    (parts / "test" / "x.png").touch()
    code, out, err = vit(*used, "--out", parts / "json", "--json")
    assert code == 1
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[-2] == {
        "path": str(parts / "test" / "x.png"),
        "error": f"{parts / 'test' / 'x.png'}: the file is empty",
    }
    assert rows[-1]["image_auroc"] == 100


def test_wrong_use_is_one_line(vit, weights, parts):
    out, good = ["--out", parts / "out"], ["--good", parts / "train"]
    for arguments, reason in (
        ([parts / "test", "--model", weights, *out], "is no detector; --good makes one"),
        ([parts / "test", "--model", weights, *out, *good], "score IMAGES with it in a second command"),
        (["--model", weights, *out], "give images to score, or --good to make a detector"),
        ([parts / "test", "--model", weights, *out, "--patches", 9], "applies to --good; the detector has its own"),
    ):
        code, _, err = vit("anomaly", *arguments)
        assert code == 2
        assert reason in err
    assert vit("anomaly", *good, "--model", weights, "--out", parts / "detector")[0] == 0
    used = ["--model", parts / "detector", "--out", parts / "new"]
    code, _, err = vit("anomaly", parts / "test", *used, "--masks", parts / "train")
    assert (code, err.splitlines()[-1]) == (1, f"error: {parts / 'train'}: no image has a mask of its name")
    assert not (parts / "new").exists()
    code, printed, _ = vit("anomaly", parts / "none.png", *used, "--json")
    assert (code, json.loads(printed)["error"]) == (1, f"{parts / 'none.png'}: no such file")
    code, _, err = vit("anomaly", *good, "--model", weights, "--out", parts)
    assert (code, err) == (1, f"error: {parts}: already exists; choose another folder\n")
    (parts / "empty").mkdir()
    code, _, err = vit("anomaly", "--good", parts / "empty", "--model", weights, *out)
    assert (code, len(err.splitlines())) == (1, 1)

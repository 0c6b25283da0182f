"""CONTRIBUTING's augmentation and data format: each works from its few lines alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from making import make_folder

from vitruvian.data import augment, folder, formats, sources
from vitruvian.data.augment import Augment, train_transform
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def run(name, table, monkeypatch, *modules):
    """Run the example that adds a row of this name, as if it stood in the file of its table."""
    (code,) = (block for block in re.findall("```python\n(.*?)```", TEXT, re.DOTALL) if f'"{name}"' in block)
    monkeypatch.setitem(table, name, None)  # taken out again afterwards
    exec(code, {"json": json, **{key: value for module in modules for key, value in vars(module).items()}})


def test_an_augmentation_is_a_function_and_a_row(monkeypatch):
    run("vignette", augment.OPS, monkeypatch, augment)
    white = np.full((8, 8, 3), 255, np.uint8)
    view = train_transform(Augment(image_size=(8, 8), crop="none", ops=(("vignette", 1.0, 1.0),)))
    seen = view(white, np.random.default_rng(0))
    assert (float(seen.max()) <= 1, float(seen.min()) < 0.9, seen.unique().numel() > 10) == (True, True, True)


def test_a_format_is_a_function_and_a_row(tmp_path, monkeypatch):
    run("ndjson", formats.FORMATS, monkeypatch, sources, folder, formats)
    make_folder(tmp_path)
    rows = [{"path": f"{name}/{index}.png", "label": name} for name in ("cat", "dog") for index in range(3)]
    (tmp_path / "list.ndjson").write_text("\n".join(map(json.dumps, rows)))
    data = open_dataset(tmp_path / "list.ndjson")
    assert (data.classes, len(data.train), data.train.key(4)) == (("cat", "dog"), 6, "dog/1.png")
    (tmp_path / "list.ndjson").write_text(json.dumps({"path": "../secret.png", "label": "cat"}))
    with pytest.raises(DataError, match=r"the path \.\./secret\.png points outside its folder"):
        open_dataset(tmp_path / "list.ndjson")

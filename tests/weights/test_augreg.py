"""The AugReg checkpoints: found by their index, loaded by their file names; their levels of augmentation."""

import csv
import json
import shutil

import numpy as np
import pytest
from checkpoints import path_of
from typer.testing import CliRunner

import vitruvian as vt
from vitruvian.cli.app import app
from vitruvian.data.augment import AUGREG_LEVELS, RAND_AUGMENT
from vitruvian.errors import ConfigError, FileError, HubError
from vitruvian.training.recipe import change_recipe, read_recipe, recipe_from_table
from vitruvian.weights.hub import AUGREG_COLUMNS, find_augreg

FOLDER = "storage.googleapis.com/vit_models/augreg"


def index_row(name, ds, epochs, aug, final_val, adapt_ds, resolution, accuracy):
    start = f"{name.replace('+', '_').replace('/', '_')}-{ds}-{epochs}ep-lr_0.001-aug_{aug}-wd_0.1-do_0.0-sd_0.0"
    label = f"{ds}_30" if epochs == 30 else ds
    end = f"{start}--{adapt_ds}-steps_20k-lr_0.03-res_{resolution}"
    values = dict(zip(AUGREG_COLUMNS, (name, label, final_val, adapt_ds, resolution, accuracy, start, end)))
    return values | {"aug": aug, "wd": "0.1"}


ROWS = [
    index_row("S/16", "i1k", 300, "medium2", 0.77, "imagenet2012", 224, 0.772),
    index_row("S/16", "i1k", 300, "light0", 0.75, "imagenet2012", 384, 0.791),
    index_row("S/16", "i21k", 300, "light1", 0.41, "imagenet2012", 384, 0.8373),
    index_row("S/16", "i21k", 30, "none", 0.38, "cifar100", 384, 0.91),
    index_row("R26+S/32", "i21k", 300, "light1", 0.40, "imagenet2012", 384, 0.8385),
]


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    path = tmp_path / FOLDER / "index.csv"
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.mark.parametrize(
    ("terms", "accuracies"),
    [
        ("S/16, imagenet, 300ep", ["0.791", "0.772"]),
        ("s/16,i21k", ["0.91", "0.8373"]),
        ("S/16, imagenet21k, 30ep", ["0.91"]),
        ("light1, 384", ["0.8385", "0.8373"]),
        ("R26+S/32", ["0.8385"]),
        ("wd_0.1, cifar100", ["0.91"]),
        ("", ["0.91", "0.8385", "0.8373", "0.791", "0.772"]),
    ],
)
def test_rows_with_all_terms_come_by_their_accuracy(index, terms, accuracies):
    assert [row["adapt_final_test"] for row in find_augreg(terms)] == accuracies


def test_a_missing_index_or_term_is_one_line(index, tmp_path, monkeypatch):
    with pytest.raises(FileError, match="no AugReg checkpoint has 'b/16'"):
        find_augreg("B/16")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match="not the index of the AugReg checkpoints: no column 'name'"):
        find_augreg("S/16", tmp_path / "other.csv")
    (tmp_path / "page.csv").write_bytes(b"\xff\xd8\xff\xe0 not text")
    with pytest.raises(FileError, match=r"page\.csv: not UTF-8 text: byte 0xff at 0"):
        find_augreg("S/16", tmp_path / "page.csv")
    (tmp_path / "cut.csv").write_bytes(index.read_bytes().rstrip()[:-40])
    with pytest.raises(FileError, match=r"cut\.csv: line 6 is incomplete; download the index again"):
        find_augreg("S/16", tmp_path / "cut.csv")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "empty"))
    with pytest.raises(HubError) as raised:
        find_augreg("S/16")
    assert "download https://storage.googleapis.com/vit_models/augreg/index.csv" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(find_augreg("S/16", index)) == 4


def test_the_command_prints_names_accuracies_and_settings(index):
    result = CliRunner().invoke(app, ["models", "--augreg", "S/16, imagenet, 300ep"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split()[0] == f"augreg/{ROWS[1]['adapt_filename']}"
    assert lines[1].split()[1:] == ["S/16", "i1k", "75.00", "imagenet2012", "384", "79.10"]
    result = CliRunner().invoke(app, ["models", "--augreg", "S/16", "--index", str(index), "--json"])
    assert [json.loads(line)["aug"] for line in result.stdout.splitlines()] == ["none", "light1", "light0", "medium2"]
    assert CliRunner().invoke(app, ["models", "B/16", "--augreg", "S/16"]).exit_code == 2


def test_a_name_from_the_index_is_loaded_from_the_cache(index, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = find_augreg("S/16, cifar100")[0]["weights"]
    shutil.copyfile(path_of("google_vit"), index.parent / f"{name.removeprefix('augreg/')}.npz")
    assert vt.load(name).config.width == 32
    with pytest.raises(HubError, match="not in the cache"):
        vt.load("augreg/S_16-i1k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0")


# The table of "How to train your ViT?", Section 3.2: RandAugment layers and magnitude, Mixup alpha.
PAPER = {
    "none": (0, 0, 0),
    "light0": (2, 0, 0),
    "light1": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


def settings_of(recipe):
    augment = recipe.augment
    return augment.rand_augment, augment.rand_augment_magnitude, augment.mixup_alpha


@pytest.mark.parametrize("level", AUGREG_LEVELS)
def test_a_level_stands_for_the_papers_settings(level):
    assert settings_of(change_recipe(read_recipe("scratch"), [f"augment.level={level}"])) == PAPER[level]
    assert set(AUGREG_LEVELS) == set(PAPER)


def test_settings_beside_a_level_win_and_a_wrong_one_is_refused():
    recipe = recipe_from_table({"epochs": 1, "augment": {"level": "strong1", "mixup_alpha": 0.3}})
    assert settings_of(recipe) == (2, 20, 0.3)
    assert settings_of(change_recipe(recipe, ["augment.level=light0", "augment.rand_augment=3"])) == (3, 0, 0)
    with pytest.raises(ConfigError, match="is not one of none, light0"):
        change_recipe(recipe, ["augment.level=medium0"])


@pytest.mark.parametrize("name", RAND_AUGMENT)
@pytest.mark.parametrize("magnitude", [15, 20])
def test_every_operation_works_at_the_magnitudes_of_the_paper(name, magnitude):
    levels = np.random.default_rng(0).integers(0, 256, (32, 24, 3), np.uint8)
    changed = RAND_AUGMENT[name](levels, magnitude / 10, np.random.default_rng(1))
    assert (changed.shape, changed.dtype) == (levels.shape, np.uint8)

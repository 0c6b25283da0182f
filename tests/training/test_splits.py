"""Data and transforms of the caller, runs in use, scripts without a guard."""

import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from making_weights import TINY_RECIPE, tiny_weights
from PIL import Image
from runs import TINY, StopAt, changes, lines, same_model

from forked import Forked, patience
from vitruvian.cache import Lock
from vitruvian.catalog import resolve
from vitruvian.cost import multiply_adds
from vitruvian.errors import ConfigError, DataError, MissingExtraError, TrainingError
from vitruvian.training import Interrupted, resume, train
from vitruvian.training.finetune import finetune, protocol_for
from vitruvian.training.recipe import Recipe
from vitruvian.training.splits import run_multiply_adds

SETTINGS = (*TINY, "steps=6", "batch_size=8", "image_size=8", "architecture.in_channels=1", "workers=0")


class Noise(torch.utils.data.Dataset):
    """Two classes of noise, one brighter; a random transform of its own."""

    classes = ("dark", "bright")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 120, (8, 8), np.uint8) + 130 * (index % 2)
        return Image.fromarray(np.roll(pixels.astype(np.uint8), int(torch.randint(8, ())), axis=0)), index % 2


def with_noise(image):
    """A transform that draws from PyTorch's global generator."""
    pixels = torch.from_numpy(np.array(image.convert("L"), np.float32)) / 255
    return (pixels + 0.1 * torch.randn(pixels.shape))[None]


def plain(image):
    return torch.from_numpy(np.array(image.convert("L"), np.float32))[None] / 255


def begun(folder, **transforms):
    return train(Noise(), recipe="digits", out=folder, settings=SETTINGS, progress=False, **transforms)


@pytest.mark.parametrize("transforms", [{}, {"train_transform": with_noise, "transform": plain}])
def test_a_dataset_object_is_trained_on_and_continued_exactly(tmp_path, transforms):
    expected = begun(tmp_path / "whole", **transforms)
    with pytest.raises(Interrupted):
        begun(tmp_path / "run", listeners=[StopAt(3)], **transforms)
    with pytest.raises(TrainingError, match=r"started with a dataset object; pass it again, resume\(run, data="):
        resume(tmp_path / "run", progress=False)
    if transforms:
        with pytest.raises(TrainingError, match="started with transform=, train_transform=; pass the same to resume"):
            resume(tmp_path / "run", data=Noise(), progress=False)
    run = resume(tmp_path / "run", data=Noise(), progress=False, **transforms)
    assert same_model(run.folder, expected.folder)
    assert lines(run.folder) == lines(expected.folder)


def test_the_views_of_the_caller_are_what_is_trained_and_measured_with(tmp_path):
    usual, own = begun(tmp_path / "usual"), begun(tmp_path / "own", train_transform=with_noise, transform=plain)
    assert lines(usual.folder)[-1]["loss"] != lines(own.folder)[-1]["loss"]
    assert "the saved model has the preprocessing of the recipe" in str(own.facts["notes"])


def test_a_run_goes_on_where_its_files_have_moved_to(tmp_path):
    images = tmp_path / "images"
    for index in range(40):
        image, label = Noise()[index]
        (images / Noise.classes[label]).mkdir(parents=True, exist_ok=True)
        image.save(images / Noise.classes[label] / f"{index:02}.png")
    with pytest.raises(Interrupted):
        train(images, recipe="digits", out=tmp_path / "run", settings=SETTINGS, listeners=[StopAt(3)], progress=False)
    images.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="images: no such file or folder"):
        resume(tmp_path / "run", progress=False)
    assert resume(tmp_path / "run", data=tmp_path / "moved", progress=False).finished


SCRIPT = """
    import vitruvian.training as training
    def main():
        small = ["architecture.depth=1", "architecture.width=16", "architecture.mlp_dim=16", "architecture.num_heads=2"]
        training.train("digits", out="run", settings=["steps=2", "batch_size=8", "workers=1", "image_size=8", *small])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "ending", "noted"),
    [
        ("mine.py", "main()", True),
        ("mine.py", 'if __name__ == "__main__":\n    main()', False),
        ("-m mine", "main()", False),  # the __main__ of a package, which no worker imports
    ],
)
def test_a_script_without_a_guard_trains_without_workers_and_says_so_in_a_line(tmp_path, started, ending, noted):
    place = tmp_path / ("mine.py" if started == "mine.py" else "mine/__main__.py")
    place.parent.mkdir(exist_ok=True)
    place.write_text(textwrap.dedent(SCRIPT) + ending + "\n")
    words = [sys.executable, *started.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model").is_dir()
    assert "Traceback" not in done.stderr
    assert ("workers=0: line 6 of" in done.stderr and 'outside `if __name__ == "__main__":`' in done.stderr) == noted


def test_train_shows_its_progress_unless_asked_not_to(tmp_path, capsys):
    train("digits", out=tmp_path / "shown", settings=[*TINY, "steps=2"])
    assert "step 0 of 2" in capsys.readouterr().err
    train("digits", out=tmp_path / "silent", settings=[*TINY, "steps=2"], progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_folder_in_use_names_who_uses_it_and_loses_nothing(tmp_path):
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=TINY, listeners=[StopAt(2)], progress=False)
    holder = Forked(work=partial(hold, tmp_path)).until((tmp_path / "held").exists)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TrainingError, match=rf"run: process {holder.pid} on .* is training in it; wait until it ends"):
        resume(tmp_path / "run", progress=False)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "end").touch()
    assert holder.wait().code == 0
    assert resume(tmp_path / "run", progress=False).finished


def hold(folder):
    lock = Lock(folder / "run" / ".lock")
    assert lock.acquire(wait=False)
    (folder / "held").touch()
    assert any((folder / "end").exists() for _ in patience(120))


def test_starts_without_a_folder_never_share_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [train("digits", settings=[*TINY, "steps=1"], progress=False) for _ in range(2)]
    assert [str(run.folder) for run in runs] == ["runs/digits-1", "runs/digits-2"]


def test_a_folder_with_nothing_but_a_recipe_of_ones_own_is_not_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("mine")
    with pytest.raises(TrainingError, match="run: exists and is not empty; choose another out="):
        train("digits", out=tmp_path / "run", settings=TINY, progress=False)
    assert (tmp_path / "run" / "recipe.toml").read_text() == "mine"


def test_a_start_that_comes_to_nothing_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="warmup and cooldown"):
        train("digits", out=tmp_path / "run", settings=[*TINY, "warmup=500"], progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_that_continue_one_run_at_once_leave_it_as_one_would(tmp_path):
    settings = ("steps=100", "checkpoint_steps=5", "eval_every=1000")
    expected = train("digits", out=tmp_path / "whole", settings=[*TINY, *settings], progress=False)
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=[*TINY, *settings], listeners=[StopAt(3)], progress=False)
    both = [Forked("train", "--resume", tmp_path / "run") for _ in range(2)]
    ends = sorted(process.wait() for process in both)
    assert [end.code for end in ends] in ([0, 0], [0, 1]), ends  # [0, 0]: the second came when the first was done
    if ends[1].code:
        assert "is training in it; wait until it ends" in ends[1].err.splitlines()[-1]
    assert same_model(tmp_path / "run", expected.folder)
    assert lines(tmp_path / "run") == lines(expected.folder)


@pytest.mark.slow
def test_two_starts_at_once_take_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = [Forked("train", "digits", *changes("steps=2")) for _ in range(2)]
    assert [process.wait().code for process in both] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-1", "digits-2"]


def test_a_fine_tuning_in_use_names_who_uses_it(tmp_path):
    lock = Lock(tmp_path / "sweep" / ".lock")
    assert lock.acquire(wait=False)
    protocol = protocol_for("digits", tiny_weights(tmp_path / "weights"), settings=TINY_RECIPE, seeds=1)
    with pytest.raises(TrainingError, match=r"sweep: process \d+ on .* is training in it"):
        finetune(protocol.quick(), tmp_path / "sweep", report=lambda _: None)
    lock.release()
    assert finetune(protocol.quick(), tmp_path / "sweep", report=lambda _: None, progress=False).finished


@pytest.mark.parametrize("start", ["train", "finetune"])
def test_a_missing_extra_is_said_before_the_data_is_opened(tmp_path, monkeypatch, start):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    weights = "google/vit-base-patch16-224"

    def begin():
        if start == "train":
            return train(tmp_path / "no-such-data", weights=weights, out=tmp_path / "out")
        return finetune(protocol_for(tmp_path / "no-such-data", weights), tmp_path / "out")

    with pytest.raises(MissingExtraError, match=r"pip install '\.\[hub\]'"):
        begin()


CONFIG = resolve("ViT-Ti/16")


def test_tokens_left_out_save_work_where_there_are_tokens():
    recipe = Recipe(steps=10, patch_drop=0.5)
    whole, config, resnet, size = recipe.replace(patch_drop=0.0), resolve("ViT-Ti/16"), resolve("BiT-R50x1"), (128, 128)
    assert run_multiply_adds(whole, config, size, 10) == 3 * 128 * 10 * multiply_adds(config, size)
    assert run_multiply_adds(recipe, config, size, 10) == run_multiply_adds(whole, config, size, 10) / 2
    assert run_multiply_adds(recipe, resnet, size, 10) == run_multiply_adds(whole, resnet, size, 10)

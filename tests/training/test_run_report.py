"""The report of a run, whole and with missing pieces, and its TensorBoard events."""

import errno
import json
import sys

import numpy as np
import pytest
import torch

from vitruvian.catalog import resolve
from vitruvian.config import ModelMeta
from vitruvian.data.sources import Source
from vitruvian.errors import FileError, ImageError, TrainingError
from vitruvian.evaluation.metrics import class_measures, score_logits
from vitruvian.training.integrations import TensorBoard, print_once
from vitruvian.training.recipe import Recipe, read_recipe
from vitruvian.training.run_folder import EVENTS_FOLDER, write_run
from vitruvian.training.run_report import curves, write_report
from vitruvian.weights.checkpoint_files import Description

MODEL = Description(config=resolve("ViT-Ti/16"), meta=ModelMeta()).to_json()


class Squares(Source):
    """Gray squares of two classes; the image with number 3 is broken."""

    name = "squares"

    def __init__(self, labels, classes=("cat", "<dog>")):
        self.classes = classes
        self._labels = np.array(labels, np.int32)

    def __len__(self):
        return len(self._labels)

    def label(self, index):
        return int(self._labels[index])

    def labels(self):
        return self._labels

    def read(self, index):
        if index == 3:
            raise ImageError("broken")
        return np.full((8, 8), 10 * index, np.uint8)

    def key(self, index):
        return f"<{index}>.jpg"


def lines(folder, *steps, split="train", **values):
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            place = {"step": step, "epoch": step / 10, "split": split, "seconds": 61.0 + step}
            file.write(json.dumps(place | values) + "\n")


@pytest.fixture
def run(tmp_path):
    facts = {"data": "/photos/<pets>", "notes": ["left out: 3 <files>"], "environment": {"threads": 77}, "model": MODEL}
    return write_run(tmp_path / "run", Recipe(epochs=3, model="ViT-Ti/16", about="<i>"), facts)


def measures():
    answers = torch.tensor([[3.0, 0.0], [0.0, 3.0], [4.0, 0.0], [2.0, 0.0]])
    columns = score_logits(answers, torch.tensor([0, 1, 1, 1]), torch.arange(4), classes=2)
    return class_measures(columns, classes=2)


def test_a_report_names_the_recipe_and_the_command_once_and_has_intervals(tmp_path):
    recipe = read_recipe("digits").replace(command="vit train digits")
    facts = {"data": "digits", "environment": {"command": "vit train digits"}, "model": MODEL}
    run = write_run(tmp_path / "run", recipe, facts)
    page = write_report(run, Squares([0, 1, 1, 1]), measures=measures(), held_out=Squares([0, 1, 1, 1])).read_text()
    assert "<dt>recipe</dt><dd>digits</dd>" in page
    assert page.count("vit train digits") == 1
    assert "50.00 % (15.0 to 85.0)" in page  # mean F1, of 4 images
    assert page.count("&nbsp;to&nbsp;") == 6  # recall, precision and F1 of two classes


def test_a_report_has_every_part_and_nothing_that_is_interpreted(run):
    lines(run.folder, 1, 2, 3, loss=0.5, top1=80.0, lr=1e-3, images_per_second=9.0)
    lines(run.folder, 3, split="val", loss=0.75, top1=50.0)
    (run.folder / "unreadable.json").write_text(json.dumps({"<b>.jpg": "cut <short>"}))
    squares = Squares([0, 1, 1, 1])
    path = write_report(run, squares, held_out=squares, measures=measures())
    assert path == run.folder / "report.html"
    page = path.read_text(encoding="utf-8")
    for part in ("Curves", "Confusion matrix", "Most confident mistakes", "Classes", "Data", "Settings", "Environment"):
        assert f"<h2>{part}</h2>" in page
    for words in (
        "ViT-Ti/16 on &lt;pets&gt;",
        "50.00 %",  # top-1: two of four
        "1 min 04 s",
        "3 steps, 0.3 epochs",
        "cut &lt;short&gt;",
        "left out: 3 &lt;files&gt;",
        "<dt>threads</dt><dd>77</dd>",
        "fewer than 5 images in train",
        "</svg>validation</span>",
    ):
        assert words in page, words
    assert ">val<" not in page
    assert "<dog>" not in page
    assert "<b>.jpg" not in page


@pytest.mark.parametrize(
    ("config", "weights", "title"),
    [
        (resolve("ViT-Ti/16").replace(num_classes=3), "", "ViT-Ti/16 on"),
        (resolve("ViT-Ti/16").replace(depth=4, width=96), "", "ViT of depth 4, width 96, patch 16 on"),
        (resolve("ViT-B/32"), "/weights/mine.npz", "ViT-B/32 fine-tuned from mine.npz on"),
    ],
)
def test_a_title_names_the_model_that_it_is(tmp_path, config, weights, title):
    facts = {"data": "pets", "model": Description(config=config, meta=ModelMeta()).to_json()}
    made = write_run(tmp_path / "run", Recipe(epochs=3, weights=weights, eval_every=0), facts)
    page = write_report(made, Squares([0, 1, 1, 1])).read_text()
    assert f"<h1>{title} pets</h1>" in page
    assert "ViT-S/16" not in page
    assert "1000000000" not in page


def test_mistakes_are_shown_worst_first_with_label_prediction_and_probability(run):
    squares = Squares([0, 1, 1, 1])
    page = write_report(run, squares, held_out=squares, measures=measures()).read_text()
    first, second = page.split("<figure>")[1:]
    assert "data:image/png;base64" in first
    assert "<b>cat</b> 98.2&nbsp;%<br>labeled <b>&lt;dog&gt;</b>" in first
    assert "&lt;2&gt;.jpg" in first
    assert "no image" in second


def test_a_run_without_lines_or_held_out_images_still_has_a_report(tmp_path):
    run = write_run(tmp_path / "run", Recipe(epochs=1), {"model": MODEL})
    page = write_report(run, Squares([0, 1] * 30), stopped="the <disk> is full").read_text()
    assert "no steps recorded" in page
    assert "the accuracy is unknown" in page
    assert "The run stopped early: the &lt;disk&gt; is full" in page
    assert "Every image could be read" in page
    assert "<h2>Curves</h2>" not in page


def test_an_unbalanced_training_set_is_named(run):
    page = write_report(run, Squares([0] * 400 + [1] * 20)).read_text()
    assert "train is unbalanced: cat has 20 times the images of &lt;dog&gt;" in page


def test_a_report_for_which_the_disk_is_too_small_leaves_the_old_one(run, monkeypatch):
    path = write_report(run, Squares([0, 1]))
    before = path.read_text()

    def full(staged, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vitruvian.files._install", full)
    with pytest.raises(FileError, match=r"report\.html: cannot be written: No space left on device"):
        write_report(run, Squares([0, 1, 1]))
    assert path.read_text() == before
    assert not list(run.folder.glob(".report*"))


def events(folder):
    """Tag -> (step, value) of all events, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(folder / EVENTS_FOLDER)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def record(board, *steps, **values):
    for step in steps:
        board.recorded({"step": step, "split": "train", **values})


def test_every_number_of_a_line_becomes_an_event_under_its_split(tmp_path):
    board = TensorBoard()
    board.started(folder=tmp_path, steps=2, done=0)
    record(board, 1, loss=0.5, text="no number")
    board.recorded({"step": 1, "split": "val", "top1": 50})
    board.finished()
    assert events(tmp_path) == {"loss/train": [(1, 0.5)], "top1/val": [(1, 50.0)]}


def test_a_continued_run_appends_and_forgets_what_came_after_the_checkpoint(tmp_path):
    killed = TensorBoard()
    killed.started(folder=tmp_path, steps=6, done=0)
    record(killed, 1, 2, 3, 4, loss=1.0)
    lines(tmp_path, 1, 2, loss=1.0)  # what the checkpoint after step 2 knows
    again = TensorBoard()
    again.started(folder=tmp_path, steps=6, done=2)
    record(again, 3, 4, 5, loss=0.5)
    again.finished()
    killed.finished()
    assert events(tmp_path)["loss/train"] == [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.5)]


def test_without_tensorboard_one_line_names_the_command_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    print_once.cache_clear()
    board = TensorBoard()
    board.started(folder=tmp_path, steps=2, done=0)
    record(board, 1, loss=0.5)
    board.finished()
    board.started(folder=tmp_path / "next", steps=2, done=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install '.[train]'" in line
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / EVENTS_FOLDER).write_text("a file")
    with pytest.raises(TrainingError, match=f"{EVENTS_FOLDER}: cannot be written: "):
        TensorBoard().started(folder=tmp_path, steps=1, done=0)


def test_training_and_validation_have_one_color_each_whatever_is_recorded_first():
    validated = {"split": "val", "step": 0, "loss": 2.0, "top1": 10.0}
    trained = {"split": "train", "step": 1, "loss": 2.0, "lr": 0.1}
    for recorded in ([validated, trained], [trained, validated], [validated]):
        for chart in curves(recorded):
            colors = {drawn.line.name: drawn.color for drawn in chart.drawing().lines}
            assert colors.items() <= {"train": 0, "validation": 1}.items()

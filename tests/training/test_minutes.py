"""Runs that fit: into a number of minutes by measurement, and into memory by splitting the batch."""

import importlib
import math
import time
from types import SimpleNamespace

import pytest
import torch
from making_weights import TINY_RECIPE, tiny_weights
from runs import TINY, identical, weights

import vitruvian.training.planning as planning
from vitruvian.errors import VitruvianError
from vitruvian.training import Listener, loop, read_recipe, resume, train
from vitruvian.training.finetune import protocol_for
from vitruvian.training.loop import Trainer
from vitruvian.training.planning import fit_minutes, plan
from vitruvian.training.recipe import change_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture
def clock(monkeypatch):
    """Measured seconds of a step, and of an evaluation of one image; freezing and small images are cheaper."""
    cost = {"step": 1.0, "image": 0.0, "bytes": 100}

    def steps(trainer, batches, *, seconds):
        next(batches)
        trained = sum(p.requires_grad for p in trainer.model.parameters()) / len(list(trainer.model.parameters()))
        side = trainer.augment.image_size[0] / 8
        return 2, cost["step"] * trained * side**2, cost["bytes"]

    monkeypatch.setattr(planning, "measure_steps", steps)
    monkeypatch.setattr(planning, "measure_evaluation", lambda trainer, batches: cost["image"])
    monkeypatch.setattr(planning, "available_bytes", lambda device: math.inf)
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # the measurement takes no time
    return cost


def recipe_from(base, *settings):
    recipe = read_recipe("finetune-small").replace(weights=str(base))
    return change_recipe(recipe, [*TINY_RECIPE[1:], "epochs=6", "eval_every=0", "train_scale=1", *settings])


@pytest.mark.parametrize(("minutes", "steps"), [(100, 264), (4, 216), (2, 108)])  # 44 steps an epoch, 54 s a minute
def test_the_steps_fill_the_time_but_are_never_more_than_the_recipes(base, clock, minutes, steps):
    recipe, notes = fit_minutes("digits", recipe_from(base), minutes)
    assert (recipe.steps, recipe.epochs) == (steps, 0)
    assert (recipe.freeze_layers, recipe.image_size) == (0, 8)
    assert notes[0].startswith(f"minutes={minutes}: {recipe.steps} steps ({recipe.steps / 44:.3g} epochs)")


def test_evaluations_take_their_part_of_the_time(base, clock):
    clock["image"] = 0.1  # 359 images: 35.9 s
    assert fit_minutes("digits", recipe_from(base), 4)[0].steps == 180
    assert fit_minutes("digits", recipe_from(base, "eval_every=1"), 4)[0].steps == 107


def test_a_run_that_would_be_too_short_is_made_cheaper(base, clock, monkeypatch):
    recipe, notes = fit_minutes("digits", recipe_from(base), 1)
    assert recipe.freeze_layers > 0
    assert any(note.startswith(f"to meet the time limit: freeze_layers={recipe.freeze_layers:g}") for note in notes)
    measured = []
    monkeypatch.setattr(
        planning, "plan", lambda *arguments, **more: measured.append(plan(*arguments, **more)) or measured[-1]
    )
    again, _ = fit_minutes("digits", recipe_from(base), 1)
    assert (again, len(measured)) == (recipe, 2)  # only the change that is chosen is measured
    kept, _ = fit_minutes("digits", recipe_from(base), 1, {"freeze_layers"})
    assert (kept.freeze_layers, kept.steps) == (0, 54)


def test_a_batch_that_does_not_fit_the_memory_is_split(base, clock, monkeypatch):
    monkeypatch.setattr(planning, "available_bytes", lambda device: 1e6)
    clock["bytes"] = 3_000_000
    recipe, notes = fit_minutes("digits", recipe_from(base), 10)
    assert recipe.grad_accum_steps == 4
    assert "grad_accum_steps=4: a batch needs 3.0 MB of memory" in notes


@pytest.mark.parametrize(("minutes", "text"), [(0.3, "minutes=0.3 is too short"), (-1, "minutes=-1 is not at least")])
def test_too_little_time_is_refused(base, clock, tmp_path, minutes, text):
    clock["image"] = 1.0
    with pytest.raises(VitruvianError, match=text):
        train("digits", base, recipe="finetune-small", settings=TINY_RECIPE[1:], minutes=minutes, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_time_and_steps_contradict_each_other(base, tmp_path):
    with pytest.raises(VitruvianError, match=r"minutes=?.* chooses the steps; leave out epochs, steps and auto_resume"):
        train("digits", base, minutes=1, steps=3, out=tmp_path / "run")


@pytest.mark.slow
def test_a_run_and_a_sweep_take_their_steps_from_the_time(base, clock, tmp_path):
    clock["step"] = 10.0
    settings = [*TINY_RECIPE[1:], "freeze_layers=0"]
    run = train("digits", base, recipe="finetune-small", settings=settings, minutes=1, out=tmp_path / "run")
    assert run.facts["steps"] == run.recipe.steps == 5
    protocol = protocol_for("digits", base, settings=settings, lrs=(1e-3, 1e-2), seeds=2)
    lines = []
    assert protocol.within(40, {"freeze_layers"}, lines.append).recipe.steps == 54
    assert "for each of 4 trials" in lines[0]


class Notes(Listener):
    def __init__(self):
        self.lines = []

    def said(self, text):
        self.lines.append(text)


def test_a_run_whose_steps_are_slower_than_measured_is_shortened_and_ends_in_time(base, clock, tmp_path, monkeypatch):
    now, step, notes = [0.0], Trainer.step, Notes()

    def slow(self, *batch):
        now[0] += 2.0  # 1.0 was measured
        return step(self, *batch)

    for module in (loop, importlib.import_module("vitruvian.training.train")):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime))
    monkeypatch.setattr(Trainer, "step", slow)
    more = {"recipe": "finetune-small", "settings": [*TINY_RECIPE[1:], "freeze_layers=0"], "listeners": [notes]}
    run = train("digits", base, minutes=1, out=tmp_path / "run", progress=False, **more)
    lines = run.metrics("train")
    assert run.facts["steps"] == run.recipe.steps == lines[-1]["step"] == now[0] / 2
    assert 20 <= lines[-1]["step"] < 57 / 2  # beside the evaluation, which takes no time here
    assert lines[-1]["lr"] < lines[0]["lr"] / 10
    assert any(line.startswith("to meet the time limit: ") and "steps instead of 54" in line for line in notes.lines)
    assert not run.damage()


@pytest.fixture
def small_memory(monkeypatch):
    """A machine on which more than 10 images at a time do not fit."""
    accumulate, limit = Trainer.accumulate, {"images": 10}

    def fail(self, parts, sums):
        if len(parts[0]) / min(self.grad_accum_steps, len(parts[0])) > limit["images"]:
            sums += 1  # what a part that fitted has left behind
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return accumulate(self, parts, sums)

    monkeypatch.setattr(Trainer, "accumulate", fail)
    return limit


@pytest.mark.slow
def test_running_out_of_memory_splits_the_batch_and_says_so(tmp_path, small_memory):
    notes = Notes()
    run = train("digits", out=tmp_path / "run", settings=TINY, listeners=[notes])
    said = "out of memory in step 1: splitting each batch into 4 parts (grad_accum_steps)"
    assert [line for line in notes.lines if "memory" in line] == [said]
    small_memory["images"] = math.inf
    split = train("digits", out=tmp_path / "split", settings=[*TINY, "grad_accum_steps=4"])
    assert identical(weights(run.folder), weights(split.folder))
    assert resume(run.folder).finished


def test_memory_that_is_too_small_for_one_image_ends_in_one_line(tmp_path, small_memory):
    small_memory["images"] = 0.5
    text = "out of memory with 1 of 32 images at a time; set a larger grad_accum_steps, a smaller image_size"
    with pytest.raises(VitruvianError, match=text):
        train("digits", out=tmp_path / "run", settings=TINY)

"""A run damaged in any one file ends with the bits of an unbroken run, or with one line that says why not."""

import json
import shutil

import pytest
from runs import TINY, StopAt, identical, lines, same_model, weights

from vitruvian.errors import VitruvianError
from vitruvian.training import Interrupted, Listener, Run, resume, train

SETTINGS = (*TINY, "checkpoint_steps=3", "final=best", "average=ema", "val_fraction=0.04", "eval_every=0.1")
UNCHECKED = {"report.html", ".lock"}
"""Files that nothing is read from."""


class Heard(Listener):
    def __init__(self):
        self.notes = []

    def said(self, text):
        self.notes.append(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train("digits", out=tmp_path_factory.mktemp("whole") / "run", settings=SETTINGS, progress=False)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(Interrupted):
        train("digits", out=folder, settings=SETTINGS, listeners=[StopAt(8)], progress=False)
    return Run(folder)


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(place):
    def flip(path):
        content = bytearray(path.read_bytes())
        if content:
            content[int(place * len(content))] ^= 1
        path.write_bytes(content)

    return flip


DAMAGES = {
    "truncated": truncated,
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "flipped at 1/10": flipped(0.1),
    "flipped at 1/2": flipped(0.5),
    "flipped at 9/10": flipped(0.9),
}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(run, whole):
    """What is wrong after a run has been continued; empty if nothing is."""
    before = contents(run.folder)
    try:
        done = resume(run, progress=False)
        same = same_model(done.folder, whole.folder) and lines(done.folder) == lines(whole.folder)
        measured = {k: v for k, v in done.evaluation.items() if k != "seconds"}
        expected = {k: v for k, v in whole.evaluation.items() if k != "seconds"}
        return "" if same and measured == expected else "ended as another run, without a word"
    except VitruvianError as error:
        lost = [str(name) for name, content in before.items() if content not in contents(run.folder).values()]
        return "a text of several lines" if "\n" in str(error) else f"lost {lost}" if lost else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def damaged(run, whole, folder, names):
    """Each damage of each file that did not end well."""
    found = []
    for number, (name, kind) in enumerate((name, kind) for name in names for kind in DAMAGES):
        copy = folder / str(number)
        shutil.copytree(run.folder, copy)
        DAMAGES[kind](copy / name)
        wrong = outcome(Run(copy), whole)
        found += [f"{name} {kind}: {wrong}"] if wrong else []
        shutil.rmtree(copy)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("state", ["begun", "whole"])
def test_a_run_damaged_in_any_file_ends_as_an_unbroken_one_or_with_a_line(tmp_path, whole, request, state):
    run = request.getfixturevalue(state)
    names = [name for name in contents(run.folder) if name.name not in UNCHECKED]
    assert {"run.json", "recipe.toml", "metrics.jsonl", "state.safetensors", "position.json"} <= {n.name for n in names}
    assert damaged(run, whole, tmp_path, names) == []


@pytest.mark.slow
def test_a_flipped_bit_in_the_last_checkpoint_is_said_and_the_one_before_taken(tmp_path, begun, whole):
    shutil.copytree(begun.folder, tmp_path / "run")
    flipped(0.9)(tmp_path / "run" / "checkpoints" / "step-00000008" / "state.safetensors")
    heard = Heard()
    done = resume(tmp_path / "run", listeners=[heard], progress=False)
    assert any("step-00000008 is damaged: state.safetensors has changed" in note for note in heard.notes)
    assert any("continuing from step 6" in note for note in heard.notes)
    assert same_model(done.folder, whole.folder)
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-00000008").is_dir()


@pytest.mark.parametrize("step", [-5, 10**9, "many"])
def test_a_position_that_cannot_be_is_not_gone_on_from(tmp_path, begun, whole, step):
    shutil.copytree(begun.folder, tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoints/*/position.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}))
    heard = Heard()
    done = resume(tmp_path / "run", listeners=[heard], progress=False)
    assert any("no checkpoint is intact: starting again from step 0" in note for note in heard.notes)
    assert same_model(done.folder, whole.folder)


@pytest.mark.parametrize(
    ("was", "now", "name"), [("steps = 12", "steps = 24", "steps"), ("lr = 0.003", "lr = 0.1", "lr")]
)
def test_a_changed_recipe_file_is_refused(tmp_path, begun, was, now, name):
    shutil.copytree(begun.folder, tmp_path / "run")
    path = tmp_path / "run" / "recipe.toml"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))
    with pytest.raises(VitruvianError, match=rf"recipe\.toml: {name}={was.split()[-1]} when the run began, not"):
        resume(tmp_path / "run", progress=False)
    path.write_text(path.read_text().replace(now, was).replace("workers = 0", "workers = 1"))
    assert Run(tmp_path / "run").recipe.workers == 1
    assert resume(tmp_path / "run", settings=["workers=0"], progress=False).finished


def test_a_report_that_fails_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.training.loop.write_report", lambda *_: 1 / 0)
    heard = Heard()
    run = train("digits", out=tmp_path / "run", settings=[*TINY, "steps=2"], listeners=[heard], progress=False)
    assert run.finished
    assert run.model().meta.labels is not None
    assert any(note.startswith("the report could not be written: ") for note in heard.notes)
    monkeypatch.undo()
    before = (run.folder / "result.json").read_bytes(), weights(run.folder)
    again = resume(run.folder, progress=False)
    assert (run.folder / "report.html").is_file()
    assert again.evaluation["top1"] == json.loads(before[0])["evaluation"]["top1"]
    assert identical(weights(run.folder), before[1])
    shutil.rmtree(run.checkpoints)
    (run.folder / "report.html").unlink()
    assert resume(run.folder, progress=False).finished  # nothing is trained anew for a report


def test_the_numbers_of_a_run_that_keeps_the_best_weights_are_theirs(tmp_path):
    settings = [*TINY, "final=best", "eval_every=0.05", "lr=0.3", "average=none", "monitor=loss", "schedule=constant"]
    run = train("digits", out=tmp_path / "run", settings=settings, progress=False)
    measured = run.metrics("val")
    best = min(measured, key=lambda line: line["loss"])
    assert best != measured[-1]
    assert run.evaluation["step"] == best["step"]
    assert run.result("loss", "top1") == {"loss": best["loss"], "top1": best["top1"]}

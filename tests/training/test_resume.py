"""A run that is stopped anywhere and continued ends as an unbroken one: all files of the model and its metrics."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from runs import STEM, TINY, StopAt, changes, identical, lines, same_model, weights
from safetensors.torch import load_file

from forked import Forked
from vitruvian.config import ViTConfig
from vitruvian.data.formats import open_dataset
from vitruvian.errors import TrainingError
from vitruvian.model.build import build
from vitruvian.training import Interrupted, Listener, Run, checkpoint, resume, train
from vitruvian.training.checkpoint import Checkpoints
from vitruvian.training.distributed import Processes
from vitruvian.weights.save import save

DEMANDING = (
    "architecture.dropout=0.1",
    "architecture.drop_path=0.1",
    "augment.mixup_alpha=0.2",
    "augment.cutmix_alpha=1.0",
    "augment.random_erasing=0.5",
    "average=ema",
    "patch_drop=0.25",
    "grad_accum_steps=2",
)
"""Everything that uses chance or memory."""


def whole(tmp_path, *settings):
    return train("digits", out=tmp_path / "whole", settings=[*TINY, *settings])


@pytest.mark.parametrize("step", [1, pytest.param(5, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_and_continued_equals_an_unbroken_one(tmp_path, step):
    expected = whole(tmp_path, *DEMANDING)
    with pytest.raises(Interrupted, match=f"stopped after step {step} of 12; continue with `vit train --resume"):
        train("digits", out=tmp_path / "run", settings=[*TINY, *DEMANDING], listeners=[StopAt(step)])
    continued = resume(tmp_path / "run")
    assert same_model(continued.folder, expected.folder)
    assert lines(continued.folder) == lines(expected.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    ["optimizer=sgd", "optimizer=adam", "optimizer=muon", "average=polyak", "precision=float16", "sam_rho=0.1"],
)
def test_every_optimizer_average_and_the_scaler_continue_exactly(tmp_path, choice):
    expected = whole(tmp_path, choice)
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=[*TINY, choice], listeners=[StopAt(7)])
    assert same_model(resume(tmp_path / "run").folder, expected.folder)


@pytest.mark.slow
def test_a_stem_with_running_statistics_continues_exactly(tmp_path):
    expected = whole(tmp_path, *STEM)
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=[*TINY, *STEM], listeners=[StopAt(7)])
    found = weights(resume(tmp_path / "run").folder)
    assert identical(found, weights(expected.folder))
    assert found["embed.stem.stages.0.0.norm.running_mean"].any()


@pytest.mark.slow
def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(tmp_path, monkeypatch):
    from vitruvian.training.loop import Loop

    expected = whole(tmp_path)
    measure = Loop.measure

    def stopping(loop, stop):
        stop.received = signal.SIGTERM
        return measure(loop, stop)

    monkeypatch.setattr(Loop, "measure", stopping)
    with pytest.raises(Interrupted, match="after step 9 of 12"):
        train("digits", out=tmp_path / "run", settings=TINY)
    monkeypatch.undo()
    assert not [line for line in lines(tmp_path / "run") if line["split"] == "val"]
    assert lines(resume(tmp_path / "run").folder) == lines(expected.folder)


def reached(run, step):
    return any(path.name >= f"step-{step:08d}" for path in run.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_an_unbroken_one(tmp_path):
    settings = ("steps=40", "checkpoint_steps=2", "eval_every=0.5", *DEMANDING)
    expected = whole(tmp_path, *settings)
    process = Forked("train", "digits", "--out", tmp_path / "run", *changes(*settings))
    ends = []
    for step in (4, 12, 20, 28):
        process.until(partial(reached, tmp_path / "run", step))
        time.sleep(random.random() / 20)
        ends.append(process.kill().code)
        process = Forked("train", "--resume", tmp_path / "run")
    assert process.wait().code == 0
    assert ends[0] == -signal.SIGKILL
    assert same_model(tmp_path / "run", expected.folder)
    assert lines(tmp_path / "run") == lines(expected.folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_exits_with_the_usual_code_and_says_how_to_continue(tmp_path, number, code):
    words = ("train", "digits", "--out", tmp_path / "run", *changes("steps=100000", "eval_every=1000"))
    process = Forked(*words).until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run"))
    ended = process.kill(number)
    assert ended.code == code
    assert f"continue with `vit train --resume {tmp_path / 'run'}`" in ended.err
    assert "Traceback" not in ended.err
    assert len(Checkpoints(tmp_path / "run" / "checkpoints", Processes()).all()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("async_checkpoint", ["true", "false"])
def test_a_process_killed_while_it_writes_a_checkpoint_leaves_the_last_one_whole(tmp_path, async_checkpoint):
    settings = ("checkpoint_steps=4", f"async_checkpoint={async_checkpoint}")
    expected = whole(tmp_path, *settings)

    replace = os.replace

    def killed_at_the_second(source, target):
        if Path(target).name == "step-00000008":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def deadly():
        checkpoint.os.replace = killed_at_the_second

    ended = Forked("train", "digits", "--out", tmp_path / "run", *changes(*settings), first=deadly).wait()
    assert ended.code == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [".step-00000008.tmp", "step-00000004"]
    assert same_model(resume(tmp_path / "run").folder, expected.folder)


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_step_it_is_named_after(tmp_path, monkeypatch):
    settings = ("checkpoint_steps=4", "keep_checkpoints=9")
    expected = whole(tmp_path, *settings, "async_checkpoint=false")
    written, later = checkpoint.save_file, threading.Event()

    def slow(tensors, path):
        if "step-00000004" in str(path):
            assert later.wait(60)
        written(tensors, path)

    class Later(Listener):
        def stepped(self, step):
            if step == 7:  # only reached if the write at step 4 has not stopped the steps
                later.set()

    monkeypatch.setattr(checkpoint, "save_file", slow)
    run = train("digits", out=tmp_path / "run", settings=[*TINY, *settings], listeners=[Later()])
    assert same_model(run.folder, expected.folder)
    found = [each.checkpoints / "step-00000004" / "state.safetensors" for each in (run, expected)]
    assert identical(*map(load_file, found))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays_whole(tmp_path):
    expected = whole(tmp_path, "checkpoint_steps=4").folder
    size = (expected / "checkpoints" / "step-00000012" / "state.safetensors").stat().st_size

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))

    words = ("train", "digits", "--out", tmp_path / "run", *changes("checkpoint_steps=4"))
    failed = Forked(*words, first=small_disk).wait()
    assert failed.code == 1
    assert failed.err.splitlines()[-1].startswith(f"error: {tmp_path / 'run' / 'checkpoints' / 'step-00000004'}")
    assert "cannot be written" in failed.err
    assert "File too large" in failed.err
    resume(tmp_path / "run")
    assert same_model(tmp_path / "run", expected)


def test_no_space_for_a_checkpoint_names_the_one_that_is_whole(tmp_path, monkeypatch):
    written = checkpoint.save_file

    def full(tensors, path):
        if "step-00000008" in str(path):
            raise OSError(28, "No space left on device")
        written(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingError, match=r"No space left on device; step-00000004 is intact: fix this and continue"):
        train("digits", out=tmp_path / "run", settings=[*TINY, "checkpoint_steps=4"])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(tmp_path):
    run = train("digits", out=tmp_path / "run", settings=[*TINY, "checkpoint_steps=2", "keep_checkpoints=3"])
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000010",
        "step-00000012",
    ]


def test_a_finished_run_keeps_its_model_and_the_last_checkpoint_alone(tmp_path):
    run = train("digits", out=tmp_path / "run", settings=[*TINY, "checkpoint_seconds=0"])
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000012"]
    assert not (run.folder / "best").exists()


def test_a_new_run_is_refused_where_there_is_one(tmp_path):
    run = whole(tmp_path)
    with pytest.raises(TrainingError, match="this folder already contains a run; continue it with `vit train --resume"):
        train("digits", out=run.folder, settings=TINY)


@pytest.mark.slow
def test_one_command_begins_a_run_and_continues_it(tmp_path):
    expected = whole(tmp_path)
    words = {"out": tmp_path / "run", "auto_resume": True}
    with pytest.raises(Interrupted):
        train("digits", settings=TINY, listeners=[StopAt(5)], **words)
    with pytest.raises(TrainingError, match=r"run: lr=.* when the run began, not 0\.5; use the same settings"):
        train("digits", settings=[*TINY, "lr=0.5"], **words)
    run = train("digits", settings=[*TINY, "checkpoint_steps=2"], **words)
    assert same_model(run.folder, expected.folder)
    assert train("digits", settings=TINY, **words) == run
    with pytest.raises(TrainingError, match="auto_resume needs out="):
        train("digits", settings=TINY, auto_resume=True)


def test_a_finished_run_is_left_alone(tmp_path):
    run = whole(tmp_path)
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert resume(run.folder) == run
    with pytest.raises(TrainingError, match=r"'lr=1' cannot be changed when resuming"):
        resume(run.folder, settings=["lr=1"])
    with pytest.raises(
        TrainingError, match=r"the run has finished, so 'workers=1' has no effect; to train longer, resume"
    ):
        resume(run.folder, settings=["workers=1"])
    with pytest.raises(TrainingError, match=r"has finished 12 steps .*; pass more epochs or steps to train longer"):
        resume(run.folder, settings=["steps=12"])
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    assert run.finished


@pytest.mark.slow
def test_a_finished_run_is_trained_longer_and_can_be_interrupted_again(tmp_path):
    whole(tmp_path, *DEMANDING)
    shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    longer = resume(tmp_path / "whole", settings=["steps=20"])
    assert (longer.recipe.steps, longer.facts["steps"], longer.evaluation["step"]) == (20, 20, 20)
    training = longer.metrics("train")
    assert training[-1]["step"] == 20
    assert training[-1]["lr"] < training[-2]["lr"]  # decays over the added steps
    assert training[4]["lr"] > training[3]["lr"]  # step 15 of 20, after step 12 of 12
    with pytest.raises(Interrupted):
        resume(tmp_path / "copy", settings=["steps=20"], listeners=[StopAt(15)])
    with pytest.raises(TrainingError, match="resume the run to its end first, then train longer with steps=30"):
        resume(tmp_path / "copy", settings=["steps=30"])
    again = resume(tmp_path / "copy")
    assert same_model(again.folder, longer.folder)
    assert lines(again.folder) == lines(longer.folder)


@pytest.mark.slow
def test_the_best_weights_so_far_count_when_a_run_is_trained_longer(tmp_path):
    whole(tmp_path, "final=best", "val_fraction=0.3")
    longer = resume(tmp_path / "whole", settings=["steps=20"])
    best = max(longer.metrics("val"), key=lambda line: line["top1"])
    assert longer.evaluation["top1"] == best["top1"]


def test_a_run_that_explodes_stops_and_keeps_its_best_weights(tmp_path):
    settings = [*TINY, "steps=60", "schedule=constant", "eval_every=0.05", "optimizer=sgd", "log_every=1"]
    with pytest.raises(TrainingError, match=r"training diverged: the loss was .*; try a lower lr") as error:
        train("digits", out=tmp_path / "run", settings=[*settings, "lr=1000", "warmup=50"])
    run = Run.open(tmp_path / "run")
    assert f"saved the weights of step {run.evaluation['step']}, the best so far, in {run.folder}" in str(error.value)
    assert run.finished
    assert run.diverged.startswith("training diverged")
    before = {line["step"]: line["top1"] for line in run.metrics("val")[:-1]}  # the last evaluation may have stopped it
    assert run.evaluation["top1"] == before[run.evaluation["step"]]
    assert run.model().eval()
    with pytest.raises(TrainingError, match=r"this run diverged \(training diverged.*start a new run from it"):
        resume(run.folder, settings=["steps=90"])


def test_a_run_that_explodes_before_its_first_evaluation_saves_nothing(tmp_path):
    with pytest.raises(TrainingError, match="no weights were saved"):
        train("digits", out=tmp_path / "run", settings=[*TINY, "lr=1000", "optimizer=sgd", "eval_every=0"])
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=TINY, listeners=[StopAt(2)])
    other = open_dataset("digits")
    fewer = replace(other, splits={"train": other.splits["test"], "test": other.splits["test"]})
    with pytest.raises(TrainingError, match="the training images were 1438 and are now 359; restore it"):
        resume(tmp_path / "run", data=fewer)


def test_a_run_goes_on_with_other_workers_but_not_with_another_rate(tmp_path):
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=TINY, listeners=[StopAt(2)])
    with pytest.raises(TrainingError, match=r"'lr=1' cannot be changed when resuming, only async_checkpoint"):
        resume(tmp_path / "run", settings=["lr=1"])
    assert resume(tmp_path / "run", settings=["checkpoint_steps=3"]).finished


def test_what_is_not_a_run_cannot_be_continued(tmp_path):
    with pytest.raises(TrainingError, match=r"not a training run: it has no run\.json"):
        Run.open(tmp_path)
    with pytest.raises(TrainingError, match="no such folder"):
        Run.open(tmp_path / "nothing")


@pytest.mark.slow
def test_a_run_goes_on_when_the_weights_it_started_from_are_gone(tmp_path):
    start = whole(tmp_path, "steps=2")
    settings = ["steps=6", "batch_size=32", "workers=0", "warmup=0"]
    expected = train("digits", weights=start.folder, out=tmp_path / "expected", settings=settings)
    with pytest.raises(Interrupted):
        train("digits", weights=start.folder, out=tmp_path / "run", settings=settings, listeners=[StopAt(3)])
    shutil.rmtree(start.folder)
    assert same_model(resume(tmp_path / "run").folder, expected.folder)


def test_a_resumed_run_keeps_the_name_that_the_weights_have_in_their_family(tmp_path):
    model = build(ViTConfig(image_size=8, patch_size=4, num_classes=3, depth=1, width=16, mlp_dim=16, num_heads=2))
    model.meta = model.meta.replace(known_as="timm:vit_base_patch16_224")
    save(model, tmp_path / "weights")
    settings = ["steps=4", "batch_size=32", "workers=0", "warmup=0", "head_init=zero"]
    expected = train("digits", weights=tmp_path / "weights", out=tmp_path / "expected", settings=settings)
    with pytest.raises(Interrupted):
        train("digits", weights=tmp_path / "weights", out=tmp_path / "run", settings=settings, listeners=[StopAt(2)])
    assert same_model(resume(tmp_path / "run").folder, expected.folder)
    assert expected.model().meta.known_as == "timm:vit_base_patch16_224"

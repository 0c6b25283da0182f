"""Two processes of torchrun (with gloo) learn what one learns, and can take over from each other."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import changes, command, lines, vit_train, weights

pytestmark = pytest.mark.slow

SETTINGS = (
    "grad_accum_steps=2",
    "grad_clip=1",
    "average=ema",
    "eval_every=0.1",
    "log_every=1",
    "augment.mixup_alpha=0.2",
)


def curve(run, split="train"):
    return [line["loss"] for line in lines(run) if line["split"] == split]


def started(folder, *settings, processes):
    done = vit_train("digits", "--out", folder, *changes(*SETTINGS, *settings), processes=processes)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return started(tmp_path_factory.mktemp("alone") / "run", processes=1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_with_half_the_batch_each_learn_what_one_learns(tmp_path, alone, parallel):
    run = started(tmp_path / "run", f"parallel={parallel}", processes=2)
    # Float32 gradients summed in another order differ in the last bits; twelve steps of Adam make that a little more.
    assert curve(run) == pytest.approx(curve(alone), rel=2e-4)
    assert curve(run, "val") == pytest.approx(curve(alone, "val"), rel=2e-4)
    found, expected = weights(run), weights(alone)
    for name, tensor in expected.items():
        assert found[name].sub(tensor).abs().max() < 2e-3, name


def test_two_processes_count_every_validation_image_once(tmp_path, alone):
    run = started(tmp_path / "run", "eval_batch_size=50", processes=2)  # 359 images: the last batch has 9
    assert [line["count"] for line in lines(run) if line["split"] == "val"] == [359, 359, 359]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, alone, first, then, parallel):
    run = tmp_path / "run"
    words = ("digits", "--out", run, *changes(*SETTINGS, f"parallel={parallel}", "checkpoint_steps=6"))
    assert vit_train(*words, processes=first).returncode == 0
    rewind(run, step=6)
    done = vit_train("--resume", run, processes=then)
    assert done.returncode == 0, done.stderr
    assert curve(run) == pytest.approx(curve(alone), rel=2e-4)
    assert len(curve(run)) == 12


def rewind(run, *, step):
    """Make a finished run one that was killed after its checkpoint at this step."""
    import shutil

    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    position = json.loads((run / "checkpoints" / f"step-{step:08d}" / "position.json").read_text())
    assert position["step"] == step


def test_a_process_that_dies_ends_the_job_with_a_clear_message(tmp_path):
    words = command("digits", "--out", tmp_path / "run", *changes("steps=1000000", "eval_every=10000"), processes=2)
    job = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run"):
        assert job.poll() is None
        time.sleep(0.1)
    os.kill(child_of(job.pid, rank=1), signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "error: process 0 lost the others, one of the 2 has died; its own messages tell why" in errors


def child_of(parent, *, rank):
    """The process of this rank below a torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f" {parent} " in (folder / "stat").read_text()
                and f"\0RANK={rank}\0" in (folder / "environ").read_text()
            ):
                return int(folder.name)
        except OSError:
            pass
    raise AssertionError("no such process")


def test_a_job_that_is_asked_to_stop_can_be_continued(tmp_path):
    settings = changes("steps=1000000", "eval_every=10000")
    job = subprocess.Popen(command("digits", "--out", tmp_path / "run", *settings, processes=2))
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run"):
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) != 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert json.loads((checkpoint / "position.json").read_text())["step"] % 10 == 0

"""Two processes (with gloo) learn what one learns, and can take over from each other."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import torch
from runs import TINY, changes, command, lines, weights
from test_resume import STEM, StopAt

from forked import ranks
from vitruvian.training import Interrupted, resume, train

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


def in_two(*words):
    """`vit train` with these words in two processes."""
    for process in ranks("train", *words):
        ended = process.wait()
        assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    settings = [*TINY, *SETTINGS, "checkpoint_steps=6"]
    return train("digits", out=tmp_path_factory.mktemp("alone") / "run", settings=settings, progress=False).folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request, tmp_path_factory):
    settings = changes(*SETTINGS, "checkpoint_steps=6", "eval_batch_size=50", f"parallel={request.param}")
    run = tmp_path_factory.mktemp(request.param) / "run"
    in_two("digits", "--out", run, *settings)
    return run


def test_two_processes_with_half_the_batch_each_learn_what_one_learns(together, alone):
    # Float32 gradients summed in another order differ in the last bits; twelve steps of Adam make that a little more.
    assert curve(together) == pytest.approx(curve(alone), rel=2e-4)
    assert curve(together, "val") == pytest.approx(curve(alone, "val"), rel=2e-4)
    found, expected = weights(together), weights(alone)
    for name, tensor in expected.items():
        assert found[name].sub(tensor).abs().max() < 2e-3, name
    # Batches of 50: the last of the 359 images' has 9. Each image counts once.
    assert [line["count"] for line in lines(together) if line["split"] == "val"] == [359, 359, 359]


def test_one_process_goes_on_where_two_were(tmp_path, together, alone):
    rewind(together, tmp_path / "run", step=6)
    resume(tmp_path / "run", progress=False)
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), rel=2e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_go_on_where_one_was(tmp_path, alone, parallel):
    settings = [*TINY, *SETTINGS, f"parallel={parallel}"]
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=settings, listeners=[StopAt(6)], progress=False)
    in_two("--resume", tmp_path / "run")
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), rel=2e-4)


def rewind(finished, run, *, step):
    """A copy of a finished run as one that was killed after its checkpoint at this step."""
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    assert json.loads((run / "checkpoints" / f"step-{step:08d}" / "position.json").read_text())["step"] == step


def has_begun(run):
    return (run / "metrics.jsonl").exists() and lines(run)


def test_a_process_that_dies_ends_the_job_with_a_clear_message(tmp_path):
    words = ("train", "digits", "--out", tmp_path / "run", *changes("steps=1000000", "eval_every=10000"))
    first, second = ranks(*words)
    first.until(lambda: has_begun(tmp_path / "run"))
    second.kill()
    ended = first.wait()
    assert ended.code == 1
    assert "error: process 0 lost the others, one of the 2 has died; its own messages tell why" in ended.err


def test_a_job_of_torchrun_that_is_asked_to_stop_can_be_continued(tmp_path):
    settings = changes("steps=1000000", "eval_every=10000")
    job = subprocess.Popen(command("digits", "--out", tmp_path / "run", *settings, processes=2))
    while not has_begun(tmp_path / "run"):
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) != 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert json.loads((checkpoint / "position.json").read_text())["step"] % 10 == 0


def test_running_statistics_and_orthogonal_steps_are_the_same_however_the_model_is_spread(tmp_path):
    settings = (*STEM, "steps=4", "log_every=1", "eval_every=0")
    for parallel in ("ddp", "fsdp"):
        in_two("digits", "--out", tmp_path / parallel, *changes(*settings, f"parallel={parallel}"))
    found, expected = (weights(tmp_path / parallel) for parallel in ("fsdp", "ddp"))
    assert expected["embed.stem.stages.0.0.norm.running_mean"].any()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3, msg=name)

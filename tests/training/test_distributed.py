"""Two processes (with gloo) learn what one learns, and can take over from each other."""

import json
import os
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from runs import STEM, TINY, StopAt, changes, command, lines, same_model, weights

from forked import Forked, patience, ranks
from vitruvian.evaluation.features import compute_features
from vitruvian.training import Interrupted, distributed, initial_model, resume, train

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


def in_two(*words, count=2):
    """`vit train` with these words in two processes, or more."""
    for process in ranks("train", *words, count=count):
        ended = process.wait()
        assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    settings = [*TINY, *SETTINGS, "checkpoint_steps=6"]
    return train("digits", out=tmp_path_factory.mktemp("alone") / "run", settings=settings, progress=False).folder


@pytest.fixture(scope="module", params=["ddp", "fsdp", "hsdp"])
def together(request, tmp_path_factory):
    """Two processes; with `hsdp` two copies of the model, each in two parts."""
    settings = ["checkpoint_steps=6", "eval_batch_size=50", f"parallel={request.param}", "shard_size=2"]
    run = tmp_path_factory.mktemp(request.param) / "run"
    in_two("digits", "--out", run, *changes(*SETTINGS, *settings), count=4 if request.param == "hsdp" else 2)
    return run


def test_processes_with_parts_of_the_batch_learn_what_one_learns(together, alone):
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


def test_as_many_processes_go_on_to_the_same_bits(tmp_path, together):
    rewind(together, tmp_path / "run", step=6)
    in_two("--resume", tmp_path / "run", count=4 if "hsdp" in str(together) else 2)
    assert same_model(tmp_path / "run", together)
    assert lines(tmp_path / "run") == lines(together)


def last_lines(processes):
    ended = [process.wait() for process in processes]
    assert {each.code for each in ended} == {1}, ended
    return [each.err.splitlines()[-1] for each in ended]


def test_two_processes_compute_the_features_that_a_head_is_fitted_to_once(tmp_path, monkeypatch):
    def counted(*words, **settings):
        found = compute_features(*words, **settings)
        with open(tmp_path / "computed", "a") as file:
            print(found.computed, file=file)
        return found

    settings = ("steps=3", "eval_every=0", "log_every=1", "head_init=probe")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "one"))
    expected = train("digits", out=tmp_path / "alone", settings=[*TINY, *settings], progress=False)
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "two"))
    monkeypatch.setattr(initial_model, "compute_features", counted)
    in_two("digits", "--out", tmp_path / "run", *changes(*settings))
    assert sorted(map(int, (tmp_path / "computed").read_text().split())) == [0, 0, 719, 719]
    assert curve(tmp_path / "run") == pytest.approx(curve(expected.folder), rel=2e-4)


def test_processes_with_different_settings_are_refused(tmp_path):
    words = [("digits", "--out", tmp_path / "run", *changes(f"lr={lr}")) for lr in (0.001, 0.002)]
    for said in last_lines(ranks("train", each=words)):
        assert "has lr=0.002, process 0 on " in said
        assert said.endswith("has 0.001; start every machine with the same command, data and version")
    assert not (tmp_path / "run").exists()


def test_machines_that_do_not_share_the_folder_of_the_run_are_named(tmp_path, monkeypatch):
    seen = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: os.environ.get("RANK") != "1" and seen(path))
    words = ("digits", "--out", tmp_path / "run", *changes())
    assert "process 1 on " in (said := last_lines(ranks("train", *words))[0])
    assert "does not see the files that process 0 has written; the folder of a run must be on a file system" in said


def test_a_meeting_point_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=1))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"}
    said = Forked("train", "digits", "--out", tmp_path / "run", *changes(), env=env).wait().err.splitlines()[-1]
    assert said.startswith("error: process 1 of 2 cannot reach the others through 127.0.0.1:9: ")
    assert said.endswith("start all of them, and make sure that every machine can reach this address")


def test_a_batch_that_the_processes_do_not_divide_says_what_they_do(tmp_path):
    words = ("digits", "--out", tmp_path / "run", *changes("batch_size=31"))
    for said in last_lines(ranks("train", *words)):
        assert "batch_size=31 is not divisible by the 2 processes; use 30 or 32, or another number of" in said


def test_groups_that_do_not_divide_the_processes_are_refused(tmp_path):
    words = ("digits", "--out", tmp_path / "run", *changes("parallel=hsdp", "shard_size=3"))
    for said in last_lines(ranks("train", *words)):
        assert said.endswith("2 processes are not divisible by shard_size=3")


def has_begun(run):
    return (run / "metrics.jsonl").exists() and lines(run)


def test_a_process_that_dies_ends_the_job_with_a_clear_message(tmp_path):
    words = ("train", "digits", "--out", tmp_path / "run", *changes("steps=1000000", "eval_every=10000"))
    first, second = ranks(*words)
    first.until(lambda: has_begun(tmp_path / "run"))
    second.kill()
    ended = first.wait()
    assert ended.code == 1
    assert "error: process 0 lost the connection: one of the 2 processes has died, see its messages" in ended.err


def test_a_job_of_torchrun_that_is_asked_to_stop_can_be_continued(tmp_path):
    settings = changes("steps=1000000", "eval_every=10000")
    job = subprocess.Popen(command("digits", "--out", tmp_path / "run", *settings, processes=2))
    try:
        for _ in patience(120):
            assert job.poll() is None
            if has_begun(tmp_path / "run"):
                break
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) != 0
    finally:
        job.kill()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert json.loads((checkpoint / "position.json").read_text())["step"] % 10 == 0


def test_processes_whose_torchrun_is_killed_write_a_checkpoint_and_end(tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    with open(log, "w") as file:
        settings = changes("steps=1000000", "eval_every=10000")
        job = subprocess.Popen(command("digits", "--out", run, *settings, processes=2), stdout=file, stderr=file)
    end, workers = time.monotonic() + 240, []
    try:
        while not has_begun(run):
            assert job.poll() is None
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        job.kill()
        while log.read_text().count("stopped after step") < 1 or any(map(lives, workers)):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
    finally:
        job.kill()
        job.wait(60)
        for pid in filter(lives, workers):
            os.kill(int(pid), signal.SIGKILL)
    assert len(workers) == 2
    assert "torchrun's agent has ended: stopping" in log.read_text()
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert f"stopped after step {int(checkpoint.name[5:])} " in log.read_text()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_running_statistics_and_orthogonal_steps_are_the_same_however_the_model_is_spread(tmp_path):
    settings = (*STEM, "steps=4", "log_every=1", "eval_every=0")
    for parallel in ("ddp", "fsdp"):
        in_two("digits", "--out", tmp_path / parallel, *changes(*settings, f"parallel={parallel}"))
    found, expected = (weights(tmp_path / parallel) for parallel in ("fsdp", "ddp"))
    assert expected["embed.stem.stages.0.0.norm.running_mean"].any()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


def test_sgd_takes_the_same_steps_however_the_model_is_spread(tmp_path):
    settings = ("steps=3", "log_every=1", "eval_every=0", "optimizer=sgd", "lr=0.01", "momentum=0.9")
    for parallel in ("ddp", "fsdp"):
        in_two("digits", "--out", tmp_path / parallel, *changes(*settings, f"parallel={parallel}"))
    assert curve(tmp_path / "fsdp") == pytest.approx(curve(tmp_path / "ddp"), rel=1e-4)  # sums in another order

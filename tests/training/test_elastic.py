"""Two torchrun agents as two machines: one joins the other, one is killed, and the loss curve goes on."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import TINY, changes, lines

from vitruvian.training import train

pytestmark = pytest.mark.slow

STEPS = 40
SETTINGS = (f"steps={STEPS}", "log_every=1", "eval_every=0.5", "checkpoint_steps=4", "workers=0")
SECONDS = 240
"""After which something counts as never happening, on however slow a machine."""

NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it the first agent tells a machine that joins later no address, which then waits in vain."""

WORKER = """
import os, time
from pathlib import Path
from vitruvian.cli.app import main
from vitruvian.training.loop import Loop

agree_on_checkpoint = Loop.agree_on_checkpoint

def paced(self, stop):
    together = os.environ["GROUP_WORLD_SIZE"] == "2"
    if not Path(os.environ["TOLD"], "lost").exists() and self.position.step >= (20 if together else 6):
        time.sleep(2)
    return agree_on_checkpoint(self, stop)

Loop.agree_on_checkpoint = paced
main()
"""
"""`vit` that takes its time from step 6 on until a second machine joins, and from step 20 on until that is lost."""


class Machine:
    """A torchrun agent with a cache folder of its own."""

    def __init__(self, number, tmp_path, port, processes, *words):
        worker = tmp_path / "worker.py"
        worker.write_text(WORKER)
        self.cache, self.log = tmp_path / f"cache{number}", tmp_path / f"log{number}"
        meeting = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=elastic --local-addr=127.0.0.1"
        waits = "join_timeout=240,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
        waits += f",is_host={number == 0}"  # else whoever is there first holds what the other needs
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={processes}"]
        program += ["--max-restarts=3", "--monitor-interval=0.1", *meeting.split(), f"--rdzv-conf={waits}"]
        environment = {"VITRUVIAN_CACHE": self.cache, "TOLD": tmp_path, "OMP_NUM_THREADS": 1, NO_SHARING: 1}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*program, str(worker), *map(str, words)],
                env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                stdout=log,
                stderr=log,
            )

    def until(self, happened):
        end = time.monotonic() + SECONDS
        while not happened():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"it never happened: {self.log.read_text()}"
            time.sleep(0.05)

    def kill(self):
        """As if the power failed: the agent and its processes."""
        workers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in (self.process.pid, *map(int, workers)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def alone(bucket, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    return train(bucket, recipe="digits", out=run, settings=[*TINY, *SETTINGS], progress=False).folder


# fsdp alone continues with more and fewer processes in test_distributed.py
@pytest.mark.parametrize(("parallel", "processes", "joins"), [("ddp", 1, "later"), ("hsdp", 2, "at once")])
def test_a_machine_joins_and_dies_and_the_curve_is_that_of_an_unbroken_run(
    bucket, alone, tmp_path, parallel, processes, joins
):
    run = tmp_path / "run"
    words = ["train", bucket, "--recipe", "digits", "--out", run, "--auto-resume"]
    words += changes(*SETTINGS, f"parallel={parallel}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [Machine(0, tmp_path, port, processes, *words)]
    try:
        if joins == "later":
            machines[0].until((run / "checkpoints" / "step-00000004").exists)
        machines.append(Machine(1, tmp_path, port, processes, *words))
        machines[0].until((run / "checkpoints" / "step-00000020").exists)
        machines[1].kill()
        (tmp_path / "lost").touch()
        assert machines[0].process.wait(SECONDS) == 0, machines[0].log.read_text()
    finally:
        for machine in machines:
            if machine.process.poll() is None:
                machine.kill()
    found, expected = ([line for line in lines(each) if line["split"] == "train"] for each in (run, alone))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    # gradients are summed in another order by another number of processes
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-3)
    for machine in machines:
        assert list(machine.cache.rglob("*.tar")), "each machine keeps the shards it reads"

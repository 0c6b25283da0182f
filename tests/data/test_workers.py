"""Batches from worker processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from making import Numbers, decoded_transform, failing_transform, make_folder, make_shards, noisy_transform

from forked import Forked
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Loader
from vitruvian.data.sources import hold_out
from vitruvian.errors import DataError


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a.pixels, b.pixels)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.indices, b.indices)
        and torch.equal(a.weights, b.weights)
        and a.unreadable == b.unreadable
        for a, b in zip(first, second)
    )


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        pytest.param({}, 3, marks=pytest.mark.slow),
        ({"sampling": "balanced", "repeats": 2}, 1),
        ({"training": False}, 2),
    ],
)
@pytest.mark.slow
def test_batches_are_the_same_from_any_number_of_workers(settings, workers):
    source = Numbers(100, broken=[3, 60])

    def epochs(workers):
        settings_here = {"batch_size": 8, "seed": 1, "training": True, **settings, "workers": workers}
        with Loader(source, transform=noisy_transform, **settings_here) as loader:
            return [*loader.batches(0), *loader.batches(1, start=2)]

    assert equal(epochs(0), epochs(workers))


@pytest.mark.slow
def test_real_sources_travel_to_the_workers(tmp_path):
    make_folder(tmp_path / "photos", each=10)
    make_shards(tmp_path / "shards", shards=4)
    for data in (tmp_path / "photos", tmp_path / "shards", f"file://{tmp_path}/shards"):
        train, _ = hold_out(open_dataset(data).train, 0.2, 0)
        batches = []
        for workers in (0, 2):
            with Loader(train, transform=decoded_transform, batch_size=4, training=True, workers=workers) as loader:
                batches.append(list(loader.batches(0)))
        assert equal(*batches)


def test_an_epoch_can_be_left_early():
    with Loader(Numbers(100), transform=noisy_transform, batch_size=5, training=True, workers=2) as loader:
        whole = list(loader.batches(0))
        for _ in loader.batches(0):
            break
        assert equal(list(loader.batches(0)), whole)


def test_the_global_generator_does_not_know_of_workers():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with Loader(Numbers(20), transform=noisy_transform, batch_size=5, training=True, workers=1) as loader:
        list(loader.batches(0))
        list(loader.batches(1))
    assert torch.equal(before, torch.get_rng_state())


def test_an_error_in_a_worker_is_one_line():
    with (
        Loader(Numbers(20), transform=failing_transform, batch_size=5, training=False, workers=1) as loader,
        pytest.raises(DataError, match=r"^number 0: the transform failed: ValueError: a mistake in the transform$"),
    ):
        list(loader.batches(0))


class Deadly(Numbers):
    def read(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported():
    with (
        Loader(Deadly(20), transform=noisy_transform, batch_size=5, training=False, workers=1) as loader,
        pytest.raises(DataError, match=r"^a data worker died \(.*use fewer workers$"),
    ):
        list(loader.batches(0))


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from making import Numbers, noisy_transform
from vitruvian.data.loader import Loader

if __name__ == "__main__":
    loader = Loader(Numbers(1000), transform=noisy_transform, batch_size=5, training=True, workers=1)
    batches = loader.batches(0)
    next(batches)
    import multiprocessing
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    {then}
"""


def start(tmp_path, then):
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(Path(__file__).parent), then=then))
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # where the tests run in the background of a shell, Ctrl-C is ignored, which a process hands down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return process, list(map(int, process.stdout.readline().split()))


def gone(processes, seconds=15.0):
    """Whether all these processes end in time."""
    end = time.monotonic() + seconds
    while any(alive(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def alive(process):
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(sign):
    def epoch():
        loader = Loader(Numbers(1000), transform=noisy_transform, batch_size=5, training=True, workers=1)
        next(loader.batches(0))
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)

    process = Forked(work=epoch)
    (worker,) = map(int, process.until(lambda: "\n" in process.printed()).printed().split())
    assert alive(worker)
    assert process.kill(sign).code == -sign
    assert gone([worker])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_workers_end_with_their_parent_at_ctrl_c(tmp_path):
    # Python misses an interrupt between its last look for signals and the call that sleeps: short sleeps look again.
    process, workers = start(tmp_path, "while True: time.sleep(0.05)")
    os.killpg(process.pid, signal.SIGINT)  # which reaches all processes of a terminal
    _, errors = process.communicate(timeout=60)
    assert gone(workers)
    assert errors.count("Traceback") == 1  # the parent's own


@pytest.mark.slow
def test_workers_leave_ctrl_c_to_the_parent(tmp_path):
    ready = "import signal; signal.signal(signal.SIGINT, lambda *_: None); print('ready', flush=True)"
    process, _ = start(tmp_path, ready + "; sys.stdin.readline(); print(sum(1 for _ in batches))")
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    output, errors = process.communicate("go on\n", timeout=30)
    assert (output.split(), errors) == (["199"], "")


@pytest.mark.slow
def test_an_unfinished_epoch_does_not_hold_up_the_end(tmp_path):
    process, workers = start(tmp_path, "pass")
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert gone(workers)

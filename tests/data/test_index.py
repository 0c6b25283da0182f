"""Peak memory does not grow with the number of samples."""

import subprocess
import sys
from pathlib import Path

import pytest
from making import png

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
from making import decoded_transform
from vitruvian.data.loader import Loader
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import hold_out

train, held = hold_out(open_dataset({manifest!r}).train, 0.1, 0)
for sampling in ("uniform", "balanced"):
    loader = Loader(train, transform=decoded_transform, batch_size=32, training=True, sampling=sampling)
    for batch in loader.batches(0, start=loader.steps_per_epoch - 20):
        assert len(batch) == 32
status = open("/proc/self/status").read()
print(len(train), status.split("VmHWM:")[1].split()[0])
"""


def peak_kilobytes(tmp_path, rows):
    """Of a process that compiles a manifest of so many rows, divides it and trains on parts of it."""
    manifest = tmp_path / f"{rows}.csv"
    with open(manifest, "w") as file:
        file.write("path,label,weight\n")
        # Long paths to few images: what is listed counts, not what is there.
        file.writelines(f"{'./' * (number % 10)}images/{number % 7}.png,{number % 100},2\n" for number in range(rows))
    script = SCRIPT.format(folder=str(Path(__file__).parent), manifest=str(manifest))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.stderr == ""
    count, peak = map(int, done.stdout.split())
    assert count == rows * 9 // 10
    return peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
def test_a_million_rows_take_no_more_memory_than_a_thousand(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(7):
        (tmp_path / f"images/{number}.png").write_bytes(png(number))
    few, many = peak_kilobytes(tmp_path, 1_000), peak_kilobytes(tmp_path, 1_000_000)
    # A list of a million paths would take 100 MB. What is allowed are the buffers for 16k rows at a time, which a
    # thousand rows do not fill, and the noise of the allocator.
    assert many - few < 5_000
    print(f"\npeak memory: {few / 1024:.0f} MB for a thousand rows, {many / 1024:.0f} MB for a million")

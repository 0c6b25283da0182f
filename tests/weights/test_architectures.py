"""Every architecture that the installed timm names is in our table, and one of each kind answers as timm's own code.

Also when it was read, written as a folder for timm, and loaded by timm's own code.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitruvian.weights.families.timm_variants import architectures

SCAN = Path(__file__).parents[2] / "benchmarks" / "architectures.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_one_of_each_kind_of_the_installed_timm_answers_as_timm_does():
    """In a process of its own: timm imports torchvision, in whose place the scan puts an empty module."""
    command = [sys.executable, str(SCAN), "trip", "each-kind"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *lines, counts = done.stdout.splitlines()
    assert [line for line in lines if ": agrees: " not in line and ": same: " not in line] == []
    numbers = {verdict: int(count) for count, verdict in (part.split() for part in counts.split(", "))}
    assert numbers["same"] > 3 * numbers["agrees"]  # most arrays are the very same
    assert len(lines) > 40


def test_the_table_names_no_part_that_is_not_known():
    assert {name: settings["other"] for name, settings in architectures().items() if "other" in settings} == {}
    assert len(architectures()) >= 267

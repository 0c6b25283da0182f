"""Every architecture that the installed timm names is in our table, and one of each kind answers as timm's own code.

Also when it was read, written as a folder for timm, and loaded by timm's own code.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitruvian.weights.families.timm_config import rows

pytestmark = pytest.mark.timeout(900)  # a scan takes a minute on free cores, and many on a busy machine
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def scanned(*words: str, script: str = "architectures.py") -> list[str]:
    """In a process of its own: timm imports torchvision, in whose place the scan puts an empty module."""
    command = [sys.executable, str(BENCHMARKS / script), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=840)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture(scope="module")
def of_each_kind() -> tuple[list[str], list[str]]:
    """The lines of `trip` and of `resized` for one architecture of each kind."""
    lines = scanned("trip+resized", "each-kind")
    end = next(i for i, line in enumerate(lines) if re.match(r"\d+ ", line)) + 1  # the counts of the first
    return lines[:end], lines[end:]


@pytest.mark.slow
@needs_timm
def test_one_of_each_kind_of_the_installed_timm_answers_as_timm_does(of_each_kind):
    *lines, counts = of_each_kind[0]
    assert [line for line in lines if ": agrees: " not in line and ": same: " not in line] == []
    numbers = {verdict: int(count) for count, verdict in (part.split() for part in counts.split(", "))}
    assert numbers["same"] > 3 * numbers["agrees"]  # most arrays are the very same
    assert len(lines) > 40


@pytest.mark.slow
@needs_timm
def test_one_of_each_kind_answers_as_timm_does_at_twice_the_side(of_each_kind):
    *lines, _ = of_each_kind[1]
    allowed = ": agrees: ", ": any size: ", ": not tried: ", ": timm cannot: "
    assert [line for line in lines if not any(each in line for each in allowed)] == []
    assert sum(": agrees: " in line for line in lines) > 30


@pytest.mark.slow
@needs_timm
def test_random_arguments_of_timm_are_read_as_timm_does_or_refused():
    *others, counts = scanned("100", script="odd_settings.py")
    assert others == []
    numbers = {verdict: int(count) for count, verdict in (part.split(" ", 1) for part in counts.split(", "))}
    assert numbers["agrees"] > 40


def test_the_table_names_no_part_that_is_not_known():
    assert [name for name, row in rows().items() if "unsupported" in row] == []
    assert len(rows()) >= 279

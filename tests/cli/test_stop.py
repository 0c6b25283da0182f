"""A command whose training is asked to stop says what was kept, and leaves with the signal's exit code."""

import signal

import pytest
import typer

from vitruvian.cli.stop import exit_when_stopped
from vitruvian.training.signals import Interrupted


def test_a_stopped_training_is_one_line_on_stderr_and_128_more_than_the_signal(capsys):
    with pytest.raises(typer.Exit) as left, exit_when_stopped():
        raise Interrupted("stopped after step 3 of 9", signal.SIGINT)
    assert left.value.exit_code == 130
    assert capsys.readouterr() == ("", "stopped after step 3 of 9\n")

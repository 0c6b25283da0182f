"""Progress is shown where it helps, never breaks the work, and tells the right time left."""

import io
import sys
import threading

import pytest

from vitruvian import progress
from vitruvian.progress import Progress, WorkSpeed, print_status, track
from vitruvian.text import PrintableStream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time under the control of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.wall)

    def work(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_quick_work_is_silent(capsys):
    assert list(track(range(5), 5, "images")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_where_stderr_is_no_terminal_a_line_is_printed_every_ten_seconds(capsys, clock):
    for _ in track(range(100), 100, "images"):
        clock.work(1.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "images: 10 of 100, 1 min 30 s left"
    assert len(lines) == 10


def test_on_a_terminal_a_bar_is_shown_after_two_seconds(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("a [bold] name", 100) as shown:
        clock.work(1.5)
        shown.update(1)
        assert sys.stderr.getvalue() == ""
        clock.work(1.5)
        shown.update(2)
        assert "a [bold] name" in sys.stderr.getvalue()
        assert "2 of 100" in sys.stderr.getvalue()
    assert progress._bars is None


def test_a_line_told_while_a_bar_is_shown_stays_above_it(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("images", 10) as outer, Progress("a download", 10, unit="bytes") as inner:
        clock.work(3.0)
        outer.update(1)
        inner.update(2)
        assert len(progress._bars.tasks) == 2
        print_status("something worth knowing")
    assert "something worth knowing\n" in sys.stderr.getvalue()
    assert progress._bars is None


def test_control_characters_do_not_reach_the_terminal_while_a_bar_is_shown(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", PrintableStream(terminal, ["a\nb"]))
    with Progress("images", 10) as shown:
        clock.work(3.0)
        shown.update(1)
        print_status("wrote a\nb\x1b]0;title\x07")
    assert "wrote a\\nb\\x1b]0;title\\x07\n" in terminal.getvalue()


def test_bytes_are_shown_as_such_also_where_their_number_is_not_known(capsys, clock):
    with Progress("a.npz", None, unit="bytes") as shown:
        clock.work(11.0)
        shown.update(3_400_000)
    assert capsys.readouterr().err == "a.npz: 3.4 MB\n"


@pytest.mark.parametrize("how", ["none", "closed", "broken"])
def test_work_goes_on_where_stderr_is_gone(monkeypatch, capsys, clock, how):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    gone = {"none": None, "closed": io.StringIO(), "broken": Broken()}[how]
    if how == "closed":
        gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    for _ in track(range(3), 3, "images"):
        clock.work(20.0)
    print_status("a note")
    assert capsys.readouterr().out == ""


def test_of_several_processes_the_first_alone_shows_progress(monkeypatch, capsys, clock):
    monkeypatch.setenv("RANK", "1")
    for _ in track(range(3), 3, "images"):
        clock.work(20.0)
    assert capsys.readouterr().err == ""


def test_the_time_left_counts_long_steps_that_are_work(clock):
    speed = WorkSpeed()
    for step in range(1, 101):
        clock.work(31.0 if step % 10 == 0 else 1.0)  # an evaluation after every tenth step
        speed.update(step)
    assert speed.left(200) == pytest.approx(400.0, rel=0.15)


def test_the_time_left_follows_the_recent_speed(clock):
    speed = WorkSpeed()
    for step in range(1, 2001):
        clock.work(10.0 if step < 1000 else 1.0)
        speed.update(step)
    assert speed.left(2100) == pytest.approx(100.0)


def test_before_anything_is_done_nothing_is_known(clock):
    speed = WorkSpeed(50)
    assert speed.left(100) is None
    clock.work(1.0)
    speed.update(51)
    assert speed.left(None) is None
    assert speed.left(100) == pytest.approx(49.0)


def test_what_is_waited_for_is_said_only_where_it_takes_long(monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(progress, "print_status", lambda text: (print(text), said.set()))
    monkeypatch.setattr(progress, "QUIET_SECONDS", 3600.0)
    with progress.waiting("the hub"):
        pass
    assert not said.is_set()
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with progress.waiting("the hub"):
        assert said.wait(60)
    assert capsys.readouterr().out == "the hub\n"


def test_a_log_has_no_lines_about_what_is_waited_for(monkeypatch):
    lines = []
    monkeypatch.setattr(progress, "_status_log", lines.append)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with progress.waiting("the fastest engine"):
        threading.Event().wait(0.2)
    assert lines == []

"""`vit demo`."""

import re

import numpy as np
import pytest

from vitruvian.cli.demo import draw, side_by_side


@pytest.mark.slow
def test_the_demo_trains_evaluates_predicts_and_names_the_report(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = vit("demo", "--out", "run", "--set", "epochs=1")
    assert code == 0
    assert re.search(r"accuracy [\d.]+%: \d+ mistakes in 359 digits", out)
    assert len(re.findall(r"\d, \d+%", out)) == 6
    assert "\n  cat.jpg: " in out
    assert "\n  run/report.html\n" in out
    assert (tmp_path / "run" / "report.html").is_file()
    assert "\n  run/demo.html\n" in out
    page = (tmp_path / "run" / "demo.html").read_text()
    assert ">rocket.jpg<" in page
    assert "rejected (none of the classes); the most similar classes are below" in page


@pytest.mark.slow
def test_the_demo_learns_to_read(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = vit("demo")
    assert code == 0
    assert float(re.search(r"accuracy ([\d.]+)%", out)[1]) >= 97
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


def test_a_digit_is_drawn_darkest_where_there_is_most_ink():
    assert draw(np.array([[0, 255], [128, 0]], np.uint8)) == ["  @@", "++  "]


def test_drawings_stand_in_one_row_over_their_captions():
    assert side_by_side([["ab", "cd"], ["ef", "gh"]], ["1", "22"]) == "ab  ef\ncd  gh\n1   22"

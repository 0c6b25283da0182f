"""`vit demo`."""

import re

import numpy as np
import pytest

from vitruvian.cli.demo import draw, side_by_side


@pytest.mark.slow
def test_the_demo_learns_to_read_evaluates_predicts_and_names_the_report(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = vit("demo", "--out", "run", "--set", "workers=0")
    assert code == 0
    assert float(re.search(r"accuracy ([\d.]+)%", out)[1]) >= 97
    assert re.search(r"accuracy [\d.]+% \(95% confidence interval [\d.]+ to [\d.]+%\): \d+ mistakes in 359 digits", out)
    assert len(re.findall(r"\d, \d+%", out)) == 6
    assert "\n  a cat: cat, " in out
    assert "\n  a cat in a corner: cat, " in out
    assert "\n  a cup of coffee: rejected, none of its classes\n" in out
    assert "\n  run/report.html\n" in out
    assert (tmp_path / "run" / "report.html").is_file()
    assert "\n  run/demo.html\n" in out
    page = (tmp_path / "run" / "demo.html").read_text()
    assert 'style="stroke:var(--c1)"' in page  # the color of held-out images
    assert 'style="stroke:var(--c0)"' not in page
    coffee = page.split(">a cup of coffee<")[1]
    assert "rejected (none of the classes)<" in coffee
    assert "gradient-weighted" not in coffee  # no map and no probability of a class that the photo does not show
    assert "probability" not in coffee.split("</section>")[0]


def test_a_digit_is_drawn_darkest_where_there_is_most_ink():
    assert draw(np.array([[0, 255], [128, 0]], np.uint8)) == ["  @@", "++  "]


def test_drawings_stand_in_one_row_over_their_captions():
    assert side_by_side([["ab", "cd"], ["ef", "gh"]], ["1", "22"]) == "ab  ef\ncd  gh\n1   22"

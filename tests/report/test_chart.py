"""Charts: ticks and labels, and points where their values belong, as SVG and as images."""

import math
import re

import numpy as np
import pytest

from vitruvian.report.chart import MAX_POINTS, Axis, Chart, Line, log_ticks, tick_labels, ticks


def line_chart(title, lines, *, across, **settings):
    return Chart(title=title, lines=lines, x_label=across, **settings).svg()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 4.7), (17.2, 99.9), (-3e-5, 2e-4), (0.1, 0.1001), (0, 123456)])
def test_ticks_are_few_round_numbers_around_what_is_drawn(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    step = found[1] - found[0]
    assert re.fullmatch(r"[125]0*\.?0*e.*", f"{step:.6e}")


def test_the_numbers_of_an_axis_are_written_alike():
    assert tick_labels(Axis(0, 1e-4, [0, 5e-5, 1e-4])) == ["0", "0.5e-4", "1e-4"]
    assert tick_labels(Axis(0, 10000, [0, 2000, 10000])) == ["0", "2,000", "10,000"]
    assert tick_labels(Axis(0, 2_000_000, [0, 2_000_000])) == ["0", "2e6"]
    assert tick_labels(Axis(1e-5, 1e9, [1e-5, 0.01, 2000, 5e9], log=True)) == ["1e-5", "0.01", "2,000", "5e9"]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (50, 4000, [50, 100, 200, 500, 1000, 2000]),
        (1e-5, 1.0, [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]),
        (1, 1e13, [1, 100, 1e4, 1e6, 1e8, 1e10, 1e12]),
        (310, 390, [320, 340, 360, 380]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_numbers_inside_it(low, high, found):
    assert log_ticks(low, high) == pytest.approx(found)


def polylines(chart):
    found = re.findall(r'<polyline points="([^"]*)"', chart.split('role="img"')[1])
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in found]


def test_points_lie_within_the_drawing_and_rise_with_their_values():
    (line,) = polylines(line_chart("t", [Line("a", [(0, 1.0), (10, 2.0), (20, 3.0)])], across="step"))
    xs, ys = zip(*line)
    assert sorted(xs) == list(xs)
    assert sorted(ys, reverse=True) == list(ys)  # the screen's rows count downwards
    assert all(0 <= x <= 480 and 0 <= y <= 280 for x, y in line)


def test_a_logarithmic_axis_gives_every_decade_the_same_room_and_leaves_out_zero():
    points = [(0, 5.0), (10, 1.0), (100, 2.0), (1000, 3.0)]
    (line,) = polylines(line_chart("t", [Line("a", points)], across="images", log_x=True))
    xs = [x for x, _ in line]
    assert len(xs) == 3
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)  # coordinates have one decimal
    (line,) = polylines(line_chart("t", [Line("a", [(1, 1e-3), (2, 1e-2), (3, 0.1)])], across="step", log_y=True))
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.11)


def test_whole_numbers_across_are_labeled_with_whole_numbers():
    chart = line_chart("t", [Line("a", [(0, 1.0), (1, 2.0)])], across="layer")
    assert re.findall(r'y="251.0"[^>]*>([^<]*)<', chart) == ["0", "1"]


def test_an_image_of_a_chart_has_its_dots_where_its_numbers_are():
    lines = [Line("heads", [(0, 10.0), (0, 40.0), (1, 20.0), (1, 80.0)], scatter=True), Line("none", [])]
    image = Chart(title="t", lines=lines, x_label="layer", y_from=0.0, size=(620, 360)).image()
    assert image.width == 620
    assert image.height > 360
    rows, columns = np.nonzero((np.abs(np.asarray(image).astype(int) - [0, 114, 178]) < 12).all(axis=2))
    below = rows > 54  # title and legend are above
    assert sorted(np.unique(columns[below] // 60)) == [0, 1, 10]
    assert np.ptp(rows[below]) > 150
    assert Chart(title="t", lines=[Line("none", [])], x_label="layer").image() is None


def test_values_that_are_not_finite_are_left_out_of_a_chart():
    (line,) = polylines(line_chart("t", [Line("a", [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)])], across="s"))
    assert len(line) == 2
    assert "no data" in line_chart("t", [Line("a", [(0, math.nan)])], across="s")


def test_one_point_and_a_constant_line_can_be_drawn():
    for points in ([(5, 1.0)], [(0, 0.0), (1, 0.0)]):
        assert len(polylines(line_chart("t", [Line("a", points)], across="step"))[0]) == len(points)


def test_a_long_line_is_thinned_and_says_so():
    chart = line_chart("t", [Line("train", [(i, float(i % 2)) for i in range(10_000)])], across="step")
    (line,) = polylines(chart)
    assert len(line) <= MAX_POINTS
    assert "train (means of 34)" in chart


def test_error_bars_are_drawn_and_fit_into_the_axes():
    line = Line("mean", [(1, 50.0), (2, 60.0)], spread={2: 15.0})
    drawing = Chart(title="accuracy", lines=[line], x_label="x").drawing()
    [((x1, bottom), (x2, top))] = drawing.lines[0].bars
    assert x1 == x2 == drawing.lines[0].pixels[1][0]
    assert bottom > drawing.lines[0].pixels[1][1] > top >= 0
    assert drawing.lines[0].pixels[1][1] - top == pytest.approx(bottom - drawing.lines[0].pixels[1][1])
    assert Chart(title="accuracy", lines=[line], x_label="x").svg().count("<line x1") == 1

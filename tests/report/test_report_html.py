"""Reports: values are escaped, nothing is requested from elsewhere, and charts show the right numbers."""

import base64
import io
import math
import re

import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image

from vitruvian.evaluation.report import confused_pairs, confusion_image, confusion_part
from vitruvian.report.chart import MAX_POINTS, Axis, Chart, Line, log_ticks, tick_labels, ticks
from vitruvian.report.color import COLORS, INK, LINE, PAPER, SOFT
from vitruvian.report.html import environment, format_number, percent_bar, render, thumbnail
from vitruvian.text import format_duration


def line_chart(title, lines, *, across, **settings):
    return Chart(title=title, lines=lines, x_label=across, **settings).svg()


NASTY = '<script>alert("x")</script>\u202e&'


def macro(name, *values, **settings):
    return getattr(environment().get_template("macros.html").module, name)(*values, **settings)


def page(*parts, title="plain"):
    body = '{% extends "base.html" %}{% block content %}{% for part in parts %}{{ part }}{% endfor %}{% endblock %}'
    return environment().from_string(body).render(title=title, parts=parts)


def test_names_are_shown_and_never_interpreted():
    made = page(
        macro("table", [NASTY], [[NASTY]]),
        macro("facts", {NASTY: NASTY}),
        macro("tiles", {NASTY: NASTY}),
        macro("notice", NASTY),
        macro("unreadable", {NASTY: NASTY}),
        line_chart(NASTY, [Line(NASTY, [(0, 1), (1, 2)])], across=NASTY),
        confusion_part(np.eye(2, dtype=int), [NASTY, NASTY]),
        thumbnail(Image.new("RGB", (8, 8)), NASTY),
        title=NASTY,
    )
    assert "<script" not in made
    assert made.count("&lt;script&gt;") >= 18
    assert "\u202e" not in made


def test_a_page_asks_for_nothing_outside_itself():
    made = page()
    assert not re.search(r"https?:|@import|url\(|<link|src=|<script", made)
    assert "default-src 'none'" in made


def test_a_misspelled_value_of_a_template_is_an_error():
    with pytest.raises(UndefinedError, match="'chosen' is undefined"):
        render("optimize.html", title="t", subtitle="s")


def test_the_stylesheet_has_the_colors_of_images():
    style = environment().get_template("style.css").render().split("@media")[0]
    colors = {"back": PAPER, "text": INK, "soft": SOFT, "line": LINE}
    for name, color in (colors | {f"c{index}": color for index, color in enumerate(COLORS)}).items():
        assert f"--{name}: {color};" in style


@pytest.mark.parametrize(
    ("value", "shown"), [(12345, "12,345"), (0.125, "0.125"), (3e-5, "3e-05"), (1234.5, "1,234.50"), (math.nan, "nan")]
)
def test_numbers_are_written_as_people_do(value, shown):
    assert format_number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.25, "0.25 s"), (48.2, "48 s"), (59.7, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_written_with_their_units(seconds, shown):
    assert format_duration(seconds) == shown


def test_numbers_of_a_table_stand_to_the_right():
    made = macro("table", ["name", ">count"], [["one", 1]])
    assert "<td>one</td>" in made
    assert '<td class="number">1</td>' in made


def test_settings_inside_settings_have_their_path_as_name():
    made = macro("facts", {"augment": {"hflip": True, "erase": None}, "freeze": (), "betas": (0.9, 0.99)})
    shown = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", made)
    assert shown == [("augment.hflip", "True"), ("augment.erase", "none"), ("freeze", "none"), ("betas", "0.9, 0.99")]


def test_a_percentage_that_is_not_known_is_a_dash():
    assert percent_bar(math.nan) == "–"
    assert "width:12.5%" in percent_bar(12.5)


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


def test_each_cell_of_a_small_confusion_matrix_has_its_number():
    made = confusion_part(np.array([[7, 0], [3, 11]]), ["cat", "dog"])
    assert re.findall(r"<td[^>]*>(.*?)</td>", made) == ["7", "·", "3", "11"]
    assert re.findall(r"var\((--\w+)\)", made) == ["--right", "--wrong", "--right"]


def test_the_most_confused_pairs_come_first_and_right_answers_never():
    confusion = np.array([[9, 1, 0], [0, 5, 5], [2, 0, 8]])
    pairs = list(confused_pairs(confusion, "abc"))
    assert [pair[:3] for pair in pairs] == [("b", "c", 5), ("c", "a", 2), ("a", "b", 1)]
    assert pairs[0][3] == "50%"


def embedded_image(html):
    return Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]*)", html)[1])))


@pytest.mark.parametrize(("classes", "side"), [(31, 31), (512, 512), (1000, 500)])
def test_many_classes_become_an_image_of_limited_size(classes, side):
    confusion = np.diag(np.full(classes, 4))
    confusion[0, -1] = 4
    image = embedded_image(confusion_image(confusion))
    assert image.size == (side, side)
    assert image.getpixel((side // 2, side // 2)) == (0, 114, 178, 255)
    assert image.getpixel((side - 1, 0))[:3] == (213, 94, 0)
    assert image.getpixel((0, side - 1))[3] == 0
    assert "predicted class" in confusion_part(confusion, list(map(str, range(classes))))


def test_thumbnails_are_small_and_tiny_images_stay_exact():
    buffer = io.BytesIO()
    Image.new("RGB", (900, 300), "red").save(buffer, "PNG")
    assert embedded_image(thumbnail(Image.open(buffer), "red")).size == (240, 80)
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert (np.asarray(embedded_image(thumbnail(Image.fromarray(pixels), "tiny"))) == pixels).all()

"""Reports: values are escaped, nothing is requested from elsewhere, and charts show the right numbers."""

import base64
import io
import math
import re

import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image

from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import COLORS, INK, LINE, PAPER, SOFT
from vitruvian.report.html import environment, format_number, percent_bar, render, thumbnail

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
        Chart(title=NASTY, lines=[Line(NASTY, [(0, 1), (1, 2)])], x_label=NASTY).svg(),
        thumbnail(Image.new("RGB", (8, 8)), NASTY),
        title=NASTY,
    )
    assert "<script" not in made
    assert made.count("&lt;script&gt;") >= 14
    assert "\u202e" not in made


def test_a_page_asks_for_nothing_outside_itself():
    made = page()
    assert not re.search(r"https?:|@import|url\(|<link|src=|<script", made)
    assert "default-src 'none'" in made


def test_a_misspelled_value_of_a_template_is_an_error():
    with pytest.raises(UndefinedError, match="'chosen' is undefined"):
        render("optimize.html", title="t", subtitle="s")


def test_the_stylesheet_has_the_colors_of_images():
    style = environment().get_template("base.css").render().split("@media")[0]
    colors = {"back": PAPER, "text": INK, "soft": SOFT, "line": LINE}
    for name, color in (colors | {f"c{index}": color for index, color in enumerate(COLORS)}).items():
        assert f"--{name}: {color};" in style


@pytest.mark.parametrize(
    ("value", "shown"), [(12345, "12,345"), (0.125, "0.125"), (3e-5, "3e-05"), (1234.5, "1,234.50"), (math.nan, "nan")]
)
def test_numbers_are_written_as_people_do(value, shown):
    assert format_number(value) == shown


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


def embedded_image(html):
    return Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]*)", html)[1])))


def test_thumbnails_are_small_and_tiny_images_stay_exact():
    buffer = io.BytesIO()
    Image.new("RGB", (900, 300), "red").save(buffer, "PNG")
    assert embedded_image(thumbnail(Image.open(buffer), "red")).size == (240, 80)
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert (np.asarray(embedded_image(thumbnail(Image.fromarray(pixels), "tiny"))) == pixels).all()

"""Words and numbers for people."""

import io

import pytest

from vitruvian.text import (
    PrintableStream,
    brief,
    describe_error,
    format_bytes,
    format_duration,
    plural,
    printable,
    table,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (0.0, "0 s"),
        (48.2, "48 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (71 * 3600, "71 h 00 min"),
        (100 * 3600, "4 d 04 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 bytes"), (512, "512 bytes"), (3.4e6, "3.4 MB"), (1e9, "1.00 GB")])
def test_sizes_have_a_unit(count, text):
    assert format_bytes(count) == text


def test_a_long_list_is_shortened_and_an_empty_one_is_named():
    assert brief("abc") == "a, b, c"
    assert brief(range(2000), most=2) == "0, 1 and 1,998 more"
    assert brief([]) == "none"


def test_counts_agree_with_their_noun_and_verb():
    assert plural(1, "image", "is|are") == "1 image is"
    assert plural(2000, "class", "is|are") == "2,000 classes are"
    assert plural(0, "image") == "0 images"


def test_text_for_a_terminal_is_one_line_without_control_characters():
    assert printable("a\nb\x1b[31m\udcff") == "a\\nb\\x1b[31m\\udcff"


def test_an_error_is_one_line_even_if_it_says_nothing():
    assert describe_error(ValueError("two\n  lines")) == "two lines"
    assert describe_error(OSError(28, "No space left on device", "x")) == "No space left on device"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 10_000))) == 300


def test_columns_are_as_wide_as_their_widest_cell():
    assert table(["name", ">count"], [["a", "1"], ["long name", "200"]]) == (
        "name       count\na              1\nlong name    200"
    )


def test_a_table_wraps_to_the_width_of_a_terminal(monkeypatch):
    row = ("short", "words " * 12, "more words " * 12, "1.5")
    headings = ("name", "long", "longer", ">number")
    assert len(table(headings, [row]).splitlines()) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = table(headings, [row]).splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(lines[1].split()).startswith("short words words")
    assert sum(line.count("words") for line in lines) == 24


def test_a_printable_stream_escapes_control_characters_but_not_lines_and_tabs():
    inner = io.StringIO()
    print("a\tb\n\x1b]0;title\x07\x9b\r", file=PrintableStream(inner))
    assert inner.getvalue() == "a\tb\n\\x1b]0;title\\x07\\x9b\\r\n"
    assert not PrintableStream(inner).isatty()


def test_a_printable_stream_escapes_line_breaks_in_the_paths_of_a_command_line():
    inner = io.StringIO()
    words = ["--out=runs/a\nb/", "--model", "c\t\x1b[1m", "--name", "\n", "plain"]
    print("wrote runs/a\nb/x\nc\t\x1b[1m, plain", file=PrintableStream(inner, words))
    assert inner.getvalue() == "wrote runs/a\\nb/x\nc\\t\\x1b[1m, plain\n"

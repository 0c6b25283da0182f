"""The report in the terminal, as JSON and as a page."""

import json
from html.parser import HTMLParser

import pytest
import typer
from photos import encoded, make_photos, photo
from typer.testing import CliRunner

from vitruvian.cli.data import doctor
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.doctor_report import diagnosis_page
from vitruvian.data.doctor.findings import report
from vitruvian.data.formats import open_dataset

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def sick(tmp_path):
    """A leak with an awkward name, an empty file and a gray image."""
    data = make_photos(tmp_path / "photos", each=20, splits=("train", "test"))
    (data / "test" / "cat" / "<b>&.jpg").write_bytes((data / "train" / "cat" / "003.jpg").read_bytes())
    (data / "train" / "dog" / "x.jpg").write_bytes(b"")
    (data / "train" / "dog" / "y.jpg").write_bytes(encoded(photo(900).convert("L")))
    return data


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--workers", "0"], catch_exceptions=False)


def test_the_report_groups_what_hurts_what_to_look_at_and_what_is_fine(sick):
    lines = [line for _, line in report(diagnose(sick))]
    assert lines[0].startswith(f"{sick}: 83 images (train 42, test 41), 2 classes, 0.")
    assert [line for line in lines if line.isupper()] == ["PROBLEMS", "WARNINGS", "PASSED", "NOT CHECKED"]
    assert "  ✗ 1 file is empty" in lines
    assert "      train: train/cat/003.jpg  =  test: test/cat/<b>&.jpg  (exact copy)" in lines
    assert lines[-1] == "Fix before training: 2 problems and 1 warning."


def test_no_more_than_four_examples_are_shown_and_the_others_counted(sick):
    for number in range(6):
        (sick / "train" / "dog" / f"empty{number}.jpg").write_bytes(b"")
    lines = [line for _, line in report(diagnose(sick))]
    place = lines.index("  ✗ 7 files are empty")
    assert lines[place + 6] == "      and 3 more"


def test_a_name_with_a_line_break_stays_in_its_line(sick):
    (sick / "train" / "dog" / "a\nb.jpg").write_bytes(b"")
    assert any("a\\nb.jpg" in line for _, line in report(diagnose(sick)))


def test_the_command_fails_where_training_would_suffer(sick):
    result = run(sick)
    assert result.exit_code == 1
    assert "PROBLEMS" in result.stdout


def test_the_command_succeeds_where_there_is_only_something_to_examine(sick):
    (sick / "train" / "dog" / "x.jpg").unlink()
    (sick / "test" / "cat" / "<b>&.jpg").unlink()
    result = run(sick)
    assert result.exit_code == 0
    assert result.stdout.endswith("Ready for training: 1 warning.\n")


def test_json_is_one_object_with_everything(sick):
    result = run(sick, "--json")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (content["healthy"], content["images"], content["splits"]) == (False, 83, {"train": 42, "test": 41})
    leak = next(finding for finding in content["findings"] if finding["check"] == "leak")
    assert leak["level"] == "problem"
    assert leak["examples"][0]["images"][1] == {
        "split": "test", "index": 20, "key": "test/cat/<b>&.jpg", "label": "cat"
    }  # fmt: skip


class Page(HTMLParser):
    """Checks that what opens is closed, and collects sources and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.tags, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_no_other_file_and_shows_copies_side_by_side(sick, tmp_path):
    result = run(sick, "--out", tmp_path / "report.html")
    shown = Page((tmp_path / "report.html").read_text())
    assert "wrote " in result.stderr
    assert all(source.startswith("data:image/jpeg;base64,") for source in shown.sources)
    assert len(shown.sources) == 3  # both sides of the leak, and the gray image; the empty file has none
    assert "no image" in shown.text
    assert "test/cat/<b>&.jpg" in shown.text
    assert "b" not in shown.tags


def test_the_page_survives_images_that_have_gone(sick):
    diagnosis, data = diagnose(sick), open_dataset(sick)
    (sick / "train" / "cat" / "003.jpg").unlink()
    assert len(Page(diagnosis_page(diagnosis, data)).sources) == 2

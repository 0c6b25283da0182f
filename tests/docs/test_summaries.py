"""Every number on the page about summaries of the paper is counted, or one of the paper's."""

import re

import pytest
from pages import ROOT

from vitruvian.catalog import resolve
from vitruvian.cost import multiply_adds, parameters
from vitruvian.study.paper import paper_rows

TEXT = (ROOT / "docs" / "summaries.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|[^|]*\|[^|]*\| `([^`]+)` \| ([\d.]+) \|$", TEXT, re.MULTILINE)


def paper(table, model, column, epochs=None, data="JFT-300M"):
    """A number of the paper."""
    rows = [row for row in paper_rows(table) if (row.model, row.pretrained_on) == (model, data)]
    (found,) = [row for row in rows if epochs is None or row.values["epochs"] == epochs]
    return found.values[column]


COUNTERS = {
    "parameters": lambda name, classes=1000: parameters(resolve(name).replace(num_classes=classes)),
    "multiply_adds": lambda name, size=224: multiply_adds(resolve(name), size),
    "paper": paper,
}


@pytest.mark.parametrize(("code", "value"), ROWS)
def test_a_number_is_what_its_code_gives(code, value):
    decimals = len(value.partition(".")[2])
    assert f"{eval(code, dict(COUNTERS)):.{decimals}f}" == value


def test_every_claim_has_its_numbers():
    assert len(ROWS) == 14
    assert TEXT.count('| "') == 6
    per_class = resolve("ViT-L/16").width + 1
    assert round(21_843 * per_class / 1e6) == 22
    assert 3 * 2 * 7 * 303e6 * COUNTERS["multiply_adds"]("ViT-B/16") / 1e18 == pytest.approx(224, rel=0.005)


def test_the_tour_has_a_row_with_a_command_for_every_part_of_the_paper():
    tour = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|:]+): [^|]*\| (`vit [^|]+) \| ([^|]+) \|[^|]*\|$", tour, re.MULTILINE)
    sections = ["1", "2", "3.1", "3.2", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "5"]
    appendices = ["A", "B.1", "B.1.1", "B.1.2", "C", *(f"D.{number}" for number in range(1, 11))]
    parts = [f"Section {number}" for number in sections] + [f"Appendix {name}" for name in appendices]
    parts += [f"Equation {number}" for number in range(1, 5)] + ["Equations 5 to 8"]
    parts += [f"Table {number}" for number in range(1, 10)] + [f"Figure {number}" for number in range(1, 15)]
    assert sorted(name for name, *_ in rows) == sorted(parts)
    assert "not implemented" not in tour

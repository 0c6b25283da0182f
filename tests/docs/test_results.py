"""Every measured number on a page is one of benchmarks/results.toml."""

from __future__ import annotations

from datetime import date

import pytest
from pages import PAGES, ROOT
from results import FACTS, RESULTS, Block, citable, entry, equal, has_measurements, page_blocks, wrong_numbers

CHECKED = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
IDS = [str(page.relative_to(ROOT)) for page in CHECKED]


@pytest.mark.parametrize("page", CHECKED, ids=IDS)
def test_measured_numbers_are_those_of_the_file_of_results(page):
    wrong = [
        f"{page.name}:{block.line}: {line}"
        for block in page_blocks(page)
        if block.comment and block.comment.startswith("results:")
        for line in wrong_numbers(block)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", CHECKED, ids=IDS)
def test_measurements_name_their_results(page):
    """A number with a decimal point needs a comment that says where it was measured, or that it was not."""
    bare = [block for block in page_blocks(page) if block.comment is None and has_measurements(block.text)]
    assert not bare, "\n".join(f"{page.name}:{block.line}: {block.text[:200]}" for block in bare)


def refers_only(part: object) -> bool:
    """Whether an entry repeats numbers of other entries alone."""
    if isinstance(part, dict):
        return all(refers_only(item) for item in part.values())
    return all(isinstance(item, str) or item == 1 for item in part) if isinstance(part, list) else False


@pytest.mark.parametrize("name", sorted(set(RESULTS) - {"machines"}))
def test_every_result_has_a_command_a_machine_and_a_date(name):
    result = RESULTS[name]
    if refers_only(result):
        return
    assert set(FACTS) <= set(result), f"{name}: {set(FACTS) - set(result)} is missing"
    assert isinstance(result["date"], date)
    assert result["machine"] in RESULTS["machines"]
    assert citable(result)


def test_every_result_is_on_a_page():
    used = {key for page in CHECKED for block in page_blocks(page) for key in (block.comment or "").split()[1:]}
    references = {item for name in RESULTS for item in strings(RESULTS[name])}
    names = {key.split(".")[0] for key in used | references}
    assert sorted(set(RESULTS) - names - {"machines"}) == []


def strings(part: object) -> list[str]:
    if isinstance(part, dict):
        return [found for item in part.values() for found in strings(item)]
    if isinstance(part, list):
        return [item for item in part if isinstance(item, str)]
    return []


def test_another_number_is_noticed():
    table = "| order | mean area |\n|---|---|\n| **random** | {} |"
    assert not wrong_numbers(Block(1, table.format("0.39"), "results: deletion"))
    assert wrong_numbers(Block(1, table.format("0.38"), "results: deletion"))
    assert not wrong_numbers(Block(1, "It takes 1.61 s.", "results: overload"))
    assert wrong_numbers(Block(1, "It takes 1.62 s.", "results: overload"))
    with pytest.raises(KeyError, match="has no entry 'nothing'"):
        entry("nothing")


def test_numbers_are_compared_as_rounded():
    assert equal("1.06", 1.055)
    assert equal("75.30", 75.3)
    assert not equal("1.07", 1.055)

"""Numbers on the pages, and the file of results that they come from.

A page names its results in a comment, which covers everything up to the next heading or the next comment:

    <!-- results: serving -->          keys of benchmarks/results.toml
    <!-- not measured: settings -->    no measurements here, and why
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages import ROOT

RESULTS = tomllib.loads((ROOT / "benchmarks" / "results.toml").read_text(encoding="utf-8"))
FACTS = ("command", "machine", "date")
"""What every measurement states beside its numbers."""

NAMES = re.compile(
    r"(?:Python|PyTorch|torch|timm|torchvision|transformers|vit-pytorch|litserve|Runtime|opset|NumPy|Section|section"
    r"|arXiv:|EPYC|Figures?|Tables?|Appendix|layer|block)\s*\d[\d.]*"  # versions, and numbers that count or name
    r"|(?<![\w.])[A-Za-z][\w+/.-]*-?\d[\w/.-]*"  # ViT-Ti/16, CIFAR-10, int8, top-1
    r"|\b\d+x\d+\b|\b\d+(?:\.\d+){2,}"  # 4x4, 127.0.0.1
)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w])")
MEASURED = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+(?:e-?\d+)?|(?=%| (?:s|ms|MB|GB|seconds|minutes|points)\b))")
"""In text only numbers with a decimal point or a unit of measurement are compared; in tables, all of them."""


class Block(NamedTuple):
    """A paragraph, list or table with the comment that covers it (None without one)."""

    line: int
    text: str
    comment: str | None


def page_blocks(page: Path) -> Iterator[Block]:
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), page.read_text("utf-8"), flags=re.M | re.S)
    comment = None
    for match in re.finditer(r"(?:^.+\n?)+", text, re.MULTILINE):
        block = match[0]
        if block.startswith("#"):
            comment = None
        elif marked := re.fullmatch(r"<!-- ((?:results|not measured): .+) -->\s*", block):
            comment = marked[1]
        elif not block.startswith("---"):
            yield Block(text.count("\n", 0, match.start()) + 1, block, comment)


def plain(text: str) -> str:
    """Text without code, link targets, emphasis and comments."""
    text = re.sub(r"<!--.*?-->|`[^`]*`|!\[[^]]*\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "")


def numbers(text: str, pattern: re.Pattern[str] = NUMBER) -> list[str]:
    return [found.replace(",", "").rstrip(".") for found in pattern.findall(NAMES.sub(" ", plain(text)))]


def table_rows(block: str) -> list[tuple[str, list[str]]]:
    """First cell (as text) and the numbers in the others, for each row of a table below its header."""
    lines = [line for line in block.splitlines() if line.startswith("|")]
    rows = []
    for line in lines[2:]:
        first, *cells = line.strip().strip("|").split("|")
        label = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", first).strip()
        rows.append((label, [number for cell in cells for number in numbers(cell)]))
    return rows


def has_measurements(block: str) -> bool:
    """Whether a block has numbers with a decimal point, which are measurements more often than not."""
    return any("." in number for number in numbers(block, MEASURED))


def entry(key: str) -> object:
    part: object = RESULTS
    for name in key.split("."):
        if not isinstance(part, dict) or name not in part:
            raise KeyError(f"benchmarks/results.toml has no entry {key!r}")
        part = part[name]
    return part


def value(item: object) -> float:
    """A number, or the median of the runs that a reference (a key) names."""
    if isinstance(item, str):
        runs = entry(item)
        return float(statistics.median(runs if isinstance(runs, list) else [runs]))
    assert isinstance(item, (int, float))
    return float(item)


def citable(part: object) -> list[float]:
    """All numbers of an entry; of a list of runs also their median."""
    if isinstance(part, dict):
        return [number for key, item in part.items() if key not in FACTS for number in citable(item)]
    if isinstance(part, list):
        values = [value(item) for item in part]
        return [*values, statistics.median(values)] if values else []
    return [float(part)] if isinstance(part, (int, float)) and not isinstance(part, bool) else []


def equal(written: str, measured: float) -> bool:
    """Whether a number on a page is a measured one, rounded to the digits that are written."""
    decimals = len(written.partition(".")[2]) if "e" not in written else 12
    return abs(float(written) - measured) <= 0.5 * 10.0**-decimals + 1e-9


def wrong_numbers(block: Block) -> list[str]:
    """What a block says otherwise than the results that its comment names."""
    assert block.comment is not None
    keys = block.comment.removeprefix("results:").split()
    entries = [entry(key) for key in keys]
    allowed = [number for part in entries for number in citable(part)]
    rows = {label: row for part in entries if isinstance(part, dict) for label, row in part.get("rows", {}).items()}
    wrong = []
    if not block.text.startswith("|"):
        found = numbers(block.text, MEASURED)
        return [f"{number} is not in {keys}" for number in found if not any(equal(number, one) for one in allowed)]
    for label, found in table_rows(block.text):
        if label not in rows:
            wrong += [f"row {label!r} ({', '.join(found)}) is not in {keys}"] if found else []
        elif len(found) != len(rows[label]) or not all(map(equal, found, map(value, rows[label]))):
            wrong.append(f"row {label!r}: {', '.join(found)} was measured as {[value(item) for item in rows[label]]}")
    return wrong

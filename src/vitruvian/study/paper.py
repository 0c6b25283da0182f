"""The numbers of the paper, from `paper.toml`, to print beside measured ones."""

import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vitruvian.report.chart import Chart, Line
from vitruvian.tasks import vtab_tasks
from vitruvian.text import table


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperRow:
    """One row of one of the paper's tables."""

    table: str  # such as "Table 5"
    model: str
    pretrained_on: str
    values: dict[str, float]  # by task, or by the name of the column
    deviations: dict[str, float]

    @property
    def name(self) -> str:
        epochs = f", {self.values['epochs']} epochs" if "epochs" in self.values else ""
        return f"{self.model}, {self.pretrained_on}{epochs}"

    def text(self, column: str) -> str:
        """`88.55 ± 0.04`, `93.81`, or a dash; a mean that the paper does not print has one decimal."""
        value = self.values.get(column, "-")
        deviation = f" ± {self.deviations[column]}" if column in self.deviations else ""
        return f"{value:.1f}" if type(value) is float else f"{value}{deviation}"


class PaperNumber(float):
    """A number that prints with the digits of the paper, such as 88.40."""

    def __new__(cls, text: str) -> "PaperNumber":
        value = super().__new__(cls, text)
        value.text = text
        return value

    text: str

    def __str__(self) -> str:
        return self.text


@cache
def paper_tables() -> dict[str, Any]:
    """The content of `paper.toml`."""
    return tomllib.loads((files("vitruvian") / "paper.toml").read_text(encoding="utf-8"), parse_float=PaperNumber)


def paper_rows(name: str) -> list[PaperRow]:
    """The rows of a table such as `table5`; Table 9 also has the means of VTAB's groups, such as `vtab-Natural`."""
    content = paper_tables()[name]
    deviations = {(model, data): values for model, data, values in content.get("deviations", ())}
    rows = []
    for model, data, values in content["rows"]:
        groups: dict[str, list[float]] = {}
        for task in vtab_tasks() if name == "table9" else ():
            groups.setdefault(f"vtab-{task.group}", []).append(values[task.name])
        rows.append(
            PaperRow(
                table=content["title"].partition(":")[0],
                model=model,
                pretrained_on=data,
                values=values | {group: statistics.fmean(numbers) for group, numbers in groups.items()},
                deviations=deviations.get((model, data), {}),
            )
        )
    return rows


def beside(columns: Sequence[str], *names: str) -> list[list[str]]:
    """Rows of these tables of the paper with a number in one of the columns: table, model and numbers, as text."""
    rows = (row for name in names for row in paper_rows(name))
    return [[r.table, r.name, *map(r.text, columns)] for r in rows if any(column in r.values for column in columns)]


def paper_text(columns: Sequence[str], names: Iterable[str], differs: str) -> str:
    """Rows of the paper as a table for printing, with its source and what the measurement differs in."""
    rows = beside(columns, *names)
    if not rows:
        return ""
    headings = ("the paper", "model", *(f">{column}" for column in columns))
    return f"{table(headings, rows)}\n{differs_text(differs)}"


def differs_text(differs: str) -> str:
    return f"the paper's numbers: {paper_tables()['source']}; here {differs}"


def paper_number(name: str, model: str, data: str, column: str) -> float | None:
    """One number of a table; None if the paper has none there."""
    row = next(row for row in paper_rows(name) if (row.model, row.pretrained_on) == (model, data))
    return row.values.get(column)


PRETRAINING_IMAGES = {"ImageNet": 1_281_167, "ImageNet-21k": 14_197_122, "JFT-300M": 303_000_000}


def paper_chart(name: str = "", x: str = "", *_: str) -> Chart | None:
    """ImageNet accuracy of Table 5 over the images of pre-training, or of Table 6 over a column; None without name."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in paper_rows(name) if name else ():
        families = {"+": "hybrid", "ResNet": "ResNet", "ViT": "ViT", "": row.model}
        line = next(family for mark, family in families.items() if mark in row.model)
        at = row.values[x] if x else PRETRAINING_IMAGES[row.pretrained_on]
        lines.setdefault(line, []).append((at, row.values["imagenet"]))
    drawn = [Line(line, sorted(points)) for line, points in lines.items()]
    title = f"{paper_tables()[name]['title'].partition(':')[0]} of the paper: top-1 on ImageNet, %" if name else ""
    label = f"{x or 'images of pre-training'} (logarithmic)"
    return Chart(title=title, lines=drawn, x_label=label, log_x=True, size=(760, 400)) if name else None

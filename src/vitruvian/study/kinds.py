"""The table of studies that train models, from `studies.toml`."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from vitruvian.files import parse_toml

Metric = Literal["top1", "fewshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRow:
    """One row of a study: what its models have in common."""

    name: str
    recipe: str = ""  # empty: the study's
    settings: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()  # instead of those of the columns
    pretrain: tuple[str, ...] | None = None  # settings of a run whose weights this row starts from
    paper: tuple[str, ...] = ()  # table, model, data and column of the paper's number


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What differs along a row: settings that are filled with each value."""

    name: str
    settings: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyKind:
    """One table or figure of the paper as rows and columns; `studies.toml` explains the fields."""

    name: str
    about: str
    paper: str
    finding: str
    metric: Metric
    columns: Columns
    rows: tuple[StudyRow, ...]
    recipe: str = ""
    x: str = ""
    small: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@cache
def study_kinds() -> dict[str, StudyKind]:
    """All studies that train models, by name."""
    content = parse_toml((files("vitruvian") / "studies.toml").read_bytes(), "studies.toml")
    shared = content.pop("small")
    return {
        name: StudyKind(
            **table
            | {
                "name": name,
                "small": (*shared, *table.get("small", ())),
                "columns": Columns(**table["columns"]),
                "rows": tuple(StudyRow(**r) for r in table["rows"]),
            }
        )
        for name, table in content.items()
    }

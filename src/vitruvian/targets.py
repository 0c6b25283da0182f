"""Kinds of targets: one class per image, several labels, numbers, or classes in an order.

`KINDS` is the one table of them. A dataset whose images do not have one class each stores a row number per image, as
other datasets store a class index, and a `TargetTable` with the rows: 0, 1 or unknown for each label, or numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from vitruvian.errors import DataError, UnknownNameError, argument, short_repr
from vitruvian.settings import Range, Settings, Share
from vitruvian.text import brief, natural_key, plural

if TYPE_CHECKING:  # `vit --help` needs the kinds, and must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Indices = NDArray[np.int64]

# n images, R distinct rows, K outputs: labels or numbers

BINS = 10  # strata of numbers, by quantiles
MAX_LEVELS = 1000  # of ordinal classes; more are numbers
SEPARATOR = ";"  # between the labels of an image


COVERAGE = 0.9  # default for prediction intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Target(Settings):
    """The kind of output of a model, with its fitted thresholds or intervals; saved with the model."""

    kind: str = "single"
    """A key of KINDS."""
    thresholds: tuple[Share, ...] = ()
    """Several labels: the probability from which each is predicted; 0.5 if empty."""
    mean: tuple[float, ...] = ()
    std: tuple[Annotated[float, Range(1e-30)], ...] = ()
    """Numbers: mean and standard deviation of the training images. The outputs are standardized with them."""
    margins: tuple[Annotated[float, Range(0.0)], ...] = ()
    """Numbers: half the width of the interval that contains the true value of `coverage` of the held-out images."""
    coverage: Annotated[float, Range(0.5, 1.0)] = COVERAGE
    levels: tuple[str, ...] = ()
    """Ordinal: the names of the classes, in their order."""

    def check(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("target", self.kind, KINDS)


@dataclass(frozen=True, eq=False)
class TargetTable:
    """The rows of targets of a dataset. Only values other than 0 are stored, as there may be 100,000 labels."""

    kind: str
    names: tuple[str, ...]  # (K) of labels or numbers
    starts: Indices  # (R + 1,) where the entries of each row start
    columns: Indices  # of the entries
    values: Floats  # of the entries; NaN if unknown
    levels: tuple[str, ...] = ()  # of an ordinal target

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, labels: NDArray[np.integer]) -> Floats:
        """The targets (n, K) of images with these row numbers; NaN if unknown."""
        import numpy as np

        result = np.zeros((len(labels), len(self.names)))
        counts = self.starts[labels + 1] - self.starts[labels]
        image = np.repeat(np.arange(len(labels)), counts)
        within = np.arange(len(image)) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.repeat(self.starts[labels], counts) + within
        result[image, self.columns[entries]] = self.values[entries]
        return result

    def text(self, row: int) -> str:
        """A row as text: the names of its labels, its level, or its numbers."""
        import numpy as np

        values = self.rows(np.array([row]))[0]
        if self.kind == "multi":
            return SEPARATOR.join(self.names[column] for column in np.flatnonzero(values == 1))
        if self.levels:
            return self.levels[int(values[0])]
        return ",".join("" if np.isnan(value) else f"{value:g}" for value in values.tolist())

    def statistics(self, labels: NDArray[np.integer]) -> Floats:
        """Number of known values, their mean and their standard deviation for each output: (3, K)."""
        import numpy as np

        images = np.bincount(labels, minlength=len(self)).astype(np.float64)  # (R,)
        known = ~np.isnan(self.values)
        columns, values = self.columns[known], self.values[known]
        weights = np.repeat(images, np.diff(self.starts))

        def total(columns: Indices, numbers: Floats) -> Floats:
            return np.bincount(columns, numbers, minlength=len(self.names)).astype(np.float64)

        counts = images.sum() - total(self.columns[~known], weights[~known])
        weights = weights[known]
        divisors = np.maximum(counts, 1)
        mean = total(columns, weights * values) / divisors
        zeros = counts - total(columns, weights)  # values that are not stored
        squares = total(columns, weights * (values - mean[columns]) ** 2) + zeros * mean**2
        return np.stack([counts, mean, np.sqrt(squares / divisors)])

    def strata(self) -> Indices:
        """The stratum (R,) of each row for stratified splits: its rarest label, its level, or a quantile."""
        import numpy as np

        if self.kind == "multi":
            sizes = np.bincount(self.columns[self.values == 1], minlength=len(self.names))
            groups = np.full(len(self), len(self.names), np.int64)
            order = np.argsort(-sizes[self.columns], kind="stable")  # the rarest label of a row is written last
            order = order[self.values[order] == 1]
            groups[np.repeat(np.arange(len(self)), np.diff(self.starts))[order]] = self.columns[order]
            return groups
        first = self.rows(np.arange(len(self)))[:, 0]
        known = first[~np.isnan(first)]
        edges = np.unique(known) if self.kind == "ordinal" else np.quantile(known, np.linspace(0, 1, BINS + 1)[1:-1])
        return np.where(np.isnan(first), len(edges) + 1, np.searchsorted(edges, first))


class TargetSpec(NamedTuple):
    """The kind of target that a user requests, such as `multi` or `number:age,weight`."""

    kind: str = "auto"  # `auto`: decided by the data
    columns: tuple[str, ...] = ()  # of a manifest; empty: the columns with the usual names


AUTO = TargetSpec()


def parse_target(text: str) -> TargetSpec:
    """`auto`, or a key of KINDS, with a colon and columns of a manifest or without."""
    kind, colon, names = text.partition(":")
    columns = tuple(name.strip() for name in names.split(",") if name.strip())
    if kind != "auto" and kind not in KINDS:
        raise UnknownNameError("target", kind, ["auto", *KINDS], see=f"(there are auto, {', '.join(KINDS)})")
    if colon and (not columns or kind not in ("multi", "number")):
        problem = "has columns, which only multi and number take" if columns else "names no columns"
        raise DataError(f"{argument('target', text)} {problem}", hint="write multi:cat,dog or number:age")
    return TargetSpec(kind, columns)


Parse = Callable[[Sequence[str], tuple[str, ...] | None], TargetTable]
"""A table from the distinct labels of a dataset, and the columns whose values they hold, separated by commas.

Without columns, a label is what the user wrote: names separated by semicolons, or a number.
"""


def make_table(kind: str, names: Sequence[str], rows: Sequence[dict[int, float]]) -> TargetTable:
    """A table of these rows, each from outputs to values; others are 0."""
    import numpy as np

    starts = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column in row], np.int64)
    values = np.array([value for row in rows for value in row.values()], np.float64)
    return TargetTable(kind, tuple(names), starts, columns, values)


def parse_labels(labels: Sequence[str], columns: tuple[str, ...] | None) -> TargetTable:
    """Several labels per image: names, or 0, 1 or nothing for each column."""
    import numpy as np

    if columns is not None:
        known = {"": np.nan, "1": 1.0, "1.0": 1.0, "true": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0}
        rows = []
        for cells in (label.lower().split(",") for label in labels):
            wrong = next((position for position, cell in enumerate(cells) if cell not in known), None)
            if wrong is not None:
                reason = f"the value {short_repr(cells[wrong])} in the column {short_repr(columns[wrong])} of labels"
                hint = "for numbers use " + argument("target", f"number:{columns[wrong]}")
                raise DataError(f"{reason} is not 0, 1 or empty", hint=hint)
            rows.append({column: known[cell] for column, cell in enumerate(cells) if known[cell] != 0.0})
        return make_table("multi", columns, rows)
    split = [[name.strip() for name in label.split(SEPARATOR) if name.strip()] for label in labels]
    names = sorted({name for row in split for name in row}, key=natural_key)
    index = {name: column for column, name in enumerate(names)}
    if not names:
        raise DataError("no image has a label")
    return make_table("multi", names, [{index[name]: 1.0 for name in row} for row in split])


def parse_numbers(labels: Sequence[str], columns: tuple[str, ...] | None) -> TargetTable:
    """Numbers, several per image if there are columns."""
    import numpy as np

    names, rows = columns or ("value",), []
    for label in labels:
        row = {}
        for column, cell in enumerate(label.split(",") if columns is not None else [label]):
            try:
                row[column] = float(cell) if cell else np.nan
            except ValueError:
                row[column] = np.inf
            if cell and not abs(row[column]) <= float(np.finfo(np.float32).max):
                what = f"in the column {short_repr(columns[column])}" if columns is not None else "as a label"
                problem = "too large for float32" if np.isfinite(row[column]) else "not a finite number"
                raise DataError(f"{short_repr(cell)} {what} is {problem}", hint="leave unknown values empty")
        rows.append(row)
    table = make_table("number", names, rows)
    known = ~np.isnan(table.values)
    empty = [name for column, name in enumerate(names) if not known[table.columns == column].any()]
    if empty:
        raise DataError(f"no value is known in the {plural(len(empty), 'column')} {brief(empty)}")
    return table


def parse_levels(labels: Sequence[str], columns: tuple[str, ...] | None) -> TargetTable:
    """Classes in the order of the data: their position is the target."""
    if columns is not None or not 2 <= len(labels) <= MAX_LEVELS:
        what = "columns" if columns is not None else plural(len(labels), "class")
        raise DataError(f"an ordinal target needs one column of 2 to {MAX_LEVELS:,} classes, not {what}")
    table = make_table("ordinal", ("level",), [{0: float(level)} for level in range(len(labels))])
    return replace(table, levels=tuple(labels))


@dataclass(frozen=True, kw_only=True)
class TargetKind:
    """A row of the table of targets."""

    title: str
    noun: str  # of an output
    losses: tuple[str, ...]  # names of losses, the default first
    metrics: tuple[str, ...]  # names of the metrics that select and summarize a run, the most important first
    score_function: str  # how outputs become scores
    parse: Parse | None = None  # None: the class indices are the targets


NUMBERS = TargetKind(
    title="numbers",
    noun="number",
    losses=("huber", "l1", "l2"),
    metrics=("mae", "rmse", "r2", "correlation"),
    score_function="identity",
    parse=parse_numbers,
)
KINDS = {
    "single": TargetKind(
        title="one class per image",
        noun="class",
        losses=("cross_entropy", "bce"),
        metrics=("top1", "mean_per_class"),
        score_function="softmax",
    ),
    "multi": TargetKind(
        title="several labels per image",
        noun="label",
        losses=("bce", "asl"),
        metrics=("map", "map_micro", "f1", "hamming", "coverage"),
        score_function="sigmoid",
        parse=parse_labels,
    ),
    "number": NUMBERS,
    "ordinal": replace(NUMBERS, title="classes in an order", parse=parse_levels),
}
"""The kinds of targets by name."""
LOWER_IS_BETTER = ("loss", "mae", "rmse", "hamming", "coverage")  # of their metrics

SINGLE = Target()

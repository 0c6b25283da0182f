"""Is a bulk result complete, and what is in it?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vitruvian.bulk.job import JOB_FILE, MAX_PIECE, identity_of, read_description
from vitruvian.bulk.parts import WRITING, columns_of, is_part, part_name, read_part
from vitruvian.bulk.place import Place
from vitruvian.errors import ConfigError, DataError, FileError, require
from vitruvian.files import atomic_open
from vitruvian.settings import check_choice, check_range, validate

SHOWN = 5
MAX_IMAGES = 2**40
MAX_WIDTH = 2**20


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The totals of a bulk result of which every part is there."""

    task: str
    model: str
    images: int
    parts: int
    errors: dict[str, int]
    """How many images have each error."""
    examples: dict[str, str]
    """The first image of each error."""

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "model": self.model,
            "images": self.images,
            "parts": self.parts,
            "unreadable": sum(self.errors.values()),
            "errors": self.errors,
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """The folder of a bulk job, as its `job.json` describes it."""

    place: Place
    job: dict[str, Any]
    images: int
    piece: int

    @property
    def identity(self) -> str:
        return identity_of(self.job)

    @property
    def parts(self) -> int:
        return -(-self.images // self.piece)

    def check_names(self) -> None:
        """DataError where a part is missing, or one is there that does not belong."""
        there = {name for name in self.place.names() if name.startswith("part-")}
        own = {name for name in there if is_part(name, self.parts)}
        foreign = sorted(there - own)
        if foreign and not own:
            raise DataError(
                f"{self.place}: {JOB_FILE} describes {self.parts:,} parts, and {foreign[0]} is none of them; if it was "
                "edited, remove it and run the job again, which keeps the parts"
            )
        if len(own) < self.parts:
            missing = (number for number in range(1, self.parts + 1) if part_name(number - 1, self.parts) not in own)
            some = ", ".join(map(str, islice(missing, SHOWN)))
            raise DataError(
                f"{self.place}: {self.parts - len(own):,} of {self.parts:,} parts are missing (number {some}"
                f"{', ...' * (self.parts - len(own) > SHOWN)}); run the job again, it makes only these"
            )
        if foreign:
            raise DataError(f"{self.place}: {foreign[0]} is no part of this job of {self.parts:,} parts; remove it")

    def tables(self) -> Iterator[Any]:
        """Every part, checked, in order."""
        self.check_names()
        yield from map(self.table, range(self.parts))

    def table(self, part: int, *, only: Sequence[str] | None = None) -> Any:
        """One part, checked; of all columns or of some."""
        rows = range(part * self.piece, min((part + 1) * self.piece, self.images))
        name = part_name(part, self.parts)
        return read_part(self.place, name, self.identity, rows, columns_of(self.job), only=only)


def open_result(where: str | Path) -> Result:
    """The result in a folder or behind a URL."""
    place = Place(where)
    if JOB_FILE not in place.names():
        raise DataError(f"{place}: no {JOB_FILE} in it; wanted a folder that `vit embed` or `vit predict --out` wrote")
    name = f"{place}/{JOB_FILE}"
    job = read_description(place)
    try:
        check_choice("task", job["task"], ("embed", "predict"))
        limits = {"images": MAX_IMAGES, "piece": MAX_PIECE}
        if job["task"] == "embed":
            limits["width"] = MAX_WIDTH
            check_choice("dtype", job["dtype"], ("float16", "float32"))
        for key, most in limits.items():
            job[key] = validate(key, int, job[key])
            check_range(key, job[key], 1, most)
        for key, kind in {"model": str, "data": str, "split": str | None}.items():
            validate(key, kind, job[key])
    except (KeyError, ConfigError) as error:
        found = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{name}: not the description of a job: {found}") from error
    return Result(place=place, job=job, images=job["images"], piece=job["piece"])


def merge(
    where: str | Path,
    out: str | Path | None = None,
    *,
    track: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> Merged:
    """Verify that all parts of a job are present and that no image is missing or repeated.

    Args:
        where: Directory or URL of the job.
        out: Write all rows to this Parquet file.
        track: Wraps the iteration over parts to show progress.

    Returns:
        The number of rows and of errors.
    """
    require("pyarrow", "parquet")
    result = open_result(where)
    result.check_names()
    if out is not None:
        check_apart(out, result.place)
    tables = result.tables() if track is None else track(result.tables(), result.parts)
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for table in tables if out is None else written(tables, Path(out)):
        for key, error in zip(table["key"].to_pylist(), table["error"].to_pylist()):
            if error:
                errors[error] += 1
                examples.setdefault(error, key)
    return Merged(
        task=result.job["task"],
        model=result.job["model"],
        images=result.images,
        parts=result.parts,
        errors=dict(errors.most_common()),
        examples=examples,
    )


def check_apart(out: str | Path, place: Place) -> None:
    """FileError where the merged file would take the place of a part or of the job's description."""
    path = Path(out)
    if re.match(r"\w{2,}:/", str(out)):  # a path has one slash left of two
        raise FileError(f"{out}: a URL; the merged file is written to the disk")
    beside = path.expanduser().resolve().parent == Path(str(place)).expanduser().resolve()
    if beside and (path.name == JOB_FILE or path.name.startswith("part-")):
        raise FileError(f"{out}: a file of the job itself; choose another name, such as all.parquet")


def written(tables: Iterable[Any], out: Path) -> Iterator[Any]:
    """The tables, which by the end are also in one file, each as a row group."""
    parquet = require("pyarrow.parquet", "parquet")
    if out.is_dir():
        raise FileError(f"{out}: a folder; wanted the name of a file such as {out / 'all.parquet'}")
    with (
        atomic_open(out) as file,
        ExitStack() as stack,
    ):  # a writer that is not closed before its file says so on stderr
        writer = None
        for table in tables:
            if writer is None:
                new = parquet.ParquetWriter(file, table.schema, **WRITING)
                writer = stack.enter_context(new)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            yield table

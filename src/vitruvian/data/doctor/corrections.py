"""Apply the corrections of the review page: write a new manifest of a dataset, whose files are not changed."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitruvian.data.folder import FolderSource
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, TargetSource
from vitruvian.data.tables import OPTIONAL, SEVERAL, ManifestSource, cell_text, manifest_rows, parse_row
from vitruvian.errors import DataError, FileError
from vitruvian.files import atomic_path, read_object
from vitruvian.targets import KINDS
from vitruvian.text import printable

FORMAT = 1
Position = tuple[str, int]  # split and index of an image
Rows = Iterator[tuple[Position, dict[str, str]]]  # cells by column; those of the path and the label are set later


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedCorrections:
    """Counts of the applied corrections."""

    images: int  # images in the new manifest
    changed: int
    excluded: int
    confirmed: int


def apply_corrections(data: str | Path, corrections: Path, out: Path) -> AppliedCorrections:
    """Write a manifest of a dataset with corrected labels.

    Args:
        data: A folder of images, or a manifest.
        corrections: The file that the review page saves.
        out: The new manifest, in a folder above the images, since its paths are relative to it.

    Raises:
        DataError: The corrections are not of this dataset.
        FileError: `out` would change the data, or is not above the images.
    """
    decisions = read_corrections(corrections, open_dataset(data))

    def correct(position: Position, label: str) -> str | None:
        return decisions[position]["label"] if position in decisions else label

    count = write_manifest(data, out, correct)
    labels = [(entry["was"], entry["label"]) for entry in decisions.values()]
    return AppliedCorrections(
        images=count,
        changed=sum(label is not None and label != was for was, label in labels),
        excluded=sum(label is None for _, label in labels),
        confirmed=sum(label == was for was, label in labels),
    )


def check_manifest(data: str | Path, out: Path) -> None:
    """Raise if a manifest of the data cannot be written to this path."""
    path = Path(data).expanduser()
    if out.suffix.lower() != ".csv":
        raise FileError("not the name of a manifest, such as corrected.csv", where=out)
    if path.exists() and out.exists() and os.path.samefile(out, path):
        raise FileError("this is the data itself", where=out, hint="choose another name")
    if path.is_dir() and Path(os.path.abspath(out)).is_relative_to(os.path.abspath(path)):
        raise FileError("inside the data", where=out, hint=f"write it beside {path}")


def write_manifest(
    data: str | Path, out: Path, label_of: Callable[[Position, str], str | None], target: str = "auto"
) -> int:
    """Write a manifest of a dataset of files with the labels that `label_of` returns; None leaves an image out.

    The other columns of a manifest are kept. Returns the number of images in the new one.
    """
    check_manifest(data, out)
    dataset = open_dataset(data, target=target, accepts=KINDS)
    splits = {name: part.source if isinstance(part, TargetSource) else part for name, part in dataset.splits.items()}
    sources = {name: source for name, source in splits.items() if isinstance(source, FolderSource)}
    if len(sources) < len(splits):
        reason = "the images are not files; manifests are for folders of images and for other manifests"
        raise DataError(reason, where=dataset.name)
    first = next(iter(sources.values()))
    label_column = SEVERAL if dataset.target == "multi" and not dataset.columns else "label"
    columns: Iterable[str] = ("path", label_column, *OPTIONAL)
    rows: Rows = (
        ((split, index), {label_column: "", "split": split, "weight": f"{source.weight(index):g}"})
        for split, source in sources.items()
        for index in range(len(source))
    )
    if isinstance(first, ManifestSource):
        names = {name: None for _, row in manifest_rows(first.manifest, ()) for name in row}
        columns = dict.fromkeys(label_column if name == first.layout.label else name for name in names)
        rows = table_rows(first, label_column)
    with atomic_path(out) as new, open(new, "w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        count = 0
        for position, row in rows:
            source, index = sources[position[0]], position[1]
            label = label_of(position, source.classes[source.label(index)])
            if label is not None:
                row["path"] = relative_path(os.path.abspath(out.parent), source.root / source.key(index))
                if label_column in row:  # otherwise the labels or numbers have columns of their own
                    row[label_column] = label
                writer.writerow(row)
                count += 1
    return count


def table_rows(source: ManifestSource, label_column: str) -> Rows:
    """The rows of a manifest that list an image, in their order."""
    counts: Counter[str] = Counter()
    for position, row in manifest_rows(source.manifest, ()):
        entry = parse_row(source.manifest, position, row, source.layout)
        if entry is not None:
            cells = {name: json.dumps(v) if isinstance(v, list | dict) else cell_text(v) for name, v in row.items()}
            if source.layout.label in cells:
                cells[label_column] = cells.pop(source.layout.label)
            yield (entry.split, counts[entry.split]), cells
            counts[entry.split] += 1


def relative_path(folder: str, image: Path) -> str:
    """The path of an image in a manifest in this folder."""
    absolute = os.path.abspath(image)
    path = os.path.relpath(absolute, folder)
    if path.startswith(os.pardir):
        hint = f"write the manifest to a folder above, such as {os.path.commonpath([absolute, folder])}"
        raise FileError(f"{printable(absolute)} is not below it", where=folder, hint=hint)
    if path != path.strip() or not printable(path) == path:
        raise FileError("a manifest cannot contain this name", where=printable(absolute), hint="rename the file")
    return path


def read_corrections(path: Path, data: Dataset) -> dict[Position, dict[str, Any]]:
    """The corrections by image; raises DataError if they are not of this dataset."""
    content = read_object(path, raises=DataError)
    entries = content.get("corrections")
    if content.get("format") != FORMAT or not isinstance(entries, list):
        raise DataError("not the corrections of a page of `vit doctor --review`", where=path)
    decisions: dict[Position, dict[str, Any]] = {}
    for row, entry in enumerate(entries, 1):
        try:
            split, index, key, was, label = (entry[name] for name in ("split", "index", "key", "was", "label"))
            source = data.splits[split]
            if not isinstance(index, int) or not 0 <= index < len(source):
                raise IndexError
            actual = source.key(index), source.classes[source.label(index)]
        except (KeyError, TypeError, IndexError):
            reason = f"correction {row} is not about an image of {data.name}"
            raise DataError(reason, where=path, hint="check that it belongs to this dataset") from None
        if (key, was) != actual:
            raise DataError(
                f"correction {row} is about {printable(str(key))} labeled {printable(str(was))}, but image "
                f"{index} of {split} is {printable(actual[0])} labeled {printable(actual[1])}",
                where=path,
                hint="the data has changed: run `vit doctor --review` again",
            )
        if label is not None and label not in source.classes:
            raise DataError(f"correction {row}: no class {printable(str(label))!r} in {data.name}", where=path)
        decisions[split, index] = entry
    return decisions

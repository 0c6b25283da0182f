"""Exported graphs in the cache folder: whether one is still what was written there, and which are removed."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from vitruvian.errors import FileError
from vitruvian.files import digest, file_stamp, read_object, write_json
from vitruvian.progress import print_status

KEPT_GRAPHS = 8
"""Exported graphs that stay in the cache folder, the last used."""
RECORD = "exported.json"
"""Beside a graph: what its files were when they were written, last."""


def record_of(graph: Path) -> Path:
    return (graph.parent if graph.suffix == ".onnx" else graph.parent.parent) / RECORD


def parts_of(graph: Path) -> list[Path]:
    return [graph] if graph.suffix == ".onnx" else [graph, graph.with_suffix(".bin")]


def record(graph: Path) -> None:
    """Remember what was written."""
    parts = parts_of(graph)
    found = {"stamps": [file_stamp(part) for part in parts], "sha256": [digest(part) for part in parts]}
    write_json(record_of(graph), found)


def is_whole(graph: Path) -> bool:
    """Whether a graph is what was written; a copy of the cache, whose times are others, is compared by its bytes."""
    with suppress(OSError, FileError):
        known, parts = read_object(record_of(graph)), parts_of(graph)
        if known.get("stamps") == [file_stamp(part) for part in parts]:
            return True
        if known.get("sha256") == [digest(part) for part in parts]:
            with suppress(FileError):
                record(graph)
            return True
    return False


def forget(graph: Path) -> None:
    """Remove a graph and what was found out about it, but for the lock that is held."""
    folder = record_of(graph).parent
    if record_of(graph).exists():
        print_status(f"note: {graph}: is not what was written there; it is removed")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            with suppress(OSError):
                path.unlink()


def forget_old(folder: Path) -> None:
    """Remove graphs that were not used for the longest time."""
    used: dict[Path, float] = {}
    for path in folder.iterdir():
        with suppress(OSError):  # removed by another process meanwhile
            if path.is_dir():
                used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[:-KEPT_GRAPHS]:
        shutil.rmtree(path, ignore_errors=True)

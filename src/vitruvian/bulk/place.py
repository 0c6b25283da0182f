"""The files of a bulk job: small files written whole, in a folder or behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitruvian.data.remote import file_system, retry
from vitruvian.errors import DataError, FileError
from vitruvian.files import file_stamp, read_bytes, write_bytes

MAX_PART_BYTES = 2**31


class Place:
    """A folder, local or behind a URL of fsspec."""

    def __init__(self, where: str | Path) -> None:
        self.where = str(where).removeprefix("file://").rstrip("/") or "/"
        _, is_url, name = str(where).rpartition("://")
        if not (name.strip("/") if is_url else name).strip():
            raise FileError("the name of the output folder is empty")
        self._system: Any = None
        if "://" in self.where:
            self._system, self._root = file_system(self.where)
        else:
            self._folder = Path(self.where).expanduser()
            if self._folder.exists() and not self._folder.is_dir():
                raise FileError(f"{self.where}: not a folder")

    def __str__(self) -> str:
        return self.where

    def names(self) -> list[str]:
        """The files in it that are not hidden, sorted; none where it does not exist."""
        if self._system is None:
            found = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        else:
            found = retry(self.where, self._listed)
        return sorted(name for name in found if not name.startswith("."))

    def _listed(self) -> list[str]:
        try:
            self._system.invalidate_cache()
            return [str(path).rpartition("/")[2] for path in self._system.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def stamps(self, prefix: str) -> list[list[Any]]:
        """For each file whose name begins so, what changes when the file does."""
        names = [name for name in self.names() if name.startswith(prefix)]
        if self._system is None:
            return [file_stamp(self._folder / name) for name in names]
        listed = retry(self.where, lambda: self._system.ls(self._root, detail=True))
        marks = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
        found = {str(row["name"]).rpartition("/")[2]: [str(row.get(mark)) for mark in marks] for row in listed}
        return [[name, *found.get(name, [])] for name in names]

    def read(self, name: str) -> bytes:
        if self._system is None:
            return read_bytes(self._folder / name, raises=DataError, most=MAX_PART_BYTES)
        return retry(f"{self.where}/{name}", lambda: bytes(self._system.cat_file(f"{self._root}/{name}")))

    def write(self, name: str, content: bytes) -> None:
        """A file that is whole, or not there: an object store shows an object only once it is complete."""
        if self._system is None:
            write_bytes(self._folder / name, content)
            return
        where, path = f"{self.where}/{name}", f"{self._root}/{name}"
        retry(where, lambda: self._system.pipe_file(path, content), doing="written", raises=FileError)

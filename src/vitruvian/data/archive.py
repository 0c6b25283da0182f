"""Zip archives: extracted once to the cache directory, under limits, and only if every member is an ordinary file."""

import shutil
import stat
import zipfile
from pathlib import Path

from vitruvian.data.index import cached_folder
from vitruvian.errors import DataError, parsing
from vitruvian.text import plural

MAX_MEMBERS = 5_000_000
MAX_RATIO, ALLOWED_BYTES = 50, 2**30  # an archive may expand to this many times its size, or to this many bytes
MAC_FOLDER = "__MACOSX/"  # macOS adds it to archives; it holds no images


def extract_zip(path: Path) -> tuple[Path, list[str]]:
    """The folder with the content of an archive, and notes about what was skipped.

    It is extracted again when the archive changes. If all is inside one folder, that folder is returned.
    """
    folder, notes = unpack_zip(path)
    while len(inner := list(folder.iterdir())) == 1 and inner[0].is_dir():
        folder = inner[0]
    return folder, notes


def unpack_zip(path: Path) -> tuple[Path, list[str]]:
    """The folder of the whole archive, in which files have the names of their members; and notes, as `extract_zip`."""
    with parsing(path, DataError, hint="download it again, or unpack it and pass the folder"):
        with zipfile.ZipFile(path) as archive:
            members = check_members(path, archive)
            folder = cached_folder("zip", [path], lambda folder: extract(archive, members, folder))
        skipped = sum(member.filename.startswith(MAC_FOLDER) for member in archive.infolist())
        return folder, [f"skipped {plural(skipped, 'file')} of macOS in {MAC_FOLDER}"] if skipped else []


def check_members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The files to extract by their paths. Raises DataError if one of them is not an ordinary file."""
    members: dict[str, zipfile.ZipInfo] = {}
    if len(archive.infolist()) > MAX_MEMBERS:
        raise DataError(f"{len(archive.infolist()):,} members exceed the limit of {MAX_MEMBERS:,}", where=path)
    for member in archive.infolist():
        name, kind = member.filename.replace("\\", "/"), stat.S_IFMT(member.external_attr >> 16)
        problem = ""
        if name.startswith("/") or ":" in name.partition("/")[0] or ".." in name.split("/"):
            problem = "points outside the archive"
        elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            problem = "is a link" if kind == stat.S_IFLNK else "is not a regular file"
        elif member.flag_bits & 1:
            problem = "is encrypted"
        elif name in members:
            problem = "occurs twice"
        if problem:
            hint = "unpack it and pass the folder"
            raise DataError(f"the member {name!r} {problem}, which is not supported", where=path, hint=hint)
        if not member.is_dir() and not name.endswith("/") and not name.startswith(MAC_FOLDER):
            members[name] = member
    total, size = sum(member.file_size for member in members.values()), path.stat().st_size
    if total > max(ALLOWED_BYTES, MAX_RATIO * size):
        raise DataError(f"its {size:,} bytes would expand to {total:,}", where=path, hint="unpack it if you trust it")
    return members


def extract(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], folder: Path) -> None:
    """Write the members. A stream that is longer than it states, or has a wrong checksum, raises."""
    for name, member in members.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as content, open(target, "xb") as file:
            shutil.copyfileobj(content, file, 2**20)

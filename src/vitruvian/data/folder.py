"""Image files in folders and zip archives: one folder per class, lists of `path label`, or all images below a folder.

A zip archive is extracted once to the cache directory, under limits, and only if every member is an ordinary file.
"""

import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vitruvian.data.decode import EXTENSIONS, HEIF_EXTENSIONS, NEEDS_HEIF, RawImage, is_url
from vitruvian.data.index import Classes, Entry, IndexedSource, build_index, cached_folder
from vitruvian.data.names import class_name, split_name
from vitruvian.data.sources import EMPTY_CLASS, Dataset, SkippedFiles, check_inside, make_dataset, read_file
from vitruvian.errors import DataError, parsing
from vitruvian.progress import print_notes
from vitruvian.text import natural_key, plural, printable

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


HEIC = ("HEIC photo", f"({NEEDS_HEIF})")  # noun and rest of the note about them


class FolderSource(IndexedSource):
    """Image files below one folder; the key of a sample is its path relative to it."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, root: Path) -> None:
        super().__init__(name, classes, folder)
        self.root = root

    def read(self, index: int) -> RawImage:
        return read_file(os.path.join(self.root, self.key(index)))


def open_folder(folders: list[Path], name: str) -> Dataset:
    """The dataset in a folder of class folders. It is listed each time, since changes cannot be detected cheaply."""
    root = folders[0]
    splits = split_folders(root)
    stored = build_index(partial(list_classes, root, splits))
    if not stored.classes:
        files = [path for path in root.iterdir() if path.is_file() and not path.name.startswith(".")]
        loose = [path for path in files if path.suffix.lower() in EXTENSIONS]
        tables = [path.name for path in files if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet")]
        reason = f"no images in class folders ({'; '.join(stored.notes) or 'the folder is empty'})"
        hint = "expected one folder of images per class"
        if (root / "run.json").is_file():
            reason = "a training run, not images"
            hint = f"`--from {name}` starts from its weights, `--resume {name}` continues it"
        elif tables:
            reason, hint = f"contains {tables[0]}, but no class folders", f"pass {root / tables[0]}"
        elif loose:
            reason = f"{len(loose)} images without labels"
            hint = "put each into a folder named after its class, or write a CSV file with the columns path and label"
        raise DataError(reason, where=name, hint=hint)
    sources = {
        split: FolderSource(f"{name}/{split}" if splits else name, stored.classes, index, root=root)
        for split, index in stored.splits.items()
    }
    return make_dataset(name, sources, stored.notes, divided=bool(splits))


def open_unlabeled(folder: Path) -> FolderSource | None:
    """All images below a folder, with one class of an empty name; None if it contains no images."""
    start = len(os.path.join(folder, ""))
    stored = build_index(lambda skipped: (Entry("all", path[start:], "") for path in list_images(folder, skipped)))
    print_notes(stored.notes)
    return FolderSource(str(folder), ("",), stored.splits["all"], root=folder) if stored.splits else None


def split_folders(root: Path) -> dict[Path, str]:
    """The folders of `root` that are splits: named like one, and containing folders, unlike a class 'train'."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    named = {path: split for path in folders if (split := split_name(path.name))}
    splits = {path: split for path, split in named.items() if any(child.is_dir() for child in path.iterdir())}
    if named and not splits and len(named) == len(folders):
        names = " and ".join(path.name for path in named)
        reason = f"no class folders in {names}, so the images have no labels; expected one folder per class"
        raise DataError(reason, where=root)
    if len(set(splits.values())) < len(splits):
        names = " and ".join(path.name for path in splits)
        raise DataError(f"{names} are the same split", where=root, hint="keep one of them")
    return splits


def list_classes(root: Path, splits: dict[Path, str], skipped: SkippedFiles) -> Iterator[Entry]:
    """List the images of class folders, ordered by split, by class (naturally: 2 before 10), and by name."""
    for path in sorted(root.iterdir()) if splits else ():
        if path not in splits:
            skipped.add("file", "beside the splits", path.name)
    start = len(os.path.join(root, ""))
    for top, split in (splits or {root: "train"}).items():
        children = sorted(top.iterdir(), key=lambda path: natural_key(path.name))
        listed = {file_id(path) for path in (root, top, *children) if path.is_dir()}  # a link adds no second class
        for child in children:
            relative = os.path.relpath(child, root)
            if child.name.startswith("."):
                skipped.add("hidden file", "", relative)
            elif not child.is_dir():
                skipped.add("file", "outside the class folders", relative)
            else:
                label, count = class_name(child.name), 0
                for image in list_images(child, skipped, set(listed)):
                    count += 1
                    yield Entry(split, image[start:], label)
                if not count:
                    skipped.add(*EMPTY_CLASS, relative)


def list_images(folder: str | Path, skipped: SkippedFiles, listed: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Paths of the images at any depth, sorted in each folder; links are followed, but no folder is listed twice."""
    listed = set() if listed is None else listed
    listed.add(file_id(folder))
    with os.scandir(folder) as scanned:
        items = sorted(scanned, key=lambda item: item.name)
    for item in items:
        if item.name.startswith("."):
            skipped.add("hidden file", "", item.path)
        elif os.path.isdir(item.path):  # False, not an error, for a link to itself
            if file_id(item.path) in listed:
                skipped.add("link", "to a folder that is already listed", item.path)
            else:
                yield from list_images(item.path, skipped, listed)
        elif (extension := os.path.splitext(item.name)[1].lower()) not in EXTENSIONS:
            unknown = "non-image file", f"({extension or 'no extension'})"
            skipped.add(*(HEIC if extension in HEIF_EXTENSIONS else unknown), item.path)
        elif not os.path.isfile(item.path):
            skipped.add("non-regular file", "(broken link, pipe or device)", item.path)
        else:
            yield item.path


def file_id(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def open_lists(name: str, folder: Path, lists: Mapping[str, Path], *, classes: int = 0) -> Dataset:
    """The dataset of one list per split; labels are indices from 0, or those that occur if `classes` is 0.

    Paths are relative to the folder of the list or to one above it, up to `folder`.
    """

    def entries() -> Iterator[Entry]:
        for split, path in lists.items():
            parents = [path.parent, *(parent for parent in path.parent.parents if parent.is_relative_to(folder))]
            start = ""
            for index, (image, label) in enumerate(read_list(path)):
                image = check_inside(path, image)
                if not index:  # the first image shows which folder the paths are relative to
                    roots = [parent for parent in parents if (parent / image).exists()]
                    if not roots:
                        reason = f"its first image, {printable(image)}, is not in {parents[0]}"
                        raise DataError(reason, where=path, hint="unpack the images there")
                    start = os.path.relpath(roots[0], folder)
                yield Entry(split, os.path.normpath(os.path.join(start, image)), label)

    return open_entries(name, folder, entries(), classes=tuple(map(str, range(classes))) if classes else None)


def read_list(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of path and label; a path may contain spaces."""
    with parsing(path, DataError, reason="not UTF-8 text"), open(path, encoding="utf-8-sig") as file:
        for line_number, line in enumerate(file, 1):
            words = line.split()
            if not words or line.startswith("#"):
                continue
            if len(words) < 2:
                where = f"{path}, line {line_number}"
                raise DataError(f"{printable(line.strip())!r} is not a path and a label", where=where)
            yield line.strip()[: -len(words[-1])].rstrip(), words[-1]


def open_entries(
    name: str, root: Path, entries: Iterable[Entry], classes: Classes = None, source: Callable[..., Any] = FolderSource
) -> Dataset:
    """The dataset of these entries, whose keys are paths below `root`; `classes` as in `build_index`."""
    stored = build_index(lambda _: entries, classes=classes)
    return make_dataset(name, stored.sources(name, source, root=root))


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The given files and URLs, and all images in the given folders and zip archives, sorted.

    In folders, images are recognized by their extension; the other files are counted in notes on stderr.
    """
    images: list[str] = []
    names = [os.fspath(path) for path in paths]
    if len(names) == 1 and names[0].lower().endswith((".csv", ".tsv", ".jsonl", ".json", ".parquet", ".tar")):
        hint = "`vit predict` takes it with a folder as --out, `vit evaluate` and `vit train` take it directly"
        raise DataError("a dataset, not an image", where=printable(names[0]), hint=hint)
    for path in names:
        folder = path
        if path.lower().endswith(".zip") and os.path.isfile(path):
            extracted, notes = extract_zip(Path(path))
            folder = str(extracted)
            print_notes(notes)
        elif is_url(path) or not os.path.isdir(path):
            images.append(path)
            continue
        skipped = SkippedFiles()
        try:
            below = sorted(list_images(folder, skipped))
        except OSError as error:
            reason = f"cannot list this folder ({error.strerror})"
            raise DataError(reason, where=printable(str(error.filename))) from error
        if not below:
            reason = f"no images in this folder or below it (extensions {' '.join(sorted(EXTENSIONS))})"
            raise DataError(reason, where=printable(path), hint="; ".join(skipped.notes()))
        print_notes(skipped.notes())
        images += below
    return images

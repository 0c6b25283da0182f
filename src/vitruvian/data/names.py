"""Names in datasets: of splits, of classes, and patterns of file names such as `train-{000..012}.tar`."""

import glob
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

from vitruvian.errors import DataError, parsing
from vitruvian.files import parse_json, read_text

SPLITS = {
    # our name: the names that folders, files and manifests use
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}

CLASS_FILES = ("classes.json", "classes.txt")
MAX_NAMES = 1_000_000
BRACES = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}")  # a range or a choice


@lru_cache(maxsize=1000)
def split_name(text: str) -> str | None:
    """Our name of the split that is called `text`, or None if it is not a split."""
    return next((name for name, aliases in SPLITS.items() if text.strip().lower() in aliases), None)


def split_of_file(path: str) -> str:
    """The split named by a file or by its folder: `imagenet-train-0001.tar` is in `train`, which is the default."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    words = [*re.findall("[a-z]+", name.lower()), folder.rpartition("/")[2]]
    return next(filter(None, map(split_name, words)), "train")


def class_name(text: str) -> str:
    """Normalize a class name to one Unicode form, since file systems compose accents differently."""
    return unicodedata.normalize("NFC", text)


def find_classes(folder: Path) -> tuple[tuple[str, ...] | None, list[Path]]:
    """The class names listed in a file of this folder, and that file; (None, []) if there is no such file."""
    for name in CLASS_FILES:
        path = folder / name
        if path.is_file():
            return parse_classes(read_text(path, raises=DataError), str(path)), [path]
    return None, []


def parse_classes(text: str, where: str) -> tuple[str, ...]:
    """Class names in the order of their indices.

    JSON holds a list of names, an object from index to name, or one from name to index. Other text has one name per
    line.
    """
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if where.endswith(".json"):
        content = parse_json(text, where, raises=DataError)
        with parsing(where, DataError, reason="neither a list of class names nor an object of indices and names"):
            if isinstance(content, list):
                content = {str(index): name for index, name in enumerate(content)}
            pairs = sorted((int(k), str(v)) if k.isdecimal() else (int(v), k) for k, v in content.items())
        if [index for index, _ in pairs] != list(range(len(pairs))):
            raise DataError(f"the {len(pairs)} classes are not numbered from 0 to {len(pairs) - 1}", where=where)
        names = [name for _, name in pairs]
    classes = tuple(map(class_name, names))
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise DataError(f"the class {twice!r} is listed twice", where=where)
    if not classes:
        raise DataError("no classes listed", where=where)
    return classes


def is_pattern(text: str) -> bool:
    return bool(BRACES.search(text)) or glob.has_magic(text)


def expand_braces(text: str) -> list[str]:
    """All names that the braces stand for, with numbers as wide as the first one is written."""
    match = BRACES.search(text)
    if not match:
        return [text]
    first, last, choices = match.groups()
    if choices is not None:
        middles = choices.split(",")
    elif abs(int(last) - int(first)) >= MAX_NAMES:
        raise DataError(f"more than {MAX_NAMES} names", where=text)
    else:
        step = 1 if int(first) <= int(last) else -1
        middles = [str(index).zfill(len(first)) for index in range(int(first), int(last) + step, step)]
    before, after = text[: match.start()], text[match.end() :]
    return [name for middle in middles for name in expand_braces(before + middle + after)]


def match_files(pattern: str) -> list[Path]:
    """The files that match a pattern; names written out in braces must all exist."""
    files: list[Path] = []
    for name in expand_braces(pattern):
        paths = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            problem = "not a regular file" if Path(missing[0]).exists() else "no such file"
            raise DataError(f"{problem} (from the pattern {pattern})", where=missing[0])
        files += map(Path, paths)
    if not files:
        raise DataError("no file matches this pattern", where=pattern)
    return files

"""The image files that a list of files and folders means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from vitruvian.data.decode import EXTENSIONS, printable
from vitruvian.errors import DataError


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files as they are given, and the images in each folder and below it, sorted.

    In folders, an image is known by its ending, and what is hidden (a name that starts with a dot) is left out.
    """
    found: list[str] = []
    for given in paths:
        path = os.fspath(given)
        if not os.path.isdir(path):
            found.append(path)
            continue
        images = sorted(images_below(path))
        if not images:
            endings = " ".join(sorted(EXTENSIONS))
            raise DataError(f"{printable(path)}: no images in this folder or below it (looked for {endings})")
        found += images
    return found


def images_below(folder: str) -> Iterator[str]:
    """Image files of a folder and its subfolders, links followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{printable(str(error.filename))}: cannot list this folder ({error.strerror})")

    seen: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above or beside
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield os.path.join(place, name)

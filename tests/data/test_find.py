"""Which files a list of files and folders means."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitruvian.data.folder import find_images
from vitruvian.errors import DataError


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_folders_give_their_images_sorted_and_files_come_as_given(tmp_path):
    make(tmp_path, "b.JPG", "a.png", "sub/c.webp", "notes.txt", ".hidden.jpg", ".cache/d.jpg", "README")
    inside = [str(tmp_path / name) for name in ("a.png", "b.JPG", "sub/c.webp")]
    assert find_images([tmp_path]) == inside
    assert find_images(["./z.txt", tmp_path / "sub", "missing.jpg"]) == ["./z.txt", inside[2], "missing.jpg"]


def test_links_are_followed_and_circles_end(tmp_path):
    make(tmp_path, "real/a.jpg")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "circle").symlink_to(tmp_path / "real")
    assert find_images([tmp_path / "set"]) == [str(tmp_path / "set" / "linked" / "a.jpg")]


def test_a_folder_without_images_is_an_error(tmp_path):
    make(tmp_path, "notes.txt")
    with pytest.raises(DataError, match=r": no images in this folder or below it \(extensions \.apng .* \.webp\)"):
        find_images([tmp_path])

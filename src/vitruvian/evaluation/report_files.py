"""Reports on disk: a page, alone or as one with its numbers as JSON; an older one stays until the new is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitruvian.weights.store import install, staging, write_json

PAGE = "report.html"


def write_html(path: Path, content: str) -> Path:
    """Write a page and give its path."""
    with staging(path) as staged:
        staged.write_text(content, encoding="utf-8")
        install(staged, path)
    return path


def write_report(folder: Path, *, name: str, numbers: dict[str, Any], page: str) -> Path:
    """Write `name` and report.html into a folder, made if needed, and give the path of the page."""
    with staging(folder) as staged:
        staged.mkdir()
        write_json(staged / name, numbers)
        (staged / PAGE).write_text(page, encoding="utf-8")
        install(staged, folder)
    return folder / PAGE

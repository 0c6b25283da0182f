"""A report on disk: its numbers as JSON and its page, replaced as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitruvian.weights.store import install, staging, write_json

PAGE = "report.html"


def write_report(folder: Path, *, name: str, numbers: dict[str, Any], page: str) -> None:
    """Write `name` and report.html into a folder, made if needed; older ones stay until the new are complete."""
    with staging(folder) as staged:
        staged.mkdir()
        write_json(staged / name, numbers)
        (staged / PAGE).write_text(page, encoding="utf-8")
        install(staged, folder)

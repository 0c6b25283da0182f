"""What the pages of the documentation say: their fenced blocks, the commands in them, their headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PROGRAMS = ("vit", "torchrun", "pip", "python", "make", "curl", "docker", "sbatch", "for", "tensorboard", "hf", "git")
"""What a command begins with; a block without a language that begins otherwise is output or a listing."""


class Block(NamedTuple):
    """A fenced block; `line` is that of its fence, from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


def is_shell(block: Block) -> bool:
    first = re.sub(r"^(\$ |\w+=\S+ )+", "", block.text)
    return block.language in ("sh", "shell", "bash") or (
        block.language in ("", "text") and re.match(rf"(?:{'|'.join(PROGRAMS)})\b", first) is not None
    )


def commands(block: Block) -> list[str]:
    """The commands of a block, without prompts, comments and the lines that a prompt marks as output."""
    lines = re.sub(r" *\\\n *", " ", block.text).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    found = (re.sub(r"\s+#\s.*|^#.*", "", line).strip() for line in lines)
    return [line for line in found if line]


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks and, in them, what only looks like a link or a heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """What stands between backticks in the text."""
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    """Where the links and images of a page lead."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by, as Markdown's table of contents names them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}

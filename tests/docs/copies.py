"""Pages of the site that are copies of other files, so that they can be read anywhere: this script writes them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIES = {"docs/bundled.md": "src/vitruvian/bundled/card.md", "docs/measured.md": "benchmarks/RESULTS.md"}
PLOT = """
## Plot of time against work

![time of a batch of ViT-Ti/16 against its multiply-adds](work.png)
"""


def copy_of(source: str) -> str:
    """The text of the page; its numbers are those of the file, and its commands are not run."""
    text = (ROOT / source).read_text(encoding="utf-8")
    note = f"<!-- not measured: a copy of {source}, by tests/docs/copies.py -->"
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"^(#.*)$", rf"\1\n\n{note}", part, flags=re.MULTILINE) for part in parts[::2]]
    parts[1::2] = [re.sub(r"^```\w*", "```console", part) for part in parts[1::2]]
    return "".join(parts) + (PLOT if source.startswith("benchmarks") else "")


if __name__ == "__main__":
    for page, source in COPIES.items():
        (ROOT / page).write_text(copy_of(source), encoding="utf-8")

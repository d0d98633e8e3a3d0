"""The blocks of commands of a page, as tests give them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
ASSIGNMENTS = DOCS / "assignments"
SLURM = DOCS / "slurm.md"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(where: str, page: Path = README) -> list[list[str]]:
    """Lines of every block that is marked ``<!-- run: where -->``, in order."""
    return [lines for mark, lines in marked(page) if mark == where]


def marked(page: Path = README) -> list[tuple[str | None, list[str]]]:
    """Every block of commands, in order: where it is run, None for an unmarked one, and its lines."""
    found = re.findall(r"(?:<!-- run: ([\w ]+) -->\n)?```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return [(mark or None, block.splitlines()) for mark, block in found]


def marks(page: Path = README) -> list[str | None]:
    """For each block of commands, where it is run; None for an unmarked one."""
    return [mark for mark, _ in marked(page)]

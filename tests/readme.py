"""The README's blocks of commands, as tests give them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks(where: str) -> list[list[str]]:
    """Lines of every block that is marked ``<!-- run: where -->``, in order."""
    found = re.findall(rf"<!-- run: {re.escape(where)} -->\n```bash\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    return [block.splitlines() for block in found]


def marks() -> list[str | None]:
    """For each block of commands, where it is run; None for an unmarked one."""
    text = README.read_text("utf-8")
    found = re.findall(r"(?:<!-- run: ([\w ]+) -->\n)?```bash\n", text)
    return [mark or None for mark in found]

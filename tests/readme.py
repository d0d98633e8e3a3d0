"""The blocks of commands of a page, as tests give them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
RECIPES = README.parent / "configs" / "recipes" / "README.md"
SLURM = README.parent / "slurm" / "README.md"


def blocks(where: str, page: Path = README, section: str = "") -> list[list[str]]:
    """Lines of every block that is marked ``<!-- run: where -->``, in order; of the section with that heading."""
    return [lines for mark, lines in marked(page, section) if mark == where]


def marked(page: Path = README, section: str = "") -> list[tuple[str | None, list[str]]]:
    """Every block of commands, in order: where it is run, None for an unmarked one, and its lines."""
    text = page.read_text("utf-8")
    if section:
        (text,) = (part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(f"{section}\n"))
    found = re.findall(r"(?:<!-- run: ([\w ]+) -->\n)?```bash\n(.*?)```", text, re.DOTALL)
    return [(mark or None, block.splitlines()) for mark, block in found]


def marks(page: Path = README) -> list[str | None]:
    """For each block of commands, where it is run; None for an unmarked one."""
    return [mark for mark, _ in marked(page)]


def headings(page: Path) -> list[str]:
    """Those of its sections, in order."""
    return re.findall(r"^## (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """File and place in it of each link that stays in the project; the place without its mark, empty for none."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = [found for found in re.findall(r"\]\(([^)\s]+)[^)]*\)", text) if not re.match(r"[a-z]+:", found)]
    return [(file, place) for file, _, place in (target.partition("#") for target in targets)]


def anchors(page: Path) -> set[str]:
    """What a link may name of a page's headings, as GitHub makes it of them."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in found}

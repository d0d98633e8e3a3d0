"""The blocks of commands of a page, as tests give them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
ASSIGNMENTS = DOCS / "assignments"
SLURM = DOCS / "slurm.md"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(where: str, page: Path = README, *, typed: bool = False) -> list[list[str]]:
    """Lines of every block that is marked ``<!-- run: where -->``, in order."""
    return [lines for mark, lines in marked(page, typed=typed) if mark == where]


def marked(page: Path = README, *, typed: bool = False) -> list[tuple[str | None, list[str]]]:
    """Every block of commands, in order: where it is run, None for an unmarked one, and its lines.

    Args:
        typed: word for word; else the guides' ``trainkit VERB`` is the ``python -m jobs.VERB`` that it is, which needs
            no script of an installation.
    """
    text = page.read_text("utf-8")
    found = re.findall(r"(?:<!-- run: ([\w ]+) -->\n)?```bash\n(.*?)```", text, re.DOTALL)
    as_they_are = typed or page == README
    return [(mark or None, (block if as_they_are else by_module(block)).splitlines()) for mark, block in found]


def type_in(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line on a machine without SLURM, with this environment active."""
    scripts, words = Path(sys.executable).parent, shlex.split(line)
    if words[0] == "trainkit" and not (scripts / "trainkit").exists():  # an environment older than the command
        words[:1] = [sys.executable, "-m", "trainkit"]
    env = {**os.environ, "PATH": str(scripts), "TRAINKIT_RUNS": "runs", "PYTHONPATH": str(README.parent)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def by_module(text: str) -> str:
    """Commands as any Python that finds the package starts them."""
    return re.sub(r"^((?:[A-Z_]+=\S* )*)trainkit(?: (?=[a-z]))?", _module, text, flags=re.MULTILINE)


def _module(found: re.Match[str]) -> str:
    return f"{found[1]}python -m jobs{'.' * found[0].endswith(' ')}"


def marks(page: Path = README) -> list[str | None]:
    """For each block of commands, where it is run; None for an unmarked one."""
    return [mark for mark, _ in marked(page)]

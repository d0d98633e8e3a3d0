"""``python -m tests.check ROOM [PYTEST_ARGUMENT...]``: ruff, mypy and the tests of one room, side by side, in a minute.

A room is a folder in trainkit/, ``jobs``, ``docs``, or ``ground`` for the files beside the rooms. Of its tests those of
the default list are run, but for `SLOW`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import LONGEST

PROJECT = Path(__file__).resolve().parents[1]
SLOW = (
    *("tests/jobs/test_bench.py", "tests/jobs/test_submit.py", "tests/jobs/test_verbs.py"),
    *("tests/training/test_build.py", "tests/training/test_resume.py"),
    *(name for name in LONGEST if name.endswith(".py")),
)
"""Files that the whole suite runs, and a check of their room does not."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.check", description="ruff, mypy and the tests of one room, in a minute."
    )
    parser.add_argument("room", choices=rooms(), metavar="ROOM", help=", ".join(rooms()))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="for pytest: -k WORD")
    args = parser.parse_args(argv)
    code, tests = folders(args.room)
    ignored = [f"--ignore={name}" for name in SLOW]
    commands = (
        ["ruff", "check", "--quiet", *code, *tests],
        ["ruff", "format", "--check", "--quiet", *code, *tests],
        ["mypy", *code, *tests],
        ["pytest", "-q", "-n", "auto", "--dist", "loadfile", *ignored, *tests, *args.rest],
    )
    started = [subprocess.Popen([sys.executable, "-m", *words], cwd=PROJECT) for words in commands]
    ends = {" ".join(words[:2]): process.wait() for words, process in zip(commands, started, strict=True)}
    if left := [name for name in SLOW if name.startswith(tuple(tests))]:
        print("== for the whole suite:", *left)
    print(f"== {args.room}: {', '.join(name for name, code in ends.items() if code) or 'all passed'}")
    return max(ends.values())


def rooms() -> list[str]:
    """What may be checked: rooms that have files and tests."""
    found = [folder.name for folder in (PROJECT / "tests").iterdir() if (PROJECT / "trainkit" / folder.name).is_dir()]
    return ["ground", *sorted([*found, "jobs", "docs"])]


def folders(room: str) -> tuple[list[str], list[str]]:
    """Code and tests of a room, as paths in the project."""
    if room == "ground":
        code = sorted(str(file.relative_to(PROJECT)) for file in (PROJECT / "trainkit").glob("*.py"))
        return code, sorted(str(file.relative_to(PROJECT)) for file in (PROJECT / "tests").glob("test_*.py"))
    code = [] if room == "docs" else [room if room == "jobs" else f"trainkit/{room}"]
    return code, [f"tests/{room}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m tests.check ROOM [PYTEST_ARGUMENT...]``: ruff, mypy and the tests of one room, side by side, in a minute.

A room is a folder in trainkit/, ``jobs``, ``docs``, or ``ground`` for the files beside the rooms. What starts a cluster
or peers of a swarm is left to the whole suite, and so is `SLOW`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import LONGEST

PROJECT = Path(__file__).resolve().parents[1]
QUICK = "not long and not slurm and not swarm"
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
    start, codes = time.monotonic(), {}
    for name, process in [
        (name, subprocess.Popen([sys.executable, "-m", *words], cwd=PROJECT))
        for name, words in checks(args.room, args.rest).items()
    ]:
        codes[name] = process.wait()
    seconds = time.monotonic() - start
    if left := [name for name in SLOW if name.startswith(tuple(folders(args.room)[1]))]:
        print("== for the whole suite:", *left)
    print(f"== {args.room}, {seconds:.0f} s: " + ", ".join(f"{name} {verdict(code)}" for name, code in codes.items()))
    return max(codes.values())


def verdict(code: int) -> str:
    return "passed" if code == 0 else f"failed ({code})"


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


def checks(room: str, rest: Sequence[str] = ()) -> Mapping[str, list[str]]:
    """Name -> the module that Python runs, with its arguments."""
    code, tests = folders(room)
    found = {
        "ruff": ["ruff", "check", "--quiet", *code, *tests],
        "format": ["ruff", "format", "--check", "--quiet", *code, *tests],
        "mypy": ["mypy", *code, *tests],
    }
    long = [f"--ignore={name}" for name in SLOW]
    found["tests"] = ["pytest", "-q", "-m", QUICK, "-n", "auto", "--dist", "loadfile", *long, *tests, *rest]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

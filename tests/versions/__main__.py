"""``python -m tests.versions lowest|newest [-- PYTEST_ARGUMENT...]``: the README's checks with the lowest or the newest
versions that pyproject.toml allows, in an environment of their own (7 GB). Ends with the code of the first check that
failed.

Versions are those of lowest.txt or newest.txt beside this file, so that a result can be repeated; ``--resolve`` asks
the package index for those of today first. uv resolves and installs, so its variables (UV_FIND_LINKS, ...) count; where
it is not on the PATH, pip installs it into the environment.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from tests import readme
from tests.conftest import NIGHTLY

PROJECT = Path(__file__).resolve().parents[2]
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
"""Set -> uv's word for it. What others' packages bring along is the newest in both: that is not ours to promise."""


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", usage="%(prog)s [-h] [--env DIR] [--resolve] SET [-- PYTEST_ARGUMENT ...]",
        description="The README's checks with the lowest or the newest versions that are declared.",
    )  # fmt: skip
    parser.add_argument("set", choices=RESOLUTIONS, metavar="SET", help="lowest or newest")
    parser.add_argument("--env", type=Path, metavar="DIR", help="keep the environment there, and use it again")
    parser.add_argument("--resolve", action="store_true", help="ask the index for today's set, and write it down")
    asked = parser.parse_args(argv[:end])
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        return try_set(asked.set, asked.env or Path(scratch), argv[end + 1 :], resolve=asked.resolve)


def try_set(name: str, folder: Path, for_pytest: list[str], *, resolve: bool = False) -> int:
    """Make the environment in ``folder`` and run every check there; the code of the first that failed, or 0."""
    folder = folder.resolve()
    python = str(folder / "bin" / "python")
    env = active(folder)
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    uv = shutil.which("uv", path=env["PATH"])
    if uv is None:
        print("There is no uv here: pip installs it into the environment.", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], env=env, check=True)
        uv = str(folder / "bin" / "uv")
    versions = str(kept(name))
    if resolve:
        how = ["--extra=dev", f"--resolution={RESOLUTIONS[name]}", "--upgrade"]
        how += ["--universal", "--python-version=3.11"]  # for every Python that is declared, and every system
        told = ["--no-header", "--no-annotate", "--quiet", "--output-file", versions]
        subprocess.run([uv, "pip", "compile", "pyproject.toml", *how, *told], cwd=PROJECT, env=env, check=True)
    for what in (["--requirements", versions], ["--no-deps", "--editable", "."]):
        subprocess.run([uv, "pip", "install", "--python", python, *what], cwd=PROJECT, env=env, check=True)
    codes = {}
    for line in checks(folder):
        words = [*line, *for_pytest] if line[0].endswith("pytest") else line
        print("==", *words, flush=True)
        codes[" ".join(words)] = subprocess.run(words, cwd=PROJECT, env=env, check=False).returncode
    print(f"== {name} versions that are declared, Python {sys.version.split()[0]}")
    for command, code in codes.items():
        print(f"exit code {code:3}  {command}")
    return next(filter(None, codes.values()), 0)


def kept(name: str) -> Path:
    """The file of a set's versions."""
    return Path(__file__).with_name(f"{name}.txt")


def checks(folder: Path) -> list[list[str]]:
    """Commands of the README's second block after the installation, in that environment; then the second list."""
    _, lines = readme.marked()[1]
    found = list[list[str]]()
    for line in lines:
        program, *words = line.split()
        if program.startswith(".venv/bin/") and not line.endswith("'.[dev]'"):
            found.append([str(folder / "bin" / program.removeprefix(".venv/bin/")), *words])
    (default,) = [words for words in found if words[0].endswith("pytest")]
    return [*found, [*default, "-m", NIGHTLY]]


def active(folder: Path) -> Mapping[str, str]:
    """Variables of a process in which that environment is active, and no other."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(folder)}
    env.pop("PYTHONPATH", None)
    env.pop("PYTHONHOME", None)
    return env


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run was made of: a copy of the code that it runs, and a manifest of everything around it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit import packaged, reading
from trainkit.errors import RefusedError
from trainkit.records import secrets
from trainkit.records.files import create, make_folder, write
from trainkit.records.rundir import RunDir

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that jobs and trainkit are in: a checkout, site-packages, or the snapshot of another run."""

PACKAGES = (
    "trainkit",
    "torch",
    "torchvision",
    "timm",
    "submitit",
    "hivemind",
    "tensorboard",
    "wandb",
    "pydantic",
    "numpy",
    "safetensors",
)
_OWN = ("jobs", "trainkit", "configs")
# Names of Python's own modules: it starts with some of them, before anything could say that those of the library are
# meant, and never imports the user's.
_PYTHONS = {
    f"{name}{end}" for name in (*sys.stdlib_module_names, "sitecustomize", "usercustomize") for end in ("", ".py")
}

LONGEST_DIFF = 2_000_000
SENT = "sent.json"
"""Beside code that came from another machine: what git said of it there, as a manifest has it."""


@dataclass(frozen=True)
class Withheld:
    """Something that was left out of a run folder because it looks like a credential."""

    what: str
    """A file of the user's, ``the diff`` or ``the command line``."""
    line: int
    """0 for a whole file, which has the name of one that holds credentials."""
    kind: str

    def __str__(self) -> str:
        if not self.line:
            return f"{self.what} ({self.kind})"
        return f"{self.what} (line {self.line} looks like a {self.kind})"


def write_code(run_dir: RunDir, own: Sequence[str] = ()) -> list[Withheld]:
    """Copy the packages that the job runs, so that edits after submission do not change a queued or requeued job.

    The user's own Python files beside them (``package.module:function``) come along, those of the current folder,
    except for files with what looks like a credential, or with the name of a file that holds some: these are returned.

    Args:
        own: the run's own functions, ``package.module:function``.

    Raises:
        RefusedError: a file that would have to be left out is one that the run cannot do without.
    """
    here = Path.cwd()
    modules = [file for file in _user_modules(here) if (here / file).is_file()]  # a link may lead nowhere
    withheld = {file: found for file in modules if (found := withheld_in(here / file, str(file)))}
    needed = {Path(*name.partition(":")[0].split(".")) for name in own if ":" in name}
    needed = {file for module in needed for file in (module.with_suffix(".py"), module / "__init__.py")}
    essential = [found for file, found in withheld.items() if file in needed]
    essential += [
        found for file in _changed_own_files() if (found := withheld_in(INSTALLED / file, file)) and found.line
    ]
    if essential:
        raise refusal(essential[0])
    left_behind = list(withheld.values())
    for name, source in _packages():
        if any(secrets.is_credentials(part) for part in name.parts):
            left_behind.append(_by_name(str(Path(*name.parts[-2:]))))
        else:
            _copy(source, run_dir.code / name, run_dir)
    for file in modules:
        target = run_dir.code / file
        if not target.exists() and file not in withheld:
            _copy(here / file, target, run_dir)
    return left_behind


def _by_name(name: str) -> Withheld:
    return Withheld(name, 0, "a file of credentials, by its name")


def _packages() -> Iterator[tuple[Path, Path]]:
    """Every file of the program's own packages, by its name in a snapshot. That of a wheel is laid out as that of a
    checkout, where configs and slurm lie beside trainkit."""
    for name in _OWN:
        top = packaged.folder(name) if name == "configs" else INSTALLED / name
        for folder, folders, found in os.walk(top):
            folders[:] = [item for item in folders if item not in ("__pycache__", "configs", "slurm")]
            for file in sorted(found):
                if not file.endswith((".pyc", ".ipynb")):
                    source = Path(folder, file)
                    yield name / source.relative_to(top), source


def _copy(source: Path, target: Path, run_dir: RunDir) -> None:
    make_folder(target.parent, run_dir.path)
    with reading.open_regular(source) as content, create(target, run_dir.path) as out:
        shutil.copyfileobj(content, out)


def refusal(essential: Withheld) -> RefusedError:
    """Of a file that would have to be left out, and that the run cannot do without."""
    if not essential.line:
        why = "Every run keeps a copy of its code, and files of such names are never copied."
        return RefusedError(f"The run needs {essential}.", why=why, fix="Give the module another name.")
    return RefusedError(
        f"The run needs {essential}.",
        why="Every run keeps a copy of its code, and a secret must not lie in it.",
        fix="Read the secret from an environment variable. If it is none, end the line with "
        "`# pragma: allowlist secret`.",
    )


def code_files() -> list[tuple[str, Path]]:
    """Every file of code that `write_code` would copy, by its name in the snapshot."""
    own = [file for name in ("jobs", "trainkit") for file in (INSTALLED / name).rglob("*.py")]
    here = Path.cwd()
    files = [(str(file.relative_to(INSTALLED)), file) for file in own]
    return files + [(str(file), here / file) for file in _user_modules(here)]


def write_manifest(
    run_dir: RunDir, command: Sequence[str], withheld: Sequence[Withheld] = (), *, fingerprint: str = ""
) -> None:
    """Record git commit, uncommitted changes, package versions, host, command line. Never the environment.

    What looks like a credential is replaced by ``***``. That, and what was ``withheld`` from the snapshot, stands in
    the manifest and is said in one line on stderr.
    """
    left_out = list(withheld)

    def without_secrets(text: str, what: str, *, python: bool) -> str:
        found = secrets.find(text, python=python)
        left_out.extend(Withheld(what, item.line, item.kind) for item in found)
        return secrets.redacted(text, found)

    diff, unread = _diff()
    left_out += unread
    if len(diff) > LONGEST_DIFF:
        diff = f"left out: {len(diff)} characters\n"
    # A file's part of the diff begins with its name, which says what a line of it means.
    parts = re.split(r"(?m)^(?=diff --git )", diff)
    manifest: dict[str, Any] = {
        "command": [without_secrets(word, "the command line", python=False) for word in command],
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_of_sender()
        or {
            "commit": _git("rev-parse", "HEAD"),
            "diff": "".join(
                without_secrets(part, "the diff", python=part.partition("\n")[0].endswith(".py")) for part in parts
            ),
            "untracked": (_git("ls-files", "--others", "--exclude-standard") or "").splitlines(),
        },
        "withheld": [asdict(item) for item in left_out],
        "fingerprint": fingerprint,
    }
    write(run_dir.manifest, json.dumps(manifest, indent=2) + "\n", run_dir.path)
    if left_out:
        _say_once(f"Withheld from the run folder: {'; '.join(dict.fromkeys(map(str, left_out)))}.")


def _diff() -> tuple[str, list[Withheld]]:
    """What has been changed since the commit, and the files that are left out of it: of a renamed one both names."""
    words = (_git("diff", "--name-status", "-M", "-z", "HEAD") or "").split("\0")
    held: list[str] = []
    while len(words) > 1:
        status, *words = words
        count = 2 if status[:1] in ("R", "C") else 1
        names, words = words[:count], words[count:]
        held += names if any(map(secrets.is_credentials, names)) else []
    plain = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    diff = _git("diff", *plain, "HEAD", "--", ":/", *(f":(top,exclude,literal){name}" for name in held))
    return diff or "", [_by_name(name) for name in held]


def _git_of_sender() -> dict[str, Any] | None:
    try:
        told = reading.parse(reading.read_text(INSTALLED / SENT))["git"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, dict) else None


@cache
def _say_once(line: str) -> None:
    """A sweep writes the same snapshot many times."""
    print(line, file=sys.stderr, flush=True)


@cache  # the runs of a sweep are written by one process, within seconds
def withheld_in(file: Path, name: str) -> Withheld | None:
    """The first line of a file that looks like a credential; line 0 where its name, or that of its target, does."""
    if secrets.is_credentials(name) or (file.is_symlink() and secrets.is_credentials(file.resolve().name)):
        return _by_name(name)
    try:
        found = secrets.find(reading.read_text(file), python=file.suffix == ".py")
    except OSError:
        return None
    return Withheld(name, found[0].line, found[0].kind) if found else None


def _changed_own_files() -> list[str]:
    """Files of the program that are not as they were published: edited, or added as plugins."""
    told = _git(
        "-C", str(INSTALLED), "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *_OWN
    )
    changed = [entry[3:] for entry in (told or "").split("\0") if len(entry) > 3]
    return [name for name in changed if name.endswith((".py", ".yaml")) and (INSTALLED / name).is_file()]


def _user_modules(here: Path) -> list[Path]:
    if here == INSTALLED or (here / "trainkit" / "errors.py").is_file():
        skip = {*_OWN, "tests", "slurm", "runs", "data"}
    else:
        skip = {"runs", "data"}
    found: list[Path] = []
    for folder, folders, files in os.walk(here):
        if {"config.yaml", "manifest.json"} <= set(files):  # a run folder: its code is a copy already
            folders.clear()
            continue
        inside = Path(folder).relative_to(here)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("__pycache__", "node_modules", "site-packages")
            and not (inside == Path() and name in skip)
            and len(inside.parts) < 4
        ]
        found += [inside / name for name in files if name.endswith(".py") and (inside / name).parts[0] not in _PYTHONS]
        if len(found) > 2000:  # someone submits from a home directory: that is no project
            return []
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False
        )  # files need not be in UTF-8
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None

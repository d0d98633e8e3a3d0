"""Lists of this user's runs, jobs and vouched code, in their state folder.

By them `status`, `logs` and `cancel` find a user's runs from any folder. The lists hold paths only: what a run is doing
is asked from its folder and its scheduler. Each installation of trainkit (a clone, an environment) has a list of its
own: two clones are two projects.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.common.process import state_home


def state_file(name: str) -> Path:
    """A file of this user's, on whatever machine shares their home."""
    return state_home() / "trainkit" / name


def own_file(name: str) -> Path:
    """A file of this installation's."""
    project = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(os.fsencode(project), digest_size=4).hexdigest()
    return state_file("projects") / f"{project.name}-{digest}" / name


def make_state_folder(folder: Path) -> None:
    """Make a folder of `state_file` where it is not there; nobody else may write there, or a run of theirs would pass
    for the user's own."""
    root = state_home() / "trainkit"
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_mode & 0o022:
        root.chmod(0o700)
    fileio.make_folder(folder, root)


def remember(path: Path) -> None:
    """Add a run folder to the list. A home that cannot be written costs only the convenience, so it is no error."""
    _append(own_file("runs"), str(path))


def mark(path: Path, fingerprint: str) -> None:
    """Note what a run is made of, so that another of the same is found without a look into every folder."""
    _append(own_file("fingerprints"), f"{fingerprint} {path}")


def marked() -> list[tuple[str, Path]]:
    """Fingerprint and folder of every run that was marked, oldest first; the folder may be gone."""
    found: list[tuple[str, Path]] = []
    for line in _lines(own_file("fingerprints")):
        mark, _, path = line.partition(" ")
        if path.startswith("/"):
            found.append((mark, Path(path)))
    return found


def note_job(path: Path, executor: str, job_id: str, process: str) -> None:
    """Note that this user has started a job or a process for a run: what its folder says of that, others may write."""
    _append(state_file("jobs"), _job_line(path, executor, job_id, process))


def has_started(path: Path, executor: str, job_id: str, process: str) -> bool:
    """True if `note_job` has noted that."""
    return _job_line(path, executor, job_id, process) in _lines(state_file("jobs"), private=True)


def _job_line(path: Path, executor: str, job_id: str, process: str) -> str:
    return f"{executor} {job_id} {process or '-'} {os.path.realpath(path)}"


def vouch(seals: Sequence[str]) -> None:
    """Note digests of code and settings that this user has submitted (`trainkit.run.ownership`)."""
    for seal in dict.fromkeys(seals).keys() - vouched():
        _append(state_file("vouched"), seal)


def vouched() -> frozenset[str]:
    """Return those digests."""
    return frozenset(_lines(state_file("vouched"), private=True))


_MOST_HARMLESS = 20_000
"""Texts to remember: thirty projects of as many files as one may have."""


def note_harmless(marks: Sequence[str]) -> None:
    """Note digests of texts in which no credential was found (`trainkit.run.secrets`); the oldest are forgotten."""
    file = state_file("harmless")
    lines = list(dict.fromkeys([*_lines(file, private=True), *marks]))[-_MOST_HARMLESS:]
    with suppress(OSError, UserError):
        make_state_folder(file.parent)
        fileio.write(file, "".join(f"{line}\n" for line in lines), file.parent, private=True)


def harmless() -> frozenset[str]:
    """Return those digests."""
    return frozenset(_lines(state_file("harmless"), private=True))


def known(*, everywhere: bool = False) -> list[Path]:
    """Run folders that were remembered and still exist, oldest first; ``everywhere``: by other installations too."""
    return [path for path in _remembered(everywhere=everywhere) if os.path.isfile(path / "config.yaml")]


def has(path: Path) -> bool:
    """True if a command of this user made the run in ``path``, by whatever name the folder is reached."""
    real = os.path.realpath(path)
    for item in _remembered(everywhere=True, private=True):
        if item.name in (path.name, os.path.basename(real)) and os.path.realpath(item) == real:
            return True
    return False


def _remembered(*, everywhere: bool, private: bool = False) -> list[Path]:
    files = [own_file("runs")]
    if everywhere:
        files = sorted(state_file("projects").glob("*/runs"))
    lines: dict[str, None] = {}
    for file in files:
        lines |= dict.fromkeys(_lines(file, private=private))
    return [Path(line) for line in lines if line.startswith("/")]


def _append(file: Path, line: str) -> None:
    if "\n" in line:  # one a line
        return
    try:
        make_state_folder(file.parent)
        with fileio.append(file, file.parent) as out:
            os.fchmod(out.fileno(), 0o600)  # of lists that are there already, too
            out.write(os.fsencode(f"{line}\n"))
    except (OSError, UserError):
        return


def _lines(file: Path, *, private: bool = False) -> list[str]:
    """Its lines; ``private``: none if somebody else can have written it."""
    try:
        found = file.stat()
        if private and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            return []
        return list(dict.fromkeys(fileio.read_end(file).splitlines()))
    except OSError:
        return []

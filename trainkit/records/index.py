"""Where this user's runs are, so that `status`, `logs` and `cancel` find them from any folder.

Paths only: what a run is doing is asked from its folder and its scheduler. Each installation of trainkit (a clone, an
environment) has a list of its own: two clones are two projects, and what one has started is no news in the other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from trainkit import reading
from trainkit.errors import UserError
from trainkit.records import files


def state_file(name: str = "runs") -> Path:
    """A file of this user's, on whatever machine shares their home."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trainkit" / name


def own_file(name: str) -> Path:
    """A file of this installation's."""
    project = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(os.fsencode(project), digest_size=4).hexdigest()
    return state_file("projects") / f"{project.name}-{digest}" / name


def make_state_folder(folder: Path) -> None:
    """Make a folder of `state_file` where it is not there; nobody else may write there, or a run of theirs would pass
    for the user's own."""
    root = state_file().parent
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_mode & 0o022:
        root.chmod(0o700)
    files.make_folder(folder, root)


def remember(path: Path) -> None:
    """Add a run folder. A home that cannot be written costs only the convenience, so it is no error."""
    _append(own_file("runs"), str(path))


def mark(path: Path, fingerprint: str) -> None:
    """Note what a run is made of, so that another of the same is found without a look into every folder."""
    _append(own_file("fingerprints"), f"{fingerprint} {path}")


def marked() -> list[tuple[str, Path]]:
    """Fingerprint and folder of every run that was marked, oldest first; the folder may be gone."""
    pairs = (line.partition(" ") for line in _lines(own_file("fingerprints")))
    return [(mark, Path(path)) for mark, _, path in pairs if path.startswith("/")]


def note_job(path: Path, executor: str, job_id: str, process: str) -> None:
    """Note that this user has started a job or a process for a run: what its folder says of that, others may write."""
    _append(state_file("jobs"), f"{executor} {job_id} {process or '-'} {os.path.realpath(path)}")


def has_started(path: Path, executor: str, job_id: str, process: str) -> bool:
    """Whether that was noted."""
    return f"{executor} {job_id} {process or '-'} {os.path.realpath(path)}" in _private_lines(state_file("jobs"))


def vouch(seals: Sequence[str]) -> None:
    """Note digests of code and settings that this user has submitted (`trainkit.records.ownership`)."""
    known = vouched()
    for seal in seals:
        if seal not in known:
            _append(state_file("vouched"), seal)


def vouched() -> frozenset[str]:
    """Those digests."""
    return _private_lines(state_file("vouched"))


def known(*, everywhere: bool = False) -> list[Path]:
    """Run folders that were remembered and still exist, oldest first; ``everywhere``: by other installations too."""
    files = _everywhere() if everywhere else [own_file("runs")]
    return [path for path in _remembered(files) if os.path.isfile(path / "config.yaml")]


def named(reference: str) -> list[Path]:
    """Folders of the runs and sweeps of that name, ``SWEEP/NUMBER`` included: those of this installation, or where it
    has none those of others."""
    for everywhere in (False, True):
        found = [folder for path in known(everywhere=everywhere) for folder in _called(path, reference)]
        if found:
            return list(dict.fromkeys(found))
    return []


def _called(run: Path, reference: str) -> list[Path]:
    """The run's folder, or that of its sweep, if that is its name."""
    in_sweep = run.name.isdecimal() and os.path.isfile(run.parent / "sweep.json")
    if reference == (f"{run.parent.name}/{run.name}" if run.name.isdecimal() else run.name):
        return [run]
    if in_sweep:
        return [run.parent] if reference == run.parent.name else []
    return [run] if reference == run.name else []  # a run that is called by a number


def has(path: Path) -> bool:
    """Whether a command of this user made the run in ``path``, by whatever name the folder is reached."""
    real = os.path.realpath(path)
    return any(
        str(item) in (str(path), real) or (item.name == path.name and os.path.realpath(item) == real)
        for item in _remembered([file for file in _everywhere() if _is_private(file)])
    )


def _everywhere() -> list[Path]:
    """The lists of all installations; the first was that of all of them until each had its own."""
    return [state_file(), *sorted(state_file("projects").glob("*/runs"))]


def _remembered(files: Sequence[Path]) -> list[Path]:
    lines = dict.fromkeys(line for file in files for line in _lines(file))
    return [Path(line) for line in lines if line.startswith("/")]


def _append(file: Path, line: str) -> None:
    if "\n" in line:  # one a line
        return
    try:
        make_state_folder(file.parent)
        with files.append(file, file.parent) as out:
            os.fchmod(out.fileno(), 0o600)  # of lists that are there already, too
            out.write(os.fsencode(f"{line}\n"))
    except (OSError, UserError):
        return


def _lines(file: Path) -> list[str]:
    try:
        return list(dict.fromkeys(reading.read_end(file).splitlines()))
    except OSError:
        return []


def _private_lines(file: Path) -> frozenset[str]:
    return frozenset(_lines(file)) if _is_private(file) else frozenset()


def _is_private(file: Path) -> bool:
    """Whether nobody else can have written it: what it says is trusted."""
    try:
        found = file.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022

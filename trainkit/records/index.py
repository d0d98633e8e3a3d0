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


def state_file(name: str = "runs") -> Path:
    """A file of this user's, on whatever machine shares their home."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trainkit" / name


def own_file(name: str) -> Path:
    """A file of this installation's."""
    project = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(os.fsencode(project), digest_size=4).hexdigest()
    return state_file("projects") / f"{project.name}-{digest}" / name


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


def known(*, everywhere: bool = False) -> list[Path]:
    """Run folders that were remembered and still exist, oldest first; ``everywhere``: by other installations too."""
    files = _everywhere() if everywhere else [own_file("runs")]
    return [path for path in _remembered(files) if os.path.isfile(path / "config.yaml")]


def named(reference: str) -> list[Path]:
    """Runs of that name: those of this installation, or where it has none those of others."""
    for everywhere in (False, True):
        paths = known(everywhere=everywhere)
        if found := [path for path in paths if path.name == reference or str(path).endswith(f"/{reference}")]:
            return found
    return []


def has(path: Path) -> bool:
    """Whether a command of this user made the run in ``path``, by whatever name the folder is reached."""
    real = os.path.realpath(path)
    return any(
        str(item) in (str(path), real) or (item.name == path.name and os.path.realpath(item) == real)
        for item in _remembered(_everywhere())
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
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="surrogateescape") as out:
            out.write(f"{line}\n")
    except OSError:
        return


def _lines(file: Path) -> list[str]:
    try:
        return list(dict.fromkeys(reading.read_text(file).splitlines()))
    except OSError:
        return []

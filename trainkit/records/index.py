"""Where this user's runs are, so that `status`, `logs` and `cancel` find them from any folder.

Paths only: what a run is doing is asked from its folder and its scheduler.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.records import reading


def state_file(name: str = "runs") -> Path:
    """A file of this user's, on whatever machine shares their home."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trainkit" / name


def remember(path: Path) -> None:
    """Add a run folder. A home that cannot be written costs only the convenience, so it is no error."""
    _append(state_file(), str(path))


def mark(path: Path, fingerprint: str) -> None:
    """Note what a run is made of, so that another of the same is found without a look into every folder."""
    _append(state_file("fingerprints"), f"{fingerprint} {path}")


def marked() -> list[tuple[str, Path]]:
    """Fingerprint and folder of every run that was marked, oldest first; the folder may be gone."""
    pairs = (line.partition(" ") for line in _lines(state_file("fingerprints")))
    return [(mark, Path(path)) for mark, _, path in pairs if path.startswith("/")]


def known() -> list[Path]:
    """Run folders that were remembered and still exist, oldest first."""
    return [path for path in _remembered() if os.path.isfile(path / "config.yaml")]


def has(path: Path) -> bool:
    """Whether a command of this user made the run in ``path``, by whatever name the folder is reached."""
    real = os.path.realpath(path)
    return any(
        str(item) in (str(path), real) or (item.name == path.name and os.path.realpath(item) == real)
        for item in _remembered()
    )


def _remembered() -> list[Path]:
    return [Path(line) for line in _lines(state_file()) if line.startswith("/")]


def _append(file: Path, line: str) -> None:
    if "\n" in line:  # one a line
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{line}\n")
    except OSError:
        return


def _lines(file: Path) -> list[str]:
    try:
        return list(dict.fromkeys(reading.read_text(file).splitlines()))
    except OSError:
        return []

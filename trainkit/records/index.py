"""Where this user's runs are, so that `status`, `logs` and `cancel` find them from any folder.

Paths only: what a run is doing is asked from its folder and its scheduler.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.records import reading


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trainkit" / "runs"


def remember(path: Path) -> None:
    """Add a run folder. A home that cannot be written costs only the convenience, so it is no error."""
    if "\n" in str(path):  # one a line
        return
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with _file().open("a", encoding="utf-8") as out:
            out.write(f"{path}\n")
    except OSError:
        return


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
    try:
        lines = reading.read_text(_file()).splitlines()
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(lines) if line.startswith("/")]

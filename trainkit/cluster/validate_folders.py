"""Whether a run's folders will do: seen by the compute nodes, and with room for a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from trainkit import terminal
from trainkit.cluster.site import Site
from trainkit.errors import RefusedError, UserError

LEAST_MB = 200
"""The snapshot of the code, logs and a first small checkpoint."""
LEAST_FILES = 1000
"""A snapshot is some 300 files; logs, checkpoints and TensorBoard's come on top."""

# Every machine has its own of these, on whatever site: memory, not disk.
_OWN = ("/dev", "/run", "/proc")
_USUALLY_OWN = ("/tmp", "/var/tmp")


def require_room(folder: Path) -> None:
    """Raise RefusedError where a run folder could be begun, but not filled."""
    require_text(folder)
    place = _nearest(folder)
    try:
        there = os.statvfs(place)
    except OSError:  # making the folder will say it better
        return
    free_mb = there.f_bavail * there.f_frsize / 1e6
    if free_mb < LEAST_MB:
        raise RefusedError(
            f"There is no room for a run in {place}.",
            why=f"{free_mb:.0f} MB are free, and {LEAST_MB} are little for a run: its code, its logs, its checkpoints.",
            fix="Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
        )
    if there.f_files and there.f_favail < LEAST_FILES:  # no number of files at all: it knows no such limit
        raise RefusedError(
            f"There is no room for the files of a run in {place}.",
            why=f"{there.f_favail} more files (inodes) may be made there, and a run needs {LEAST_FILES}.",
            fix="Remove old runs or environments, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
        )


def require_text(folder: Path) -> None:
    """Raise UserError for a folder whose name is no text: records and scripts could not name it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The name of {terminal.one_line(folder)} is no text in UTF-8.",
            why="A run's records, scripts and logs name its folder.",
            fix="Rename that folder, or start from another one: --run-dir FOLDER.",
        ) from None


def require_shared(folder: Path, what: str, site: Site, shared: Sequence[str]) -> None:
    """Raise RefusedError for a folder that compute nodes do not see: their job would end without a log.

    Args:
        what: what it is, for the message: ``The run folder``.
        shared: where the site's shared file systems are, as its profile knows them; empty where nobody knows.
    """
    if _is_one_machine(site):
        return
    real = Path(os.path.realpath(folder))
    if _below(real, _OWN):
        why = "Every machine has memory of its own there"
    elif shared and not _below(real, [os.path.realpath(item) for item in shared]):
        why = f"The site's profile knows as shared: {', '.join(shared)}"
    else:
        return
    raise RefusedError(
        f"{what} {folder} is on this machine alone.",
        why=f"{why}; a compute node would not find it, and the job would end without a log.",
        fix=f"Use a folder below {shared[0] if shared else 'your home'}"
        + (", or add this one to shared_folders in the profile if nodes do see it." if shared else "."),
    )


def doubtful(folder: Path, site: Site, shared: Sequence[str]) -> str:
    """A word of caution about a folder that most sites do not share; empty if there is no doubt."""
    if shared or _is_one_machine(site) or not _below(Path(os.path.realpath(folder)), _USUALLY_OWN):
        return ""
    return f"Note: {folder} must be seen by the compute nodes, and few sites share {_top(folder)}."


def _top(folder: Path) -> str:
    real = Path(os.path.realpath(folder))
    return next(item for item in _USUALLY_OWN if real.is_relative_to(item))


def _is_one_machine(site: Site) -> bool:
    """Whether this very machine is the only node."""
    names = {node.name for partition in site.partitions for node in partition.nodes}
    return names == {socket.gethostname().partition(".")[0]}


def _below(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(item for item in (folder, *folder.absolute().parents) if item.is_dir())

"""The job arrays of a sweep: one, or as many as a site's MaxArraySize asks for; and another for what has failed.

The runs of a sweep are its folders 0, 1, 2, ... The first array's indices are these numbers. Every further one has a
folder of its own in the sweep's ``.submitit``, with links to its runs that count from 0 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit import fileio
from trainkit.errors import UserError
from trainkit.run.folder import RunDir

PART = "array-"


def part_folder(sweep: Path) -> Path:
    """The folder of the next further array of a sweep; it is not made yet."""
    number = 1
    while (folder := sweep / ".submitit" / f"{PART}{number}").exists():
        number += 1
    return folder


def link_runs(part: Path, runs: Sequence[RunDir]) -> None:
    """Make a part's folder, in which the runs are called 0, 1, 2, ..."""
    try:
        fileio.make_folder(part, whole(part))
        for index, run in enumerate(runs):
            fileio.link(part / str(index), str(run.path), whole(part))
    except OSError as error:
        raise UserError(
            f"Cannot make the folder {part}.", why=f"{error.strerror}.", fix="Check who may write there."
        ) from None


def whole(folder: Path) -> Path:
    """The sweep that a part's folder belongs to; any other folder itself."""
    return folder.parents[1] if is_part(folder) else folder


def is_part(folder: Path) -> bool:
    """Whether it is that of a further array."""
    return folder.name.startswith(PART) and folder.parent.name == ".submitit"


def split(runs: Sequence[RunDir], largest: int) -> list[list[RunDir]]:
    """The runs of each array."""
    return [list(runs[first : first + largest]) for first in range(0, len(runs), largest)]

"""Disk usage of runs, and the trash that keeps deleted files for two weeks.

The trash is ``.trash/TIME-NUMBER/`` in the folder of runs, so that a run goes there, and comes back, by one rename.
What has lain there for `KEPT_SECONDS` goes with the next `clean` or `submit`.
"""

import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from trainkit.common import fileio
from trainkit.run.folder import RunDir, sweep_of

TRASH = ".trash"
KEPT_SECONDS = 14 * 86400.0
PARTS = ("checkpoints", "code", "samples", "curves", "logs", "other")
_PART = {"tensorboard": "curves", "wandb": "curves", "profile": "samples", "code.zip": "code"}
_THROWN = re.compile(r"([0-9]{9,11})-[0-9a-f]{8}")


def parts_of(run: RunDir) -> Counter[str]:
    """Bytes on the disk of each of `PARTS`; of files that other runs share, as equal code, none: they would stay."""
    found = Counter[str](dict.fromkeys(PARTS, 0))
    with suppress(OSError), os.scandir(run.path) as entries:
        for entry in entries:
            part = _PART.get(entry.name, entry.name)
            if part.startswith(("system-", "nvidia-smi-")):
                part = "samples"
            elif part not in PARTS:
                part = "other"
            found[part] += size_of(Path(entry))
    return found


def size_of(path: Path) -> int:
    """Bytes on the disk of a file, or of all below a folder, without those that have another name elsewhere. Links are
    not followed."""
    try:
        fact = path.lstat()
    except OSError:
        return 0
    size = fact.st_blocks * 512
    if not stat.S_ISDIR(fact.st_mode):
        return size if fact.st_nlink == 1 else 0
    with suppress(OSError), os.scandir(path) as entries:
        size += sum(map(size_of, map(Path, entries)))
    return size


def root_of(run: RunDir) -> Path:
    """The folder of runs that a run, or the sweep that it is of, lies in."""
    sweep = sweep_of(run)
    return run.path.parent if sweep is None else sweep.parent


def new_heap(root: Path) -> Path:
    """Trash of one command; its folder is made with the first file."""
    return root / TRASH / f"{int(time.time())}-{token_hex(4)}"


def throw_away(paths: Iterable[Path], root: Path, heap: Path) -> None:
    """Move files and folders below ``root`` into ``heap``, under the same names. Raises UserError."""
    fix = "Check the permissions. What was moved before is in the trash."
    for path in paths:
        target = heap / path.relative_to(root)
        with fileio.disk_errors_as(f"Cannot move {path} to {heap}.", fix=fix):
            fileio.make_folder(target.parent, root)  # through no link
            path.rename(target)


def empty_trash(root: Path, older: float = KEPT_SECONDS) -> int:
    """Remove what was thrown away more than ``older`` seconds ago; how many heaps. Only this user's own trash."""
    trash = root / TRASH
    gone = 0
    if not fileio.is_own(trash):
        return 0
    for name in os.listdir(trash):
        match = _THROWN.fullmatch(name)
        if match and time.time() - int(match[1]) >= older:
            shutil.rmtree(trash / name, ignore_errors=True)  # which follows no link
            gone += 1
    with suppress(OSError):  # something is left in it
        trash.rmdir()
    return gone

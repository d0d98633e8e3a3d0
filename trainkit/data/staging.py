"""A pack on the disk of the node that reads it: copied once a node, whatever ranks and jobs are there.

Such a disk is shared with other users, so the copies of each are in a folder that nobody else can get at.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainkit import reading
from trainkit.data.pack import ABOUT, FILES, IMAGES, INDEX, Pack, broken_pack
from trainkit.errors import TrainkitError, UserError
from trainkit.records import files

SPARE = 1 << 28
"""Bytes that are left to others on the node's disk."""


def scratch(env: Mapping[str, str] | None = None) -> Path | None:
    """This node's own disk, as far as the job's environment names it."""
    env = os.environ if env is None else env
    found = env.get("SLURM_TMPDIR") or env.get("TMPDIR")
    return Path(found) if found and Path(found).is_dir() else None


def staged_folder(pack: Path, disk: Path) -> Path:
    """Where the copy of a pack is on a node's disk. A pack that was made anew is another one."""
    try:
        digest = hashlib.sha256(reading.read_bytes(pack / ABOUT, follow=True)).hexdigest()[:16]
    except OSError as error:
        raise broken_pack(pack, str(error)) from None
    return disk / f"trainkit-{os.geteuid()}" / f"{pack.stem}-{digest}.pack"


def staged(pack: Path, disk: Path) -> Pack | None:
    """The copy of a pack on a node's disk, if it is there whole, and of this user's making."""
    copy = staged_folder(pack, disk)
    try:
        is_same = reading.read_bytes(copy / ABOUT) == reading.read_bytes(pack / ABOUT, follow=True)
        return Pack(copy) if is_same and files.is_own(copy.parent, private=True) else None
    except (OSError, TrainkitError):  # there is none, or somebody has cleaned up
        return None


def stage(pack: Path, disk: Path) -> str:
    """Copy ``pack`` to ``disk``, where it is not there already, and verify the copy. Why not, if there is no room, or
    only a folder that others can write to.

    Of several processes on the node one copies and the others wait, also those of other jobs. A copy has its final name
    once it is complete; what a killed process has left is removed by the next.

    Raises:
        UserError: the pack is damaged, or the disk cannot be written.
    """
    final = staged_folder(pack, disk)
    going = final.with_name(final.name + ".partial")
    try:
        if not files.make_own(final.parent):
            return f"{final.parent} is not this user's alone"
        with files.append(final.with_name(final.name + ".lock"), final.parent) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by the system, too, when its holder is killed
            if staged(pack, disk) is not None:
                return ""
            for left in (final, going):
                shutil.rmtree(left, ignore_errors=True)
            size, free = sum((pack / file).stat().st_size for file in (IMAGES, INDEX, FILES)), free_bytes(disk)
            if size + SPARE > free:
                return f"{disk} has {free / 1e9:.1f} GB left, and the pack takes {size / 1e9:.1f}"
            files.make_folder(going, final.parent)
            for file in (IMAGES, INDEX, FILES, ABOUT):
                files.copy(pack / file, going / file, final.parent)
            Pack(going).verify()
            os.replace(going, final)
    except OSError as error:
        shutil.rmtree(going, ignore_errors=True)
        raise UserError(
            f"The pack {pack} could not be copied to {disk}.",
            why=f"{error}.",
            fix="Give a node-local disk with room for it in TMPDIR, or set data.stage=false.",
            key="data.stage",
        ) from None
    except TrainkitError:
        shutil.rmtree(going, ignore_errors=True)
        raise
    return ""


def free_bytes(disk: Path) -> int:
    """Room for this user."""
    return shutil.disk_usage(disk).free

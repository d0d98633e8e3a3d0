"""A pack on the disk of the node that reads it: copied once a node, whatever ranks and jobs are there."""

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
        digest = hashlib.sha256(reading.read_bytes(pack / ABOUT)).hexdigest()[:16]
    except OSError as error:
        raise broken_pack(pack, str(error)) from None
    return disk / f"{pack.stem}-{digest}.pack"


def stage(pack: Path, disk: Path) -> str:
    """Copy ``pack`` to ``disk``, where it is not there already, and verify the copy. Why not, if there is no room.

    Of several processes on the node one copies and the others wait, also those of other jobs. A copy has its final name
    once it is complete; what a killed process has left is removed by the next.

    Raises:
        UserError: the pack is damaged, or the disk cannot be written.
    """
    final = staged_folder(pack, disk)
    going = final.with_name(final.name + ".partial")
    try:
        with open(final.with_name(final.name + ".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by the system, too, when its holder is killed
            if final.is_dir():
                try:
                    Pack(final)
                    return ""
                except TrainkitError:  # somebody has cleaned up
                    shutil.rmtree(final)
            shutil.rmtree(going, ignore_errors=True)
            size, free = sum((pack / file).stat().st_size for file in (IMAGES, INDEX, FILES)), free_bytes(disk)
            if size + SPARE > free:
                return f"{disk} has {free / 1e9:.1f} GB left, and the pack takes {size / 1e9:.1f}"
            going.mkdir()
            for file in (IMAGES, INDEX, FILES, ABOUT):
                shutil.copyfile(pack / file, going / file)
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

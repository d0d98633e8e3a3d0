"""Whether there is room where a run writes: a full disk leaves no record of itself."""

from __future__ import annotations

import os
from pathlib import Path


def full(folder: Path) -> str:
    """Why nothing can be written below ``folder``, for its disk has no room; empty if it has, or nobody can tell.

    A quota is not seen by this.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    if found.f_blocks and found.f_bavail * found.f_frsize < 1 << 16:
        return f"No space left on the disk of {folder}"
    if found.f_files and not found.f_favail:
        return f"No inodes left on the disk of {folder}: too many files"
    return ""

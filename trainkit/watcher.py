"""Wait until a file of this machine grows, or a process of it ends; Linux tells both.

inotify sees what processes of this machine write. Nobody tells of what others write onto a networked disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_SELDOM = 5.0
"""Seconds until the next look even where every change is told."""
_MODIFY, _COME = 0x2, 0x80 | 0x100
"""inotify's IN_MODIFY; IN_MOVED_TO and IN_CREATE."""


class FileWatcher:
    """Waits for a change of some files, or for the end of a process.

    Args:
        files: need not be there yet; what counts is that one comes, or that something is appended.
        process: of this machine; only its children write the files.
    """

    def __init__(self, files: Iterable[Path] = (), process: int | None = None) -> None:
        self._files: set[Path] = set()
        self._inotify = _open_inotify()
        self._process = _open_process(process)
        self.process_is_over = False
        """It was seen to end."""
        self.watch(files)

    def watch(self, files: Iterable[Path]) -> None:
        """Wait for these as well."""
        self._files |= set(files)
        self._sees_all = all(self._add(file, _MODIFY) or self._add(file.parent, _COME) for file in self._files)

    def wait(self, otherwise: float) -> bool:
        """Return at the next change, or after ``otherwise`` seconds where not every change is told; whether one was."""
        told = [item for item in (self._inotify, self._process) if item is not None]
        if not told:
            time.sleep(otherwise)
            return False
        ready = readable(told, _SELDOM if self._sees_all and self._process is not None else otherwise)
        if self._inotify in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, 1 << 16)
            self.watch(())  # a file that has come
        if self._process in ready:
            os.close(self._process)
            self._process, self.process_is_over = None, True
        return bool(ready)

    def __enter__(self) -> FileWatcher:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in (self._inotify, self._process):
            if descriptor is not None:
                os.close(descriptor)

    def _add(self, path: Path, mask: int) -> bool:
        if self._inotify is None:
            return False
        return int(ctypes.CDLL(None).inotify_add_watch(self._inotify, os.fsencode(path), mask)) >= 0


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read from, as soon as one can; none after so many seconds.

    `select.select` takes no descriptor from 1,024 on, and a process that trains may hold thousands.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _open_inotify() -> int | None:
    if sys.platform != "linux":
        return None
    descriptor = int(ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    return descriptor if descriptor >= 0 else None


def _open_process(process: int | None) -> int | None:
    if process is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process)
    except OSError:  # it has ended by now, or may not be looked at
        return None

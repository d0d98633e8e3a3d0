"""Being told, instead of looking: that a file of this machine was written to, or that a process of it has ended.

Linux tells of what processes of this machine write (inotify); of what others write onto a networked disk nobody does.
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
"""Seconds after which even who is told looks by themselves."""
_MODIFY, _COME = 0x2, 0x80 | 0x100
"""inotify's IN_MODIFY; IN_MOVED_TO and IN_CREATE."""


class Notice:
    """Waits until something has happened to some files, or to a process.

    Args:
        files: which may come later; nothing but what is appended to them counts, or that they are there now.
        process: of this machine; who else writes the files is one of its children.
    """

    def __init__(self, files: Iterable[Path] = (), process: int | None = None) -> None:
        self._files: set[Path] = set()
        self._inotify = _inotify()
        self._process = _opened(process)
        self.process_is_over = False
        """It has been told so."""
        self.watch(files)

    def watch(self, files: Iterable[Path]) -> None:
        """Wait for these as well."""
        self._files |= set(files)
        self._sees_all = all(self._add(file, _MODIFY) or self._add(file.parent, _COME) for file in self._files)

    def wait(self, otherwise: float) -> bool:
        """Return as soon as there is something to look at; after ``otherwise`` seconds where nobody would tell.

        Was it told?
        """
        told_of_all = self._sees_all and self._process is not None
        told = [item for item in (self._inotify, self._process) if item is not None]
        if not told:
            time.sleep(otherwise)
            return False
        ready = readable(told, _SELDOM if told_of_all else otherwise)
        if self._inotify in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, 1 << 16)
            self.watch(())  # a file that has come
        if self._process in ready:
            os.close(self._process)
            self._process, self.process_is_over = None, True
        return bool(ready)

    def close(self) -> None:
        """Wait for nothing any more."""
        for descriptor in (self._inotify, self._process):
            if descriptor is not None:
                os.close(descriptor)
        self._inotify = self._process = None

    def __enter__(self) -> Notice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(self, path: Path, mask: int) -> bool:
        return self._inotify is not None and int(_libc().inotify_add_watch(self._inotify, os.fsencode(path), mask)) >= 0


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read from, as soon as one can; none after so many seconds.

    `select.select` takes no descriptor from 1,024 on, and a process that trains may hold thousands.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _inotify() -> int | None:
    if sys.platform != "linux":
        return None
    descriptor = int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    return descriptor if descriptor >= 0 else None


def _opened(process: int | None) -> int | None:
    if process is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process)
    except OSError:  # it has ended by now, or may not be looked at
        return None

"""Writes files: each is complete or absent, goes through no link, and is as open as the run that it is in.

A run folder may be a stranger's archive, or one that a group writes to. So a file begins under a name that nobody can
foresee, and its last move replaces a link instead of following it; the folders of a run are opened one by one, and one
that is a link is refused. ``within`` names the run: its mode, and not the umask, says who may read what is in it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainkit import reading
from trainkit.errors import UserError

_STALE_SECONDS = 3600.0
"""A partial file that has not grown for so long is one of a killed process."""
_LONGEST_COPY = 1 << 30
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


def write(file: Path, content: str | bytes, within: Path | None = None, *, private: bool = False) -> None:
    """Write a whole file, in the place of one that is there."""
    with replacing(file, within, private=private) as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(file: Path, within: Path | None = None, *, private: bool = False) -> Iterator[BinaryIO]:
    """An open file that becomes ``file`` once the block ends well. Else it goes, and ``file`` is as it was.

    Its ``name`` is the path where it is meanwhile, with the same ending.

    Args:
        private: a key, say: flushed to the disk, and never readable for others, not even for a moment.
    """
    partial = file.with_name(f".partial-{secrets.token_hex(4)}-{file.name}")
    with _entered(file.parent, within) as (folder, mode):
        out = _new(partial, folder, 0o600 if private else mode)
        try:
            with out:
                _remove_stale(file.name, folder, os.fstat(out.fileno()).st_mtime)
                yield out
                if private:
                    out.flush()
                    os.fsync(out.fileno())
            os.replace(partial.name, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial.name, dir_fd=folder)
            raise


def create(file: Path, within: Path | None = None, *, buffering: int = -1) -> BinaryIO:
    """A new file, open for writing. Raises FileExistsError where anything has that name, a link too."""
    with _entered(file.parent, within) as (folder, mode):
        return _new(file, folder, mode, buffering)


def append(file: Path, within: Path | None = None, *, buffering: int = 0) -> BinaryIO:
    """A file to append to and to read, made where there is none.

    One that has a second name is copied first: what is known by that name stays as it is.

    Raises:
        UserError: it is a link, or no regular file.
    """
    with _entered(file.parent, within) as (folder, mode):
        while True:
            try:
                descriptor = os.open(file.name, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | _OPEN, dir_fd=folder)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    _new(file, folder, mode).close()
                continue
            except OSError:
                if file.is_symlink():
                    raise _link(file) from None
                raise
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                fix = "Move it away; a new file takes its place."
                raise UserError(f"{file} is no regular file.", why="Records are appended to it.", fix=fix)
            if found.st_nlink <= 1:
                return os.fdopen(descriptor, "rb+", buffering)
            with os.fdopen(descriptor, "rb") as old, replacing(file, within) as out:
                if found.st_size > _LONGEST_COPY:
                    fix = "Move it away; a new file takes its place."
                    raise UserError(f"{file} has a second name.", why="It is too long to be copied.", fix=fix)
                os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode & found.st_mode & 0o777)
                shutil.copyfileobj(old, out)


def make_own(folder: Path) -> bool:
    """Make a folder in a place where others write too, /tmp say; whether it is there, and nobody else gets at it."""
    with suppress(OSError):
        make_folder(folder.parent)
        folder.mkdir(mode=0o700)
    return is_own(folder, private=True)


def make_folder(folder: Path, within: Path | None = None) -> None:
    """Make a folder, and those above it, where it is not there."""
    if within is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        with _entered(folder, within, make=True):
            pass


def copy(source: Path, file: Path, within: Path | None = None) -> None:
    """Write ``file`` with the content of another."""
    with reading.open_regular(source, follow=True) as content, replacing(file, within) as out:
        shutil.copyfileobj(content, out)


def link(file: Path, target: str, within: Path | None = None) -> None:
    """Make ``file`` a symbolic link to ``target``, in one move."""
    partial = f".partial-{secrets.token_hex(4)}-{file.name}"
    with _entered(file.parent, within) as (folder, _):
        os.symlink(target, partial, dir_fd=folder)
        os.replace(partial, file.name, src_dir_fd=folder, dst_dir_fd=folder)


def is_own(folder: Path, *, private: bool = False) -> bool:
    """Whether it is a folder of this user's, and no link to one; ``private``: that nobody else can get at."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    closed = not private or (not found.st_mode & 0o077 and _stays(folder.parent))
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and closed


def _stays(folder: Path) -> bool:
    """Whether only its owner can rename what is in a folder."""
    mode = folder.stat().st_mode
    return not mode & 0o022 or bool(mode & stat.S_ISVTX)


@contextmanager
def _entered(folder: Path, within: Path | None, *, make: bool = False) -> Iterator[tuple[int, int | None]]:
    """A descriptor of a folder, and the mode of files in it; None: as the umask says."""
    here = os.open(within or folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if within is None:
            yield here, None
            return
        mode = stat.S_IMODE(os.fstat(here).st_mode) | 0o700
        at = within
        for part in folder.relative_to(within).parts:
            at = at / part
            below = _step_into(at, here, mode, make=make)
            os.close(here)
            here = below
        yield here, mode & 0o666
    finally:
        os.close(here)


def _step_into(folder: Path, above: int, mode: int, *, make: bool) -> int:
    made = False
    if make:
        with suppress(FileExistsError):
            os.mkdir(folder.name, mode, dir_fd=above)
            made = True
    try:
        descriptor = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=above)
    except OSError:
        if folder.is_symlink():
            raise _link(folder) from None
        raise
    if made and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        os.fchmod(descriptor, mode)
    return descriptor


def _link(path: Path) -> UserError:
    return UserError(
        f"{path} is a link to {os.readlink(path)}.",
        why="Nothing of a run is written through a link in it, which may lead to any file of yours.",
        fix="Remove the link. To have the run on another disk, put its whole folder there: --run-dir FOLDER.",
    )


def _new(file: Path, folder: int, mode: int | None, buffering: int = -1) -> BinaryIO:
    def opener(path: str, flags: int) -> int:
        return os.open(file.name, flags | _OPEN, 0o666 if mode is None else mode, dir_fd=folder)

    out = open(str(file), "xb", buffering, opener=opener)  # noqa: SIM115
    if mode is not None and stat.S_IMODE(os.fstat(out.fileno()).st_mode) != mode:
        os.fchmod(out.fileno(), mode)
    return out


def _remove_stale(name: str, folder: int, now: float) -> None:
    """Remove what killed processes have left of a file. ``now``: by the file server's clock, as ages are."""
    ours = re.compile(rf"\.partial-[0-9a-f]{{8}}-{re.escape(name)}")
    for left in filter(ours.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            if now - os.stat(left, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_SECONDS:
                os.unlink(left, dir_fd=folder)

"""Downloads and archives: verified, and either complete under their final name or not there at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trainkit import fileio, terminal
from trainkit.errors import UserError

Say = Callable[[str], None]
"""How progress reaches the user."""

CHUNK = 1 << 20
LONGEST_DOWNLOAD = 1 << 30
_MOST_MEMBERS = 2_000_000


def download(url: str, target: Path, md5: str, say: Say) -> None:
    """Fetch ``url`` to ``target`` and verify it; nothing to do where ``target`` is already right.

    Raises UserError where the machine has no internet, with what to do instead, and where it got some other file.
    """
    import urllib.error  # not at the top: `submit` imports the data sets, and this drags in a mail parser
    import urllib.request

    if target.exists():
        if md5_of(target) == md5:
            say(f"{target} is already there.")
            return
        say(f"{target} is damaged or cut short; fetching it again.")
    fileio.make_folder(target.parent)
    say(f"Downloading {url}")
    digest = hashlib.md5(usedforsecurity=False)
    with fileio.replacing(target) as out:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "trainkit"})
            with urllib.request.urlopen(request, timeout=30) as response:
                total = int(response.headers.get("Content-Length") or 0)
                done, shown = 0, 0
                while done <= LONGEST_DOWNLOAD and (chunk := response.read(CHUNK)):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if total and done * 10 // total > shown:
                        shown = done * 10 // total
                        say(f"  {shown * 10} % of {total / 1e6:.0f} MB")
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"{url} could not be downloaded.",
                why=f"{reason}.",
                fix=f"On a machine with internet fetch it, copy it to {target}, and give this command again.",
            ) from None
        if digest.hexdigest() != md5:
            raise UserError(
                f"{url} gave another file than the known one.",
                why=f"Its MD5 is {digest.hexdigest()}, not {md5}: a login page, or a transfer cut short.",
                fix=f"Try again; or fetch it elsewhere and copy it to {target}.",
            )


def md5_of(path: Path) -> str:
    """MD5 of a file, in hexadecimal. It tells a torn download from a whole one; it is no protection against malice."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def complete_folder(final: Path, *, keep: bool = False) -> Iterator[Path]:
    """A folder to fill that gets its final name once the block ends well.

    A leftover of an earlier call is removed, or, with ``keep``, handed out again so that the work goes on where it was.

    Raises:
        UserError: there is a folder of that name, from which something is missing; or the leftover is somebody else's.
    """
    if final.exists():
        raise UserError(
            f"{final} is there, but not complete.",
            why="A folder gets that name once all is in it; something has gone since.",
            fix=f"Move it away, and give this command again: {shlex.join(['mv', str(final), f'{final}.old'])}",
        )
    partial = final.with_name(final.name + ".partial")
    if not keep:
        shutil.rmtree(partial, ignore_errors=True)
    fileio.make_folder(partial)
    if not fileio.is_own(partial):  # somebody else may have filled it, in a folder that several write to
        fix = "Remove it, or prepare the data in a folder of your own: data.root=FOLDER."
        raise UserError(f"{partial} is not yours.", why="What is in it would be taken for the data.", fix=fix)
    try:
        yield partial
        os.replace(partial, final)
    except BaseException:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def opened_tar(archive: Path | IO[bytes] | HashingReader, *, stream: bool = False) -> Iterator[tarfile.TarFile]:
    """A tar archive, compressed or not. ``stream`` reads it strictly forward, once.

    Raises UserError where it is not one, or is cut short.
    """
    name = archive if isinstance(archive, Path) else getattr(archive, "name", "The archive")
    source: Any = {"name": archive} if isinstance(archive, Path) else {"fileobj": archive}
    try:
        with tarfile.open(mode="r|*" if stream else "r:*", tarinfo=fileio.TarMember, **source) as tar:
            yield tar
    except fileio.BROKEN_TAR as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's or the permissions' fault, not the archive's
        raise UserError(
            f"{name} cannot be read as a tar archive.",
            why=f"{terminal.one_line(error) or type(error).__name__}.",
            fix="Check that it was copied completely: its size, or its checksum.",
        ) from None


def regular(tar: tarfile.TarFile, most_bytes: int) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive. Ten kilobytes of one can ask for 50 GB of disk, so the sum of their sizes, and
    their number, is bounded.

    Args:
        most_bytes: what the data set's own archive holds, and some more.

    Raises:
        UserError: there is more in it, or a sparse file, which no data set has.
    """
    total = 0
    for count, member in enumerate(tar):
        total += member.size if member.isfile() else 0
        if member.issparse() or total > most_bytes or count > _MOST_MEMBERS:
            name = terminal.one_line(member.name, 100)
            why = f"Its member '{name}' is a sparse file, which takes more room on a disk than in the archive."
            if not member.issparse():
                why = f"It holds more than {most_bytes:,} bytes or {_MOST_MEMBERS:,} files, by its member '{name}'."
            raise UserError(f"{tar.name!s} is refused.", why=why, fix="Get the archive from the data set's own site.")
        if member.isfile():
            yield member


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, name: str) -> None:
    """The content of ``member``, a regular file, as ``folder / name``.

    Nothing else of an archive reaches the disk: no link, no device, no owner and no mode; and no path that leads out.
    Written by hand, because tarfile's own filters are missing from the Python of Debian 12.
    """
    target = Path(name)
    file = tar.extractfile(member) if member.isfile() else None
    if file is None or not target.name or target.is_absolute() or ".." in target.parts or "\0" in name:
        raise _refused(tar, member, f"leads out of {folder}, or is no file")
    fileio.make_folder(folder)
    try:
        fileio.make_folder((folder / target).parent, folder)
        with file, fileio.create(folder / target, folder) as out:
            shutil.copyfileobj(file, out, CHUNK)
    except FileExistsError:
        raise _refused(tar, member, "comes twice") from None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ENAMETOOLONG):
            raise  # the disk's or the permissions' fault, not the archive's
        raise _refused(tar, member, f"cannot be made: {error.strerror}") from None


def _refused(tar: tarfile.TarFile, member: tarfile.TarInfo, why: str) -> UserError:
    return UserError(
        f"{tar.name!s} is refused.",
        why=f"Its member '{terminal.one_line(member.name, 100)}' {why}.",
        fix="Get the archive from the data set's own site.",
    )


class HashingReader:
    """A file that is read forward, and its MD5 on the way: one pass over 138 GB instead of two. A context manager."""

    def __init__(self, path: Path, say: Say) -> None:
        self.name = str(path)
        self._file = path.open("rb")
        self._digest = hashlib.md5(usedforsecurity=False)
        self._total = path.stat().st_size
        self._done = self._shown = 0
        self._say = say

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes."""
        data = self._file.read(size)
        self._digest.update(data)
        self._done += len(data)
        if self._total and self._done * 20 // self._total > self._shown:
            self._shown = self._done * 20 // self._total
            self._say(f"  {self._shown * 5} % of {self._total / 1e9:.1f} GB")
        return data

    def finish(self) -> str:
        """Read what is left, and give the MD5 of the whole in hexadecimal."""
        while self.read(CHUNK):
            pass
        return self._digest.hexdigest()

    def __enter__(self) -> HashingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def given_or_in(root: Path, name: str, archives: list[Path]) -> Path | None:
    """The archive called ``name``: among those given on the command line, or in ``root``."""
    for candidate in [*archives, root / name]:
        if candidate.name == name and candidate.is_file():
            return candidate
    return None


def verified(url: str, target: Path, md5: str, archives: list[Path], say: Say) -> Path:
    """The file at ``url``: given on the command line (taken as it is, with a note where it is not the official one),
    lying at ``target``, or downloaded to there."""
    given = given_or_in(target.parent, target.name, archives)
    if given is None or given == target:
        download(url, target, md5, say)
        return target
    if md5_of(given) != md5:
        say(f"Note: {given} is not the official file (another MD5). Taking it for data of your own in the same format.")
    return given


def require_names(archives: list[Path], names: Iterable[str]) -> None:
    """Refuse archives under names that nobody would look for."""
    for archive in archives:
        if archive.name not in names:
            raise UserError(
                f"{archive} is not used.",
                why=f"The data set comes in: {', '.join(names)}.",
                fix="Give the file its original name, or leave it out.",
            )

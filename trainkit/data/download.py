"""Downloads and archives: verified, and either complete under their final name or absent."""

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

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError

Say = Callable[[str], None]
"""Shows one line of progress to the user."""

CHUNK = 1 << 20
LONGEST_DOWNLOAD = 1 << 30
_MOST_MEMBERS = 2_000_000


def _blocks(stream: Any, size: int, say: Say) -> Iterator[bytes]:
    """Yield what a stream of ``size`` bytes, if that is known, gives; and say how far it is."""
    done = shown = 0
    for block in iter(lambda: stream.read(CHUNK), b""):
        yield block
        done += len(block)
        percent = done * 20 // size * 5 if size else 0
        if percent > shown:
            shown = percent
            say(f"  {percent} % of {terminal.size(size)}")


def md5_of(file: Path, say: Say) -> str:
    """MD5 of a file, in hexadecimal. It tells a torn download from a whole one; it does not protect against malice."""
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        for block in _blocks(stream, file.stat().st_size, say):
            digest.update(block)
    return digest.hexdigest()


def download(url: str, target: Path, md5: str, say: Say) -> None:
    """Fetch ``url`` to ``target`` and verify it, unless ``target`` is right already.

    Raises UserError where the machine has no internet, with what to do instead, and where another file came.
    """
    import urllib.error  # not at the top: `submit` imports the data sets, and this drags in a mail parser
    import urllib.request

    if target.exists():
        if md5_of(target, say) == md5:
            say(f"{target} already exists.")
            return
        say(f"{target} is damaged or cut short; fetching it again.")
    fileio.make_folder(target.parent)
    say(f"Downloading {url}")
    digest = hashlib.md5(usedforsecurity=False)
    with fileio.replacing(target) as out:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "trainkit"})
            with urllib.request.urlopen(request, timeout=30) as response:
                for block in _blocks(response, int(response.headers.get("Content-Length") or 0), say):
                    digest.update(block)
                    out.write(block)
                    if out.tell() > LONGEST_DOWNLOAD:
                        raise ValueError(f"it has more than {LONGEST_DOWNLOAD:,} bytes")
        except (urllib.error.URLError, OSError, ValueError) as error:
            why = f"{getattr(error, 'reason', None) or error}."
            fix = f"Fetch it on a machine with internet, copy it to {target}, and repeat this command."
            raise UserError(f"{url} could not be downloaded.", why=why, fix=fix) from None
        if digest.hexdigest() != md5:
            why = f"Its MD5 is {digest.hexdigest()}, not {md5}: a login page, or a transfer cut short."
            fix = f"Try again; or fetch it elsewhere and copy it to {target}."
            raise UserError(f"{url} returned a different file than expected.", why=why, fix=fix)


def given_or_in(root: Path, name: str, archives: Iterable[Path]) -> Path | None:
    """The archive called ``name``: among those given on the command line, or in ``root``."""
    for file in [*archives, root / name]:
        if file.name == name and file.is_file():
            return file
    return None


def given_or_fetched(url: str, target: Path, md5: str, archives: Iterable[Path], say: Say) -> Path:
    """The file at ``url``: given on the command line, else at ``target``, where it is downloaded to if need be."""
    given = given_or_in(target.parent, target.name, archives)
    if given is None or given == target:
        download(url, target, md5, say)
        return target
    note_other(given, md5, say)
    return given


def is_there(folder: Path, names: Iterable[str], say: Say) -> bool:
    """Tell whether a data set is unpacked already, and then say so."""
    whole = all((folder / name).exists() for name in names)
    if whole:
        say(f"{folder} already exists.")
    return whole


def note_other(archive: Path, md5: str, say: Say) -> None:
    """Say what an archive is taken for whose MD5 is not that of the official one, ``md5``."""
    say(f"Checking {archive}")
    if md5_of(archive, say) != md5:
        say(
            f"Note: {archive} is not the official file (its MD5 differs). Using it as your own data in the same format."
        )


def other_archive(archive: Path, what: str, why: str, right: str) -> UserError:
    """The error for an archive that does not hold what its data set needs; ``right``: what to use."""
    return UserError(
        f"{archive} is not the {what}.", why=why, fix=f"Fetch {right} again, or give its file with --archive."
    )


def require_names(archives: Iterable[Path], names: Iterable[str]) -> None:
    """Refuse archives that the data set does not come in."""
    for archive in archives:
        if archive.name not in names:
            why = f"The data set comes in: {', '.join(names)}."
            raise UserError(f"{archive} is not used.", why=why, fix="Give the file its original name, or omit it.")


@contextmanager
def complete_folder(final: Path, *, keep: bool = False) -> Iterator[Path]:
    """A folder to fill, which gets its final name once the block ends well.

    A leftover of an earlier call is removed; with ``keep`` it is handed out again, so that the work goes on from there.

    Raises:
        UserError: ``final`` exists, and something of it is missing; or the leftover is somebody else's.
    """
    if final.exists():
        why = "A folder gets this name once it is complete; since then, files have been removed."
        fix = f"Move it away, and give this command again: {shlex.join(['mv', str(final), f'{final}.old'])}"
        raise UserError(f"{final} exists, but is incomplete.", why=why, fix=fix)
    partial = final.with_name(final.name + ".partial")
    if not keep:
        shutil.rmtree(partial, ignore_errors=True)
    fileio.make_folder(partial)
    if not fileio.is_own(partial):  # in a folder that several write to, somebody else may have filled it
        fix = "Remove it, or prepare the data in your own folder: data.root=FOLDER."
        raise UserError(f"{partial} is not yours.", why="Its contents would be used as data.", fix=fix)
    try:
        yield partial
        os.replace(partial, final)
    except BaseException:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def unpacked(
    archive: Path, final: Path, name_of: Callable[[Path], str | None], most_bytes: int, say: Say
) -> Iterator[Path]:
    """Unpack a tar archive to ``final``. The block gets the folder before it has that name, to check what is there.

    Args:
        name_of: where a member belongs in the folder; None: it is left out.
        most_bytes: see `regular`.
    """
    say(f"Unpacking {archive}")
    with complete_folder(final) as partial:
        with opened_tar(archive) as tar:
            for member in regular(tar, most_bytes):
                name = name_of(Path(member.name))
                if name is not None:
                    extract(tar, member, partial, name)
        yield partial
    say(f"{final} is complete.")


@contextmanager
def opened_tar(archive: Path | IO[bytes]) -> Iterator[tarfile.TarFile]:
    """A tar archive, compressed or not; a stream is read forward, once, and is not compressed.

    Raises UserError where it is not one, or is cut short.
    """
    stream: Any = None
    name = str(archive)
    if not isinstance(archive, Path):
        stream = archive
        name = str(getattr(archive, "name", "The archive"))
    try:
        with tarfile.open(name, "r|" if stream else "r:*", stream, tarinfo=fileio.TarMember) as tar:
            yield tar
    except fileio.BROKEN_TAR as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's or the permissions' fault, not the archive's
        why = f"{terminal.one_line(error) or type(error).__name__}."
        fix = "Check that it was copied completely: its size, or its checksum."
        raise UserError(f"{name} cannot be read as a tar archive.", why=why, fix=fix) from None


def members(tar: tarfile.TarFile, most_bytes: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive. Ten kilobytes of one can ask for 50 GB of disk, so their number and the sum of
    their sizes are bounded.

    Args:
        most_bytes: what the data set's own archive holds, and some more.

    Raises:
        UserError: there is more in it, or a sparse file, which no data set has.
    """
    total = 0
    for count, member in enumerate(tar):
        if member.isfile():
            total += member.size
        if member.issparse():
            raise _refused(tar, member, "is a sparse file, which takes more space on a disk than in the archive")
        if total > most_bytes or count > _MOST_MEMBERS:
            raise _refused(tar, member, f"takes it beyond {most_bytes:,} bytes or {_MOST_MEMBERS:,} files")
        yield member


def regular(tar: tarfile.TarFile, most_bytes: int) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of an archive. Raises UserError as `members` does."""
    return (member for member in members(tar, most_bytes) if member.isfile())


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, name: str) -> None:
    """Write the content of ``member``, a regular file, to ``folder / name``.

    Nothing else of an archive reaches the disk: no link, device, owner or mode, and no path that leads out. This is
    written by hand, because tarfile's own filters are missing from the Python of Debian 12.
    """
    file = tar.extractfile(member) if member.isfile() else None
    try:
        target = fileio.inside(folder, name)
    except ValueError:
        file = None
    if file is None:
        raise _refused(tar, member, f"leads out of {folder}, or is not a file")
    try:
        fileio.make_folder(folder)
        fileio.make_folder(target.parent, folder)
        with file, fileio.create(target, folder) as out:
            shutil.copyfileobj(file, out, CHUNK)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise  # the disk's or the permissions' fault, not the archive's
        raise _refused(tar, member, f"cannot be made: {error.strerror}") from None


def _refused(tar: tarfile.TarFile, member: tarfile.TarInfo, why: str) -> UserError:
    why = f"Its member '{terminal.one_line(member.name, 100)}' {why}."
    return UserError(
        f"{tar.name!s} is refused.", why=why, fix="Download the archive from the official site of the data set."
    )

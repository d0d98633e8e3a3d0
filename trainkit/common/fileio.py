"""Read and write files: bounded when read, complete or absent when written, never through a stranger's link.

Reading. A FIFO in the place of a file would be waited for without end, so only regular files are opened. A sparse file
of many gigabytes takes no space on a disk, so every reader states its limit. A log that is a link to a key would show
that key in a report, so a link is read only where the reader says ``follow``: files that the user names or has
installed, and data. Numbers in records are finite, and of a size that can be printed.

Writing. A run folder may be a stranger's archive, or one that a group writes to. So a file begins under a name that
nobody can foresee, and its last move replaces a link instead of following it. The folders of a run are opened one by
one, and one that is a link is refused. ``within`` names the run: its mode, not the umask, says who may read its files.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainkit.common import terminal
from trainkit.common.errors import TrainkitError, UserError

LARGEST = 1e18
"""A number beyond it is a mistake, or a run that has diverged: like infinity it counts as none."""
LATEST = 1e11
"""Seconds since 1970, in the year 5138."""
MOST_BYTES = 1 << 24
"""Most bytes of a file that is read whole, unless its reader says another number."""
LONGEST_LINE = 1 << 20
MOST_JSONL_BYTES = 1 << 26
"""Most bytes of a JSON lines file, unless its reader says another number: a hundred thousand saves, say."""
_MOST_VALUES = 2_000_000
"""Most values in one JSON text: each takes up to 64 bytes of memory."""
_LONGEST_HEADER = 1 << 14
"""Bytes of what an archive says of one member: two of the longest paths that a system allows, and some more."""
_STALE_SECONDS = 3600.0
"""Seconds without growth after which a partial file was left by a killed process."""
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
BROKEN_TAR: tuple[type[Exception], ...] = (
    tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error
)  # fmt: skip
"""Errors that tarfile raises for archives that are cut short, or made to break their reader."""
with suppress(ImportError):  # a Python that was built without it reads no such archives
    from lzma import LZMAError

    BROKEN_TAR += (LZMAError,)


def open_regular(path: Path, *, buffering: int = -1, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading bytes. Raises OSError for everything else, at once."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if follow or not os.path.islink(path):
            raise
        raise OSError(error.errno, "It is a link, and links are not followed", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "It is not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering)


def read_bytes(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> bytes:
    """Read a whole file. Raises OSError, also for one of more than ``most`` bytes: half of one may mislead."""
    with open_regular(path, follow=follow) as file:
        content = file.read(require_size(file, most))
        for more in iter(lambda: file.read(1 << 16), b""):  # it has grown; or it is in /proc, and knows no size
            content += more
            if len(content) > most:
                raise _too_large(len(content), most)
    return content


def read_text(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> str:
    """Read a file as `read_bytes` does; bytes that are not UTF-8 are replaced."""
    return read_bytes(path, most, follow=follow).decode(errors="replace")


def read_start(path: Path, first_bytes: int, *, follow: bool = False) -> str:
    """Read the text at the beginning of a file; bytes that are not UTF-8 are replaced. Raises OSError."""
    with open_regular(path, follow=follow) as file:
        return file.read(first_bytes).decode(errors="replace")


def read_end(path: Path, last_bytes: int = MOST_BYTES) -> str:
    """Read the text at the end of a file; bytes that are not UTF-8 are replaced. Raises OSError."""
    with open_regular(path) as file:
        return end_of(file, last_bytes).decode(errors="replace")


def end_of(file: BinaryIO, last_bytes: int) -> bytes:
    """Read the last bytes of an open file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
    return file.read(last_bytes)


def require_size(file: BinaryIO, most: int) -> int:
    """The size of an open file in bytes. Raises OSError if it is more than ``most``."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise _too_large(size, most)
    return size


def _too_large(size: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"It has {size:,} bytes; a file of this kind has at most {most:,}")


class TarMember(tarfile.TarInfo):
    """A member of an archive with headers of bounded length. Python reads each of them whole: hundreds of megabytes,
    which it then searches for minutes."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "TarMember":
        """Raises ReadError for a damaged header: Python takes one behind the first for the end of the archive."""
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ in _ENDS:
                raise
            raise tarfile.ReadError(str(error)) from None

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "TarMember":
        """Raises ReadError for a header that is too long."""
        found = super().frombuf(buf, encoding, errors)
        if found.size > _LONGEST_HEADER and found.type in _OF_THE_NEXT:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


_ENDS = ("EOFHeaderError", "EmptyHeaderError")
"""Errors by which tarfile knows the end of an archive; it documents only what they are derived from."""
_OF_THE_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
"""Kinds of headers that describe the member after them. X is that of Solaris."""


def parse(text: str | bytes) -> Any:
    """Parse JSON. NaN and infinity, which are not JSON, and enormous numbers become null.

    Raises ValueError for text that is not JSON, is nested too deeply or holds too many values.
    """
    if not isinstance(text, str):
        text = text.decode(errors="replace")
    if len(text) > _MOST_VALUES and text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:
        raise ValueError(f"It holds more than {_MOST_VALUES:,} values")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("It is nested too deeply") from None


_JSON = json.JSONDecoder(
    parse_constant=lambda name: None, parse_int=lambda digits: int(digits) if len(digits.lstrip("-")) < 20 else None
)


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """`parse` a JSON object; None for anything else."""
    with suppress(ValueError):
        value = parse(text)
        if isinstance(value, dict):
            return value
    return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where none can be read."""
    with suppress(OSError):
        return parse_object(read_text(path)) or {}
    return {}


LONGEST_PATH = 1000
"""Characters of a path that a file names."""


def inside(folder: Path, name: object) -> Path:
    """The file that ``name`` names below ``folder``: for every path that was read from a file, which others may have
    written.

    Raises ValueError for an absolute path, for one with ``..``, and for what is no path in its plain form.
    """
    if isinstance(name, str) and len(name) <= LONGEST_PATH and _CONTROLS.search(name) is None:
        parts = name.split("/")
        if {"", ".", ".."}.isdisjoint(parts):
            return folder.joinpath(*parts)
    raise ValueError(f"{terminal.one_line(name, 100)!r} is not a path below a folder")


_CONTROLS = re.compile("[\0-\x1f\x7f]")


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a record that is there and cannot be read: nobody knows what it says."""
    fix = "Check its permissions and its disk; if it is damaged, move it away."
    return UserError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix=fix)


@contextmanager
def disk_errors_as(
    what: str, *, fix: str, more: str = "", key: str | None = None, kind: type[TrainkitError] = UserError
) -> Iterator[None]:
    """Whatever the system refuses in the block as an error for users: what cannot be done, why in the system's words,
    and ``fix``. ``more``: a sentence behind these words."""
    try:
        yield
    except OSError as error:
        words = str(error.strerror or error)
        if error.filename:
            words += f": {error.filename}"
        raise kind(what, why=f"{words}. {more}".rstrip(), fix=fix, key=key) from None


def write(file: Path, content: str | bytes, within: Path | None = None, *, private: bool = False) -> None:
    """Write a whole file, in the place of one that is there."""
    with replacing(file, within, private=private) as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(
    file: Path, within: Path | None = None, *, private: bool = False, durable: bool = False
) -> Iterator[BinaryIO]:
    """An open file that becomes ``file`` if the block ends well; otherwise it goes, and ``file`` is as it was.

    Its ``name`` is the path where it is meanwhile, with the same ending.

    Args:
        private: a key, say: durable, and never readable for others, not even for a moment.
        durable: it is on the disk before it takes its name.
    """
    partial = file.with_name(f".partial-{secrets.token_hex(4)}-{file.name}")
    with _entered(file.parent, within) as (folder, mode):
        out = _new(partial, folder, 0o600 if private else mode)
        try:
            with out:
                _remove_stale(file.name, folder, os.fstat(out.fileno()).st_mtime)
                yield out
                if private or durable:
                    out.flush()
                    os.fsync(out.fileno())
            os.replace(partial.name, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial.name, dir_fd=folder)
            raise


def _remove_stale(name: str, folder: int, now: float) -> None:
    """Remove the partial files that killed processes have left. ``now``: by the file server's clock, as ages are."""
    ours = re.compile(rf"\.partial-[0-9a-f]{{8}}-{re.escape(name)}")
    for left in filter(ours.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            if now - os.stat(left, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_SECONDS:
                os.unlink(left, dir_fd=folder)


def create(file: Path, within: Path | None = None, *, buffering: int = -1) -> BinaryIO:
    """Open a new file for writing. Raises FileExistsError where anything has that name, a link too."""
    with _entered(file.parent, within) as (folder, mode):
        return _new(file, folder, mode, buffering)


def append(file: Path, within: Path | None = None, *, buffering: int = 0) -> BinaryIO:
    """Open a file to append to and to read, and make it where there is none.

    Raises:
        UserError: it is a link, or not a regular file, or known by a second name, which others may rely on.
    """
    descriptor = None
    with _entered(file.parent, within) as (folder, mode):
        while descriptor is None:
            try:
                descriptor = _open(file, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK, folder)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    _new(file, folder, mode).close()
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return os.fdopen(descriptor, "rb+", buffering)
    os.close(descriptor)
    fix = "Move it away, and put a copy in its place."
    why = "Records are appended to it, which would also change the file of the other name."
    raise UserError(f"{file} is not a regular file, or has a second name.", why=why, fix=fix)


def make_folder(folder: Path, within: Path | None = None) -> None:
    """Make a folder, and those above it, where it is not there."""
    if within is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        with _entered(folder, within, make=True):
            pass


def copy(source: Path, file: Path, within: Path | None = None) -> None:
    """Write ``file`` with the content of another."""
    with open_regular(source, follow=True) as content, replacing(file, within) as out:
        shutil.copyfileobj(content, out)


def link(file: Path, target: str, within: Path | None = None) -> None:
    """Make ``file`` a symbolic link to ``target``, in one move."""
    partial = f".partial-{secrets.token_hex(4)}-{file.name}"
    with _entered(file.parent, within) as (folder, _):
        os.symlink(target, partial, dir_fd=folder)
        os.replace(partial, file.name, src_dir_fd=folder, dst_dir_fd=folder)


def make_own(folder: Path) -> bool:
    """Make a folder where others write too, /tmp say; whether it is there, and nobody else gets at it."""
    with suppress(OSError):
        make_folder(folder.parent)
        folder.mkdir(mode=0o700)
    return is_own(folder, private=True)


def require_private(file: Path, why: str) -> None:
    """Raise UserError where others can read a file with a secret. ``why``: what they could do with that."""
    if file.stat().st_mode & 0o077:
        fix = f"chmod 600 {terminal.word_for_shell(str(file))}"
        raise UserError(f"Others can read {file}.", why=why, fix=fix)


def is_own(folder: Path, *, private: bool = False) -> bool:
    """True if it is this user's own folder, and not a link to one; ``private``: and nobody else gets at it."""
    try:
        found = folder.lstat()
        above = folder.parent.stat().st_mode
    except OSError:
        return False
    others_rename = above & 0o022 and not above & stat.S_ISVTX
    if private and (found.st_mode & 0o077 or others_rename):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


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
            above = here
            made = False
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, mode, dir_fd=above)
                    made = True
            here = _open(at, os.O_RDONLY | os.O_DIRECTORY, above)
            os.close(above)
            if made and stat.S_IMODE(os.fstat(here).st_mode) != mode:
                os.fchmod(here, mode)
        yield here, mode & 0o666
    finally:
        os.close(here)


def _open(path: Path, flags: int, folder: int) -> int:
    """A descriptor of what ``folder`` holds by the name of ``path``. Raises OSError, and UserError for a link."""
    try:
        return os.open(path.name, flags | _OPEN, dir_fd=folder)
    except OSError:
        if not path.is_symlink():
            raise
    why = "trainkit writes through no link in a run folder, because it may lead to any file of yours."
    fix = "Remove the link. To have the run on another disk, put its whole folder there: --run-dir FOLDER."
    raise UserError(f"{path} is a link to {os.readlink(path)}.", why=why, fix=fix)


def _new(file: Path, folder: int, mode: int | None, buffering: int = -1) -> BinaryIO:
    rights = 0o666 if mode is None else mode

    def opener(path: str, flags: int) -> int:
        return os.open(file.name, flags | _OPEN, rights, dir_fd=folder)

    out = open(str(file), "xb", buffering, opener=opener)  # noqa: SIM115
    if mode is not None and stat.S_IMODE(os.fstat(out.fileno()).st_mode) != mode:
        os.fchmod(out.fileno(), mode)
    return out


def full(folder: Path) -> str:
    """Why nothing can be written below ``folder``: its disk has no room; empty if it has, or nobody can tell.

    A quota is not seen by this.
    """
    with suppress(OSError):
        found = os.statvfs(folder)
        if found.f_blocks and found.f_bavail * found.f_frsize < 1 << 16:
            return f"No space left on the disk of {folder}"
        if found.f_files and not found.f_favail:
            return f"No inodes left on the disk of {folder}: too many files"
    return ""


def folder(name: str) -> Path:
    """The folder ``configs`` or ``slurm``: inside the package in a wheel, beside it in a checkout or a snapshot."""
    in_package = Path(__file__).resolve().parents[1] / name
    if in_package.is_dir():
        return in_package
    return in_package.parents[1] / name

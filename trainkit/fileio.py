"""Read and write files: the one bounded reader, the one writer that follows no link, and JSON lines."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import re
import secrets
import select
import shutil
import stat
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from trainkit import terminal
from trainkit.errors import UserError

# The one reader of files: bounded in bytes, values, depth and digits, whoever has written them and whatever broke.
#
# A FIFO in the place of a file would be waited for without end, so files are opened without waiting, and only regular
# ones are read. A sparse file of many gigabytes takes no space on a disk, so every reader says how much it takes. A
# log that is a link to a key would show that key in a report, and send it with a copy of the run: a link is read only
# where its reader says ``follow``, of files that the user names or has installed, and of data. Records hold what JSON
# has and a person can read: numbers are finite and of a size that can be printed.

LARGEST = 1e18
"""Beyond it a number is a mistake, or a run that has diverged: like infinity it counts as none."""
LATEST = 1e11
"""Seconds since 1970, in the year 5138."""
MOST_BYTES = 1 << 24
"""Bytes of a file that is read whole, unless its reader says another number."""
_AT_ONCE = 1 << 16
_MOST_VALUES = 2_000_000
"""In one JSON text: each takes up to 64 bytes of memory."""
_LONGEST_HEADER = 1 << 14
"""Bytes of what an archive says of one member: two of the longest paths that a system allows, and some more."""
BROKEN_TAR: tuple[type[Exception], ...] = (
    tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error
)  # fmt: skip
"""What tarfile raises for archives that are cut short, or made to break their reader."""
with suppress(ImportError):  # a Python that was built without it reads no such archives
    from lzma import LZMAError

    BROKEN_TAR += (LZMAError,)


def open_regular(path: Path, *, buffering: int = -1, follow: bool = False) -> BinaryIO:
    """A regular file, for reading bytes. Raises OSError for everything else, at once."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if follow or not os.path.islink(path):
            raise
        raise OSError(error.errno, "It is a link, and what it leads to is not read", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "It is no regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering)


def read_bytes(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> bytes:
    """All of a file. Raises OSError, also for one of more than ``most`` bytes: half of it may mean something else."""
    with open_regular(path, follow=follow) as file:
        size = require_size(file, most)
        content = file.read(max(size, _AT_ONCE) + 1)
        while len(content) > size and (more := file.read(_AT_ONCE)):  # it grows; files in /proc do not know their size
            content += more
            if len(content) > most:
                break
    if len(content) > most:
        raise _too_large(len(content), most)
    return content


def read_text(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> str:
    """As `read_bytes`; what is no UTF-8 is replaced."""
    return read_bytes(path, most, follow=follow).decode(errors="replace")


def read_start(path: Path, first_bytes: int, *, follow: bool = False) -> str:
    """The text at the beginning of a file; what is no UTF-8 is replaced. Raises OSError."""
    with open_regular(path, follow=follow) as file:
        return file.read(first_bytes).decode(errors="replace")


def read_end(path: Path, last_bytes: int = MOST_BYTES) -> str:
    """The text of a file, of a long one its end; what is no UTF-8 is replaced. Raises OSError."""
    with open_regular(path) as file:
        return end_of(file, last_bytes).decode(errors="replace")


def end_of(file: BinaryIO, last_bytes: int) -> bytes:
    """The last bytes of an open file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
    return file.read(last_bytes)


def require_size(file: BinaryIO, most: int) -> int:
    """The bytes of an open file. Raises OSError if these are more than ``most``."""
    if (size := os.fstat(file.fileno()).st_size) > most:
        raise _too_large(size, most)
    return size


def _too_large(size: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"It has {size:,} bytes, and a file of its kind at most {most:,}")


class TarMember(tarfile.TarInfo):
    """A member of an archive with headers of bounded length. Python reads each of them whole: hundreds of megabytes,
    through which it then searches for minutes."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> TarMember:
        """Raises ReadError for a header that is too long."""
        found = super().frombuf(buf, encoding, errors)
        if found.size > _LONGEST_HEADER and found.type in _OF_THE_NEXT:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


_OF_THE_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
"""Kinds of headers that say more of the member after them. X is that of Solaris."""


def parse(text: str | bytes) -> Any:
    """What a JSON text says. NaN and infinity, which are no JSON, and enormous numbers are null.

    Raises ValueError for what is no JSON, is nested too deeply or holds too many values.
    """
    text = text if isinstance(text, str) else text.decode(errors="replace")
    if len(text) > _MOST_VALUES and text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:
        raise ValueError(f"It holds more than {_MOST_VALUES:,} values")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("It is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else. NaN and infinity, which are no JSON, and enormous numbers are null."""
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read."""
    try:
        return parse_object(read_text(path)) or {}
    except OSError:
        return {}


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that can be computed with and printed. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a count, of steps or ranks."""
    return type(value) is int and 0 <= value < 1 << 53


def is_time(value: Any) -> TypeGuard[int | float]:
    """Whether it is a time of this age, in seconds since 1970."""
    return is_number(value) and 0 <= value <= LATEST


def plain(value: Any, depth: int = 4) -> Any:
    """A value of unknown meaning as it may be shown: numbers, lines of text, lists and mappings of these; or None."""
    if isinstance(value, str):
        return terminal.one_line(value, 2000)
    if isinstance(value, list | dict) and depth:
        if isinstance(value, list):
            return [plain(item, depth - 1) for item in value[:1000]]
        return {terminal.one_line(key): plain(item, depth - 1) for key, item in list(value.items())[:1000]}
    return value if isinstance(value, bool) or is_number(value) else None


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a record that is there and cannot be read: what it says is unknown, and not nothing."""
    return UserError(
        f"Cannot read {path}.",
        why=f"{error.strerror or error}.",
        fix="Check its permissions, or whether its disk is there; move it away if it is damaged.",
    )


def _int(text: str) -> int | None:
    return int(text) if len(text) < 20 else None


_JSON = json.JSONDecoder(parse_constant=lambda name: None, parse_int=_int)


# Writes files: each is complete or absent, goes through no link, and is as open as the run that it is in.
#
# A run folder may be a stranger's archive, or one that a group writes to. So a file begins under a name that nobody
# can foresee, and its last move replaces a link instead of following it; the folders of a run are opened one by one,
# and one that is a link is refused. ``within`` names the run: its mode, and not the umask, says who may read what is
# in it.

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
    with open_regular(source, follow=True) as content, replacing(file, within) as out:
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


# JSON lines: one record a line, appended in one write, read leniently.

LONGEST_LINE = 1 << 20
MOST_JSONL_BYTES = 1 << 26
"""Bytes of a file that is read whole: a hundred thousand saves, say. Measurements may be more, each reader says it."""
MOST_RECORDS = 100_000
"""Records of such a file."""
MOST_THINNED_BYTES = 1 << 32
"""Ten million records: the updates of a year."""
_BLOCK = 1 << 24
_HEAD = 1 << 16


_STRETCH = 10
"""So many times as many lines as one stands for have their extremes among the records."""


class Thinned(NamedTuple):
    """Records of a file, in its order."""

    records: list[dict[str, Any]]
    every: int
    """How many of the file's records one stands for."""
    outliers: frozenset[int] = frozenset()
    """Places in ``records`` of those that stand for themselves alone."""


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record. The line goes out in a single write, so that records of several processes do not mix.

    A line that a killed process left torn is closed first, or it would swallow this record.
    """
    line = json.dumps(finite(record), default=str, allow_nan=False) + "\n"
    with append(path, path.parent) as out:
        size = os.fstat(out.fileno()).st_size
        if size and os.pread(out.fileno(), 1, size - 1) != b"\n":
            line = "\n" + line
        data = line.encode()
        if out.write(data) < len(data):  # the disk has become full; readers pass over a torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_jsonl(path: Path, holding: Sequence[bytes] = (), *, most: int = MOST_JSONL_BYTES) -> Iterator[dict[str, Any]]:
    """Every whole record; nothing if there is no file. Torn lines are passed over.

    Args:
        holding: only lines that hold one of these, if there are any: most of a long file need not be parsed.
        most: bytes of the file.

    Raises UserError where there is something that cannot be read.
    """
    try:
        with open_regular(path) as file:
            require_size(file, most)
            few, count, whole = (
                most <= MOST_JSONL_BYTES,
                0,
                True,
            )  # a line without end is neither a record nor worth its memory
            while (line := file.readline(LONGEST_LINE)) and (most := most - len(line)) >= 0:  # it may grow
                is_wanted = whole and (not holding or any(part in line for part in holding))
                if is_wanted and (record := parse_object(line)) is not None:
                    yield record
                    count += 1
                    if few and count > MOST_RECORDS:
                        raise OSError(errno.EFBIG, f"It holds more than {MOST_RECORDS:,} records")
                whole = line.endswith(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from None


def read_thinned(
    path: Path, most: int, always: Callable[[bytes], bool] = lambda line: False, extremes_of: str = ""
) -> Thinned:
    """Of an enormous file about ``most`` records, evenly spread, the last among them; of every other file all.

    Args:
        always: whether a line must not be left out; asked of each, so it must be quick.
        extremes_of: a key: of each stretch of lines the largest and the smallest value are among the records, and the
            first that is no finite number.

    Raises UserError where there is something that cannot be read.
    """
    try:
        with open_regular(path) as file:
            require_size(file, MOST_THINNED_BYTES)
            every = _every(file, most)
            found: list[bytes] = []
            rest, number, last = b"", 0, b""
            places: set[int] = set()  # of outliers, in ``found``
            while block := file.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                if every == 1:
                    found += lines
                else:
                    even = {at for at, line in enumerate(lines) if (at + number) % every == 0 or always(line)}
                    extremes = _extremes(lines, extremes_of.encode(), _STRETCH * every) if extremes_of else set()
                    taken = sorted(even | extremes)
                    places |= {place for place, at in enumerate(taken, len(found)) if at not in even}
                    found += [lines[at] for at in taken]
                    number += len(lines)
                    last = lines[-1] if lines else last
                rest = rest if len(rest) < LONGEST_LINE else b""  # neither a record nor worth its memory
    except FileNotFoundError:
        return Thinned([], 1)
    except OSError as error:
        raise unreadable(path, error) from None
    lines_of = ((place, line) for place, line in enumerate([*found, last, rest]) if 0 < len(line) < LONGEST_LINE)
    parsed = ((place, parse_object(line)) for place, line in lines_of)
    whole = [(place, record) for place, record in parsed if record is not None]
    outliers = frozenset(at for at, (place, _) in enumerate(whole) if place in places)
    return Thinned([record for _, record in whole], every, outliers)


def _extremes(lines: Sequence[bytes], key: bytes, stretch: int) -> set[int]:
    """Places of the lines with the smallest and the largest value of each stretch, and with the first that is no finite
    number. A million lines are looked at in half a second: as long as all is well no line is looked at alone."""
    value = re.compile(rb'"' + re.escape(key) + rb'": ([^,}]+)')
    told, at = value.findall(b"\n".join(lines)), range(len(lines))
    if len(told) != len(lines):  # validations without it, lines of others
        found = [(place, match[1]) for place, line in enumerate(lines) if (match := value.search(line))]
        at, told = [place for place, _ in found], [text for _, text in found]  # type: ignore[assignment]
    try:
        values = list(map(float, told))
    except ValueError:  # null
        values = list(map(_number, told))
    places: set[int] = set()
    for begin in range(0, len(values), stretch):
        part = values[begin : begin + stretch]
        if not math.isfinite(sum(part)):
            lost = [math.isfinite(one) for one in part]
            if False in lost:
                places.add(at[begin + lost.index(False)])
            part = [one if fine else math.nan for one, fine in zip(part, lost, strict=True)]
            finite = [one for one in part if not math.isnan(one)]
        else:
            finite = part
        if finite:
            places |= {at[begin + part.index(min(finite))], at[begin + part.index(max(finite))]}
    return places


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _every(file: BinaryIO, most: int) -> int:
    """One of how many lines is to be read, by the length of the first ones."""
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
    file.seek(0)
    lines = size / max(len(head) / max(head.count(b"\n"), 1), 1)
    return max(1, round(lines / most))


def finite(value: Any) -> Any:
    """``value`` as JSON can say it: it has no NaN or infinity, and a diverged loss must not make a file unreadable."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Being told, instead of looking: that a file of this machine was written to, or that a process of it has ended.
#
# Linux tells of what processes of this machine write (inotify); of what others write onto a networked disk nobody
# does.

_SELDOM = 5.0
"""Seconds after which even who is told looks by themselves."""
_MODIFY, _COME = 0x2, 0x80 | 0x100
"""inotify's IN_MODIFY; IN_MOVED_TO and IN_CREATE."""


class FileWatcher:
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

    def __enter__(self) -> FileWatcher:
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


# Whether there is room where a run writes: a full disk leaves no record of itself.


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


# Where the files are that come with the code: presets, recipes, site profiles, the schema, the sbatch templates.

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``configs`` or ``slurm``: inside the package in a wheel, beside it in a checkout or a snapshot."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name

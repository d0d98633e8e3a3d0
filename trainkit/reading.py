"""The one reader of files: bounded in bytes, values, depth and digits, whoever has written them and whatever broke.

A FIFO in the place of a file would be waited for without end, so files are opened without waiting, and only regular
ones are read. A sparse file of many gigabytes takes no space on a disk, so every reader says how much it takes. A log
that is a link to a key would show that key in a report, and send it with a copy of the run: a link is read only where
its reader says ``follow``, of files that the user names or has installed, and of data.
Records hold what JSON has and a person can read: numbers are finite and of a size that can be printed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from trainkit import terminal
from trainkit.errors import UserError

LARGEST = 1e18
"""Beyond it a number is a mistake, or a run that has diverged: like infinity it counts as none."""
LATEST = 1e11
"""Seconds since 1970, in the year 5138."""
LONGEST = 1 << 24
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


def read_bytes(path: Path, most: int = LONGEST, *, follow: bool = False) -> bytes:
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


def read_text(path: Path, most: int = LONGEST, *, follow: bool = False) -> str:
    """As `read_bytes`; what is no UTF-8 is replaced."""
    return read_bytes(path, most, follow=follow).decode(errors="replace")


def read_start(path: Path, first_bytes: int, *, follow: bool = False) -> str:
    """The text at the beginning of a file; what is no UTF-8 is replaced. Raises OSError."""
    with open_regular(path, follow=follow) as file:
        return file.read(first_bytes).decode(errors="replace")


def read_end(path: Path, last_bytes: int = LONGEST) -> str:
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

"""JSON lines: appended with one write, read to a bound, whatever a killed writer has left of the last line."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from trainkit.common import fileio, terminal
from trainkit.common.fileio import LARGEST, LATEST, LONGEST_LINE, MOST_JSONL_BYTES

_MOST_RECORDS = 100_000
"""Most records of such a file."""


def is_number(value: Any) -> TypeGuard[int | float]:
    """True if it is a number that can be computed with and printed, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: Any) -> TypeGuard[int]:
    """True if it is a count, of steps or ranks."""
    return type(value) is int and 0 <= value < 1 << 53


def is_time(value: Any) -> TypeGuard[int | float]:
    """True if it is a time of this age, in seconds since 1970."""
    return is_number(value) and 0 <= value <= LATEST


def plain(value: Any, depth: int = 4) -> Any:
    """A value of unknown meaning as it may be shown: numbers, lines of text, lists and mappings of these; or None."""
    if isinstance(value, str):
        return terminal.one_line(value, 2000)
    if isinstance(value, list) and depth:
        return [plain(item, depth - 1) for item in value[:1000]]
    if isinstance(value, dict) and depth:
        return {terminal.one_line(key): plain(item, depth - 1) for key, item in list(value.items())[:1000]}
    if isinstance(value, bool) or is_number(value):
        return value
    return None


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a JSON lines file, in a single write, so that records of several processes do not mix.

    A line that a killed process left torn is closed first, or it would swallow this record.
    """
    line = json.dumps(finite(record), default=str, allow_nan=False) + "\n"
    with fileio.append(path, path.parent) as out:
        size = os.fstat(out.fileno()).st_size
        if size and os.pread(out.fileno(), 1, size - 1) != b"\n":
            line = "\n" + line
        data = line.encode()
        if out.write(data) < len(data):  # the disk has become full; readers pass over a torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_jsonl(path: Path, holding: Sequence[bytes] = (), *, most: int = MOST_JSONL_BYTES) -> Iterator[dict[str, Any]]:
    """Read every whole record of a JSON lines file; nothing if there is no file. Torn lines are passed over.

    Args:
        holding: only lines that hold one of these, if there are any: most of a long file need not be parsed.
        most: bytes of the file; where it is more than `MOST_JSONL_BYTES`, the number of records is not limited.

    Raises UserError where there is something that cannot be read.
    """
    room = _MOST_RECORDS if most <= MOST_JSONL_BYTES else math.inf
    try:
        with fileio.open_regular(path) as file:
            fileio.require_size(file, most)
            for line in lines_of(file):
                if file.tell() > most:  # it may grow
                    return
                if holding and not any(map(line.__contains__, holding)):
                    continue
                record = fileio.parse_object(line)
                if record is not None:
                    yield record
                    room -= 1
                    if room < 0:
                        raise OSError(errno.EFBIG, f"It holds more than {_MOST_RECORDS:,} records")
    except FileNotFoundError:
        return
    except OSError as error:
        raise fileio.unreadable(path, error) from None


def last_records(path: Path) -> list[dict[str, Any]]:
    """The records at the end of a JSON lines file that others write; none where it cannot be read."""
    try:
        lines = fileio.read_end(path, 1 << 15).splitlines()
    except OSError:
        return []
    return list(filter(None, map(fileio.parse_object, lines)))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an open file; of one that is longer than any record only a beginning, which is none."""
    is_new = True
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        if is_new:
            yield line
        is_new = line.endswith(b"\n")


def finite(value: Any) -> Any:
    """``value`` as JSON can say it: a diverged loss, NaN or infinity, becomes None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

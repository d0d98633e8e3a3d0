"""JSON lines: one record a line, appended in one write, read leniently."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit.records import reading

LONGEST_LINE = 1 << 20
_BLOCK = 1 << 24
_HEAD = 1 << 16


class Thinned(NamedTuple):
    """Records of a file, and how many of its records each stands for."""

    records: list[dict[str, Any]]
    every: int


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record. The line goes out in a single write, so that records of several processes do not mix.

    A line that a killed process left torn is closed first, or it would swallow this record.
    """
    line = json.dumps(plain(record), default=str, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        data = line.encode()
        if os.write(descriptor, data) < len(data):  # the disk has become full; readers pass over a torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read(path: Path, holding: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    """Every whole record; nothing if there is no file. Torn lines are passed over.

    Args:
        holding: only lines that hold one of these, if there are any: most of a long file need not be parsed.

    Raises UserError where there is something that cannot be read.
    """
    try:
        with reading.open_regular(path) as file:
            whole = True  # a line without end is neither a record nor worth its memory
            while line := file.readline(LONGEST_LINE):
                is_wanted = whole and (not holding or any(part in line for part in holding))
                if is_wanted and (record := reading.parse_object(line)) is not None:
                    yield record
                whole = line.endswith(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise reading.unreadable(path, error) from None


def read_thinned(path: Path, most: int, always: Callable[[bytes], bool] = lambda line: False) -> Thinned:
    """Of an enormous file about ``most`` records, evenly spread, the last among them; of every other file all.

    Args:
        always: whether a line must not be left out; asked of each, so it must be quick.

    Raises UserError where there is something that cannot be read.
    """
    try:
        with reading.open_regular(path) as file:
            every = _every(file, most)
            found: list[bytes] = []
            rest, number, last = b"", 0, b""
            while block := file.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                if every == 1:
                    found += lines
                else:
                    found += [line for index, line in enumerate(lines, number) if index % every == 0 or always(line)]
                    number += len(lines)
                    last = lines[-1] if lines else last
                rest = rest if len(rest) < LONGEST_LINE else b""  # neither a record nor worth its memory
    except FileNotFoundError:
        return Thinned([], 1)
    except OSError as error:
        raise reading.unreadable(path, error) from None
    parsed = (reading.parse_object(line) for line in [*found, last, rest] if line)
    return Thinned([record for record in parsed if record is not None], every)


def _every(file: BinaryIO, most: int) -> int:
    """One of how many lines is to be read, by the length of the first ones."""
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
    file.seek(0)
    lines = size / max(len(head) / max(head.count(b"\n"), 1), 1)
    return max(1, round(lines / most))


def plain(value: Any) -> Any:
    """``value`` as JSON can say it: it has no NaN or infinity, and a diverged loss must not make a file unreadable."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

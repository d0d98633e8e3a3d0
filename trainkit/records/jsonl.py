"""JSON lines: one record a line, appended in one write, read leniently."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.records import reading

LONGEST_LINE = 1 << 20


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


def plain(value: Any) -> Any:
    """``value`` as JSON can say it: it has no NaN or infinity, and a diverged loss must not make a file unreadable."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

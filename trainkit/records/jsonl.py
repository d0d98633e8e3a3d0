"""JSON lines: one record a line, appended in one write, read leniently."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit import reading
from trainkit.records import files

LONGEST_LINE = 1 << 20
LONGEST = 1 << 26
"""Bytes of a file that is read whole: a hundred thousand saves, say. Measurements may be more, each reader says it."""
MOST = 100_000
"""Records of such a file."""
LONGEST_THINNED = 1 << 32
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


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record. The line goes out in a single write, so that records of several processes do not mix.

    A line that a killed process left torn is closed first, or it would swallow this record.
    """
    line = json.dumps(plain(record), default=str, allow_nan=False) + "\n"
    with files.append(path, path.parent) as out:
        size = os.fstat(out.fileno()).st_size
        if size and os.pread(out.fileno(), 1, size - 1) != b"\n":
            line = "\n" + line
        data = line.encode()
        if out.write(data) < len(data):  # the disk has become full; readers pass over a torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read(path: Path, holding: Sequence[bytes] = (), *, most: int = LONGEST) -> Iterator[dict[str, Any]]:
    """Every whole record; nothing if there is no file. Torn lines are passed over.

    Args:
        holding: only lines that hold one of these, if there are any: most of a long file need not be parsed.
        most: bytes of the file.

    Raises UserError where there is something that cannot be read.
    """
    try:
        with reading.open_regular(path) as file:
            reading.require_size(file, most)
            few, count, whole = most <= LONGEST, 0, True  # a line without end is neither a record nor worth its memory
            while (line := file.readline(LONGEST_LINE)) and (most := most - len(line)) >= 0:  # it may grow
                is_wanted = whole and (not holding or any(part in line for part in holding))
                if is_wanted and (record := reading.parse_object(line)) is not None:
                    yield record
                    count += 1
                    if few and count > MOST:
                        raise OSError(errno.EFBIG, f"It holds more than {MOST:,} records")
                whole = line.endswith(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise reading.unreadable(path, error) from None


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
        with reading.open_regular(path) as file:
            reading.require_size(file, LONGEST_THINNED)
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
        raise reading.unreadable(path, error) from None
    lines_of = ((place, line) for place, line in enumerate([*found, last, rest]) if 0 < len(line) < LONGEST_LINE)
    parsed = ((place, reading.parse_object(line)) for place, line in lines_of)
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


def plain(value: Any) -> Any:
    """``value`` as JSON can say it: it has no NaN or infinity, and a diverged loss must not make a file unreadable."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

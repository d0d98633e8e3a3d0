"""Read some of the records of an enormous JSON lines file: evenly spread ones, and the extremes between those."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from trainkit import fileio

MOST_BYTES = 1 << 32
"""Ten million records: the updates of a year."""
_BLOCK = 1 << 24
_HEAD = 1 << 16
_STRETCH = 10
"""Stretches whose extremes are kept are this many times as long as those that one record stands for."""


def thinned(
    path: Path, most: int, always: Callable[[bytes], bool] = lambda line: False, extremes_of: str = ""
) -> tuple[list[dict[str, Any]], int, frozenset[int]]:
    """About ``most`` records of an enormous file, evenly spread, the last among them; all records of any other file.

    With them: how many records of the file one stands for, and the places of those that stand for themselves alone.

    Args:
        always: whether a line must not be left out; called for each, so it must be quick.
        extremes_of: a key: the records with its largest and its smallest value in each stretch of lines are kept, and
            the first one whose value is no finite number.

    Raises UserError where there is something that cannot be read.
    """
    taken: list[bytes] = []
    outliers: set[int] = set()  # places in `taken`
    number, last, rest = 0, b"", b""
    try:
        with fileio.open_regular(path) as file:
            fileio.require_size(file, MOST_BYTES)
            every = _every(file, most)
            while block := file.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                even = {at for at, line in enumerate(lines, number) if at % every == 0 or always(line)}
                wanted = extremes_of.encode() if every > 1 else b""
                extremes = {number + at for at in _extremes(lines, wanted, _STRETCH * every)} if wanted else set()
                for place, at in enumerate(sorted(even | extremes), len(taken)):
                    taken.append(lines[at - number])
                    if at not in even:
                        outliers.add(place)
                number += len(lines)
                last = lines[-1] if lines and number - 1 not in even else b""
                rest = rest if len(rest) < fileio.LONGEST_LINE else b""  # neither a record nor worth its memory
    except FileNotFoundError:
        return [], 1, frozenset()
    except OSError as error:
        raise fileio.unreadable(path, error) from None
    lines_of = enumerate([*taken, last, rest])
    parsed = [(place, fileio.parse_object(line)) for place, line in lines_of if 0 < len(line) < fileio.LONGEST_LINE]
    whole = [(place, record) for place, record in parsed if record is not None]
    places = frozenset(at for at, (place, _) in enumerate(whole) if place in outliers)
    return [record for _, record in whole], every, places


def _extremes(lines: Sequence[bytes], key: bytes, stretch: int) -> set[int]:
    """Places of the lines with the smallest and the largest value of each stretch, and with the first that is no finite
    number."""
    value = re.compile(rb'"' + re.escape(key) + rb'": ([^,}]+)')
    found = [(at, _number(match[1])) for at, line in enumerate(lines) if (match := value.search(line))]
    places: set[int] = set()
    for begin in range(0, len(found), stretch):
        part = found[begin : begin + stretch]
        if not math.isfinite(sum(number for _, number in part)):
            places |= {at for at, number in [item for item in part if not math.isfinite(item[1])][:1]}
            part = [item for item in part if math.isfinite(item[1])]
        if part:
            places |= {min(part, key=itemgetter(1))[0], max(part, key=itemgetter(1))[0]}
    return places


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # null
        return math.nan


def _every(file: BinaryIO, most: int) -> int:
    """One of how many lines is to be read, by the length of the first ones."""
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
    file.seek(0)
    lines = size / max(len(head) / max(head.count(b"\n"), 1), 1)
    return max(1, round(lines / most))

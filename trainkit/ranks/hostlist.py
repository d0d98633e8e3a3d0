"""SLURM's compact lists: host names (``gpu[03-05,9],cpu1``) and task counts (``4(x2),3``)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from trainkit import terminal
from trainkit.errors import UserError

_MOST = 100_000
"""Hosts in one list; SLURM itself knows at most 65,533."""
_LONGEST = 1 << 20
"""Characters of a list."""
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")  # a comma inside brackets does not end an item
_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)  # the last one of a host name
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodelist: str) -> list[str]:
    """The host names of ``nodelist`` in its order, which is SLURM's order of nodes.

    ``rack[1-2]-n[03-04]`` is ``rack1-n03, rack1-n04, rack2-n03, rack2-n04``; leading zeros are kept.
    Raises UserError if it is empty, malformed, or longer than any machine's.
    """
    hosts: list[str] = []
    position = 0
    while position < len(nodelist) <= _LONGEST and len(hosts) <= _MOST:
        item = _ITEM.match(nodelist, position)
        if item is None:
            raise _malformed(nodelist)
        hosts += _expand_item(item.group(), nodelist)
        position = item.end()
        if position < len(nodelist):
            if nodelist[position] != "," or position + 1 == len(nodelist):
                raise _malformed(nodelist)
            position += 1
    if position < len(nodelist) or not 0 < len(hosts) <= _MOST:
        raise _malformed(nodelist)
    return hosts


def fold(hosts: Sequence[str]) -> str:
    """``hosts`` for people, in their order: three and more in a row are ``n[01-32]``."""
    rows: list[list[str]] = []
    for host in hosts:
        if rows and host == _next(rows[-1][-1]):
            rows[-1].append(host)
        else:
            rows.append([host])
    return ", ".join(_folded(row) if len(row) > 2 else ", ".join(row) for row in rows)


def _next(host: str) -> str | None:
    match = _NUMBER.fullmatch(host)
    return f"{match[1]}{int(match[2]) + 1:0{len(match[2])}}{match[3]}" if match is not None else None


def _folded(row: list[str]) -> str:
    first, last = (_NUMBER.fullmatch(host) for host in (row[0], row[-1]))
    assert first is not None
    assert last is not None
    return f"{first[1]}[{first[2]}-{last[2]}]{first[3]}"


def expand_counts(counts: str) -> list[int]:
    """SLURM_TASKS_PER_NODE, one number per node: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    numbers: list[int] = []
    for item in counts.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise UserError(
                f"Cannot read the tasks per node '{counts}'.",
                why="SLURM writes them like '4' or '2(x3),1'.",
                fix="Leave SLURM_TASKS_PER_NODE as SLURM sets it.",
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _expand_item(item: str, nodelist: str) -> Iterator[str]:
    # re.split with a group alternates text, bracket content, text, ...
    parts = re.split(r"\[([^\]]*)\]", item)
    choices = [[part] if i % 2 == 0 else _expand_ranges(part, nodelist) for i, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MOST:
        raise _malformed(nodelist)
    return map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", piece)
        if match is None:
            raise _malformed(nodelist)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise _malformed(nodelist)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _malformed(nodelist: str) -> UserError:
    return UserError(
        f"Cannot read the host list '{terminal.one_line(nodelist, 200)}'.",
        why="SLURM writes them like 'n1,n2' or 'gpu[03-05,9]'.",
        fix="Give host names, or a list that 'scontrol show hostnames' can read.",
    )

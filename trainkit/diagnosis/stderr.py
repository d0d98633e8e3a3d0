"""What a rank left in its stderr: its last traceback, our own three lines, the words of a crash, and the end of it.

Ranks write what they like there, for hours: progress bars, colours, bytes that are no text. Only the end is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit import reading, terminal

_LONGEST = 1 << 20
"""Bytes at the end of a log that are looked at. A traceback is not followed by more."""
_CHAIN = 1 << 16
"""Bytes before a traceback in which those may stand that led to it."""
_LONG = 4000
"""Characters of a line, at its end."""
_TAIL = 40
"""Lines at the end that may say why a rank was ended."""
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")  # of torch.distributed, and of torchrun's --tee
# A progress bar does not end its line, so what comes next is glued to it.
_GLUED = re.compile(r"^(?! *\|).*(?:[|%\])…]|\.\.\.) *(?=Traceback \(most recent call last\))")
_GROUP = re.compile(r"^[ |+]*\| ?")  # the frame that Python draws around the errors of an ExceptionGroup
_START = re.compile(r"^(?: |Original |  \+ Exception Group )?Traceback \(most recent call last\)")
_CAUSE = "The above exception was the direct cause of the following exception:"
_HANDLED = "During handling of the above exception, another exception occurred:"
# What others say while the process ends: torch's C++ log, warnings, srun, wandb, threads.
_OTHERS = re.compile(
    r"\[[WEI][\d ]|\S+: \w*Warning: |(srun|slurmstepd\S*|wandb|WARNING|INFO|ERROR)\b.*:|Exception ignored"
    r"|\[[^]]*\] error: "  # of slurmstepd in SLURM 25.11
)
_CRASH = re.compile(r"^(?:Fatal Python error: | *what\(\): +|FATAL: +)(.+)")  # of faulthandler, of C++, of apptainer

_AT = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OURS = ("/trainkit/", "/jobs/", "/site-packages/", "/dist-packages/", "<", "/lib/python", "/usr/lib/", ".pyx")
"""Parts of the names of files that no user can mend."""


@dataclass(frozen=True)
class Traceback:
    """A traceback, and those before it that led to it."""

    lines: tuple[str, ...]
    """All of them, from the first one's heading to the last one's error."""
    error: str
    """The exception's own line, with what it says below it if the line itself says nothing."""
    message: str
    """The exception's own lines: some say their reason below."""
    first: str
    """The error before all others of the chain; ``error`` itself where there is only one."""
    causes: str
    """The text from the first error on that this one was raised ``from``; what was only being handled is none."""


def text_of(path: Path) -> str:
    """The end of a rank's stderr as it wrote it; empty if it cannot be read."""
    try:
        return reading.read_end(path, _LONGEST)
    except OSError:
        return ""


def last_error(stderr: Path) -> str:
    """What a rank said last: its exception's own line, the first of our three lines, or how it crashed; or empty."""
    text = text_of(stderr)
    if found := _traceback(text):
        return found.error
    return (_three(text) or _crash(text) or ("",))[0]


def words_of(stderr: Path) -> tuple[str, ...]:
    """A rank's last traceback, the three lines of our last error, or those of a crash; empty if none is there."""
    text = text_of(stderr)
    found = _traceback(text)
    return found.lines if found is not None else _three(text) or _crash(text)


def crash_of(stderr: Path) -> tuple[str, ...]:
    """What faulthandler or C++ said of a crash in compiled code, the reason first; empty if they said nothing."""
    return _crash(text_of(stderr))


def traceback_of(stderr: Path) -> Traceback | None:
    """The last traceback that came to its end."""
    return _traceback(text_of(stderr))


def tail_of(stderr: Path) -> list[tuple[int, str]]:
    """The last lines of a rank's stderr, each with its number, counted from 1; 0 where a log is too long to count."""
    text = text_of(stderr)
    last = text.rstrip().rsplit("\n", _TAIL)[-_TAIL:]
    try:
        whole = stderr.stat().st_size <= _LONGEST
    except OSError:
        whole = False
    first = text.rstrip().count("\n") - len(last) + 2
    return [(first + index if whole else 0, _plain(line)) for index, line in enumerate(last)] if text.strip() else []


def _plain(line: str) -> str:
    """A line as a terminal would have left it standing, without what was put before it."""
    line = line.rstrip("\r").rpartition("\r")[2][-_LONG:].replace("\0", "")  # torch's workers end a message so
    if not (line.isascii() and line.isprintable()):
        line = terminal.lines(line)
    return _GLUED.sub("", _RANK_PREFIX.sub("", line))


def _traceback(text: str) -> Traceback | None:
    """The last one that came to its end, with its chain."""
    until = len(text)
    while (last := text.rfind("Traceback (most recent call last)", 0, until)) >= 0:
        begin = text.rfind("\n", 0, max(last - _CHAIN, 0)) + 1
        lines = [_plain(line) for line in text[begin : last + _CHAIN].split("\n")]
        at = text.count("\n", begin, last)
        if _START.match(lines[at]) or "| Traceback" in lines[at]:
            return _read(lines, at)  # None where it was cut off: an older one is not what ended the rank
        until = last  # it is a word in another line
    return None


def _read(lines: list[str], at: int) -> Traceback | None:
    """The traceback whose heading is line ``at``."""
    if "|" in lines[at] or "+" in lines[at]:
        at, lines = _first_of_group(lines, at)
    end = _end_of(lines, at)
    if end is None:
        return None
    starts = [at]
    while (before := _before(lines, starts[0])) is not None:
        starts.insert(0, before)
    error, message = _said(lines, end)
    causing = at
    for before, after in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if any(line.strip() == _HANDLED for line in lines[max(after - 3, 0) : after]):
            break
        causing = before
    first = _error_at(lines, starts[0]) or error
    return Traceback((*lines[starts[0] : end], error), error, message, first, "\n".join([*lines[causing:end], error]))


def _error_at(lines: list[str], at: int) -> str:
    """The error of the traceback, or of the group, that stands at a line."""
    if "+" in lines[at]:
        at, lines = _first_of_group(lines, at)
    end = _end_of(lines, at)
    return _said(lines, end)[0] if end is not None else ""


def _first_of_group(lines: list[str], at: int) -> tuple[int, list[str]]:
    """Of the errors of the ExceptionGroup that stands at a line, the first, as if it stood alone."""
    group = next((index for index in range(at, -1, -1) if "Exception Group Traceback" in lines[index]), at)
    inner = next((index for index in range(group, len(lines)) if "+-+---" in lines[index]), group) + 1
    last = next((index for index in range(inner, len(lines)) if "+----" in lines[index]), len(lines))
    own = [_GROUP.sub("", line) for line in lines[inner:last]]
    heading = [] if own[:1] and _START.match(own[0]) else ["Traceback (most recent call last):"]
    return group, [*lines[:group], *heading, *own, ""]


def _end_of(lines: list[str], at: int) -> int | None:
    """The line that names the exception: the first that is not set in."""
    for index in range(at + 1, len(lines)):
        if lines[index] and not lines[index][0].isspace():
            return index if index < len(lines) - 1 or ":" in lines[index] else None
    return None


def _before(lines: list[str], at: int) -> int | None:
    """The heading of the traceback that led to this one."""
    index = at - 1
    while index >= 0 and not lines[index].strip():
        index -= 1
    if index < 0:
        return None
    if not lines[at].startswith("Original") and lines[index].strip() not in (_CAUSE, _HANDLED):
        return None  # torch's DataLoader quotes a worker's traceback in its own error
    return next((above for above in range(index - 1, -1, -1) if _START.match(lines[above])), None)


def _said(lines: list[str], end: int) -> tuple[str, str]:
    """The exception's own line, and all that it says."""
    below = lines[end + 1 : end + 20]
    own = [lines[end]]
    for line in below:
        if (not line.strip() and own[-1].strip()[-1:] != ":") or _OTHERS.match(line):
            break
        own.append(line)
    rest = next((line.strip() for line in below if line.strip()), "")
    error = lines[end].rstrip()
    if error.endswith(":") and rest:
        error = f"{error} {rest}"
    return error, "\n".join(own if error == own[0].rstrip() else [error, *own])


def _three(text: str) -> tuple[str, ...]:
    at = text.rfind("\n  why: ")
    if at < 0:
        return ()
    begin = text.rfind("\n", 0, at) + 1
    return tuple(_plain(line) for line in text[begin:].split("\n", 3)[:3])


def _crash(text: str) -> tuple[str, ...]:
    """How it crashed in compiled code, and below it what faulthandler shows."""
    lines = [_plain(line) for line in text.rsplit("\n", 200)[-200:]]
    found = next(((index, match) for index, line in enumerate(lines) if (match := _CRASH.match(line))), None)
    if found is None:
        return ()
    index, match = found
    return (match[1].strip(), *lines[index:])[:60]


def places_of(lines: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """File and line of each frame of a traceback, outermost first; and those of them in code of the user's own."""
    places = [(match["file"], match["line"]) for text in lines if (match := _AT.match(text))]
    if any("most recent call first" in text for text in lines):  # as faulthandler has it
        places.reverse()
    return places, [place for place in places if not any(part in place[0] for part in _OURS)]


def raised_in_own_code(lines: Sequence[str]) -> bool:
    """Whether the innermost frame is the user's."""
    places, own = places_of(lines)
    return bool(own) and own[-1] == places[-1]

"""Log of a rank: the last traceback, error and lines at the end of its stderr.

Ranks write what they like to stderr, for hours: progress bars, colours, bytes that are no text. Only the end is read.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from trainkit.common import fileio, terminal
from trainkit.run.folder import RunDir

LONGEST = 1 << 20
"""Bytes at the end of a log that are read. No more than that follows a traceback."""
_CHAIN = 1 << 16
"""Bytes before a traceback in which those may stand that led to it."""
_LONG = 4000
"""Characters of a line that are kept, at its end."""
_TAIL = 40
"""Lines at the end that may say why a rank was ended, without those of tracebacks."""
_REACH = 2000
"""Lines among which these are looked for."""
_HEADING = "Traceback (most recent call last)"
_CAUSE = "The above exception was the direct cause of the following exception:"
_HANDLED = "During handling of the above exception, another exception occurred:"

_YAML: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
WORDS = {name: re.compile(one if isinstance(one, str) else "|".join(one)) for name, one in _YAML["patterns"].items()}
"""The patterns of ``words.yaml``, which says what each is for."""
CACHES: list[list[str]] = _YAML["caches"]


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
    """Words of this error and of all that it was raised ``from``; errors that were only being handled do not count."""


class RankLog:
    """The end of what a rank wrote to its stderr; empty if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        with contextlib.suppress(OSError):
            self.text = _without_boxes(fileio.read_end(path, LONGEST))

    @cached_property
    def traceback(self) -> Traceback | None:
        """The last complete traceback, with its chain."""
        until = len(self.text)
        while True:
            last = self.text.rfind(_HEADING, 0, until)
            if last < 0:
                return None
            begin = self.text.rfind("\n", 0, max(last - _CHAIN, 0)) + 1
            lines = _plain_lines(self.text[begin : last + _CHAIN])
            at = self.text.count("\n", begin, last)
            if "| Traceback" in lines[at] or "Exception Group Traceback" in lines[at]:  # its errors may have none
                lines = [WORDS["group"].sub("", line) for line in lines]
            is_ignored = at > 0 and WORDS["ignored"].match(lines[at - 1])
            if WORDS["traceback"].match(lines[at]) and not is_ignored:
                return _traceback(lines, at)  # None where it was cut off: an older one is not what ended the rank
            until = last  # it is a word in another line, or Python went on after it

    @property
    def _three_lines(self) -> tuple[str, ...]:
        """The three lines of our own last error."""
        at = self.text.rfind("\n  why: ")
        if at < 0:
            return ()
        begin = self.text.rfind("\n", 0, at) + 1
        return tuple(_plain_lines(self.text[begin:])[:3])

    @property
    def crash(self) -> tuple[str, ...]:
        """Words of faulthandler or C++ on a crash in compiled code, the reason first."""
        lines = _plain_lines(self.text)[-200:]
        for index, line in enumerate(lines):
            match = WORDS["crash"].match(line)
            if match:
                return (match[1].strip(), *lines[index:])[:60]
        return ()

    @property
    def words(self) -> tuple[str, ...]:
        """The last traceback, the three lines of our last error, or those of a crash."""
        if self.traceback is not None:
            return self.traceback.lines
        return self._three_lines or self.crash

    @property
    def error(self) -> str:
        """Its last error: an exception's own line, the first of our three lines, or the reason of a crash."""
        if self.traceback is not None:
            return self.traceback.error
        return next(iter(self.words), "")

    @property
    def tail(self) -> list[tuple[int, str]]:
        """The last lines with their numbers from 1; 0 where a log is too long to count."""
        if not self.text.strip():
            return []
        lines = self.text.rstrip().split("\n")
        begin = len(lines)
        counted = 0
        while begin > max(len(lines) - _REACH, 0) and counted < _TAIL:
            begin -= 1
            if not WORDS["of-stack"].match(lines[begin]):
                counted += 1
        numbers: Iterator[int] = itertools.count(begin + 1)
        if os.path.getsize(self.path) > LONGEST:
            numbers = itertools.repeat(0)
        return list(zip(numbers, map(plain_line, lines[begin:]), strict=False))


def rank_log(run: RunDir, attempt: int, rank: int) -> RankLog:
    return RankLog(run.attempt_logs(attempt) / f"rank-{rank}.err")


def places_of(lines: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """File and line of each frame of a traceback, outermost first; and those of them in code of the user's own."""
    frames = filter(None, map(WORDS["frame"].match, lines))
    places = [(frame["file"], frame["line"]) for frame in frames]
    if "most recent call first" in "\n".join(lines):  # as faulthandler has it
        places.reverse()
    return places, [place for place in places if not WORDS["not-mendable"].search(place[0])]


def is_lost_connection(error: str) -> bool:
    """True if a rank failed because another went away: a consequence, not a cause."""
    return WORDS["lost-connection"].search(error) is not None and WORDS["own-fault"].search(error) is None


# Lines


def plain_line(line: str) -> str:
    """A line as a terminal shows it, without a rank's prefix."""
    line = line.rstrip("\r").rpartition("\r")[2][-_LONG:].replace("\0", "")  # torch's workers end a message so
    if not (line.isascii() and line.isprintable()):
        line = terminal.lines(line)
    return WORDS["glued"].sub("", WORDS["rank-prefix"].sub("", line))


def _plain_lines(text: str) -> list[str]:
    return list(map(plain_line, text.split("\n")))


def _without_boxes(text: str) -> str:
    """The text with the tracebacks that the package rich draws as Python prints them; each line keeps its number.

    Rich breaks the error below the box as wide as the box is.
    """
    if WORDS["boxed"].search(text) is None:
        return text
    lines = text.split("\n")
    width = 0
    for index, line in enumerate(lines):
        heading = WORDS["boxed"].search(line)
        if heading:
            width = len(heading[0])
            lines[index] = f"{_HEADING}:"
        elif width:
            lines[index] = _unboxed(line)
            if "╰─" in line:
                _join(lines, index + 1, width)
                width = 0
    return "\n".join(lines)


def _unboxed(line: str) -> str:
    """A line of rich's box as Python prints it; empty for one that is no frame."""
    frame = WORDS["boxed-frame"].match(line)
    if frame:
        return f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}'
    code = WORDS["boxed-code"].match(line)
    if code:
        return f"    {code['code'].replace('│', ' ').strip()}"
    return ""


def _join(lines: list[str], begin: int, width: int) -> None:
    """Put the words of a message that was broken at a width into its first line, and leave the others empty."""
    last = begin
    while last + 1 < len(lines) and lines[last + 1].strip():
        word = lines[last + 1].split()[0]
        if len(lines[last].rstrip()) + 1 + len(word) < width - 4:  # the terminal may be a little narrower
            break
        last += 1
    if last > begin:
        lines[begin] = " ".join(map(str.strip, lines[begin : last + 1]))
        lines[begin + 1 : last + 1] = [""] * (last - begin)


# Tracebacks


def _traceback(lines: list[str], at: int) -> Traceback | None:
    """The traceback whose heading is line ``at``."""
    end = _end_of(lines, at)
    if end is None:
        return None
    starts = [at]  # the headings of the chain, the last one first
    before = _before(lines, at)
    while before is not None:
        starts.append(before)
        before = _before(lines, before)
    error, message = _said(lines, end)
    causes = [message]
    for after, before in itertools.pairwise(starts):
        is_handled = _HANDLED in map(str.strip, lines[max(after - 3, 0) : after])
        if is_handled and not WORDS["points-elsewhere"].search(error):
            break
        end_before = _end_of(lines, before)
        if end_before is not None:
            causes += lines[end_before:after]
    first = error
    first_end = _end_of(lines, starts[-1])
    if first_end is not None:
        first = _said(lines, first_end)[0]
    return Traceback((*lines[starts[-1] : end], error), error, message, first, "\n".join(causes))


def _end_of(lines: list[str], at: int) -> int | None:
    """The line that names the exception: the first that is not set in."""
    for index in range(at + 1, len(lines)):
        line = lines[index]
        if line and not line[0].isspace():
            if index < len(lines) - 1 or ":" in line:
                return index
            break  # it was cut off
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
    for above in range(index - 1, -1, -1):
        if WORDS["traceback"].match(lines[above]):
            return above
    return None


def _said(lines: list[str], end: int) -> tuple[str, str]:
    """The exception's own line, and all that it says."""
    below = lines[end + 1 : end + 20]
    own = [lines[end]]
    for line in below:
        is_over = not line.strip() and not own[-1].strip().endswith(":")
        if is_over or WORDS["others"].match(line):
            break
        own.append(line)
    error = lines[end].rstrip()
    rest = "\n".join(below).strip().partition("\n")[0].strip()
    if error.endswith(":") and rest:
        error = f"{error} {rest}"
        own.insert(0, error)
    return error, "\n".join(own)

"""What a report is made of: sections of text, tables and charts, which `write_html` and `write_markdown` write.

All text in them is plain, and a run may be a stranger's: the writers escape it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainkit import fileio
from trainkit.report.charts import Picture
from trainkit.report.facts import Facts

Row = tuple[str, ...]
TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "–"  # noqa: RUF001  an en dash: a value that this run does not have
MEASURE = ("measure", "value")


class Code(str):
    """A command, a path or an output: shown as it is typed."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """A table, or nothing where it has no rows. Columns from ``numbers_from`` on are numbers."""

    header: Row
    rows: Sequence[Row]
    numbers_from: int = 99
    caption: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Charts:
    """Charts side by side; in the log book they are one file of that name."""

    name: str
    pictures: Sequence[Picture | None]
    title: str = ""
    """What they show, in a few words."""
    legend: Sequence[tuple[str, int]] = ()
    """(name, colour) of runs or parts."""
    wide: bool = False
    """One below the other."""

    def __bool__(self) -> bool:
        return any(self.pictures)


class Text(NamedTuple):
    """A paragraph; of its words those that are `Code` are shown as such."""

    words: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list."""

    lines: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.lines)


class Block(NamedTuple):
    """Lines of code or output."""

    text: str
    caption: str = ""


class Heading(NamedTuple):
    """A line above parts that belong together."""

    text: str


class Fold(NamedTuple):
    """Parts that a page shows on request."""

    title: str
    parts: Sequence[Part]


class Photo(NamedTuple):
    """A small image with what it is and what the model took it for."""

    png: str
    """In base64."""
    label: str
    told: str
    confidence: float
    is_large: bool = False


class Gallery(NamedTuple):
    """Images side by side."""

    photos: Sequence[Photo]


Part = Table | Charts | Text | Items | Block | Heading | Fold | Gallery


@dataclass(frozen=True)
class Section:
    """A part of the report; left out where it has no parts."""

    name: str
    """For links."""
    title: str
    parts: Sequence[Part]
    note: str = ""


def of_each(name: str, title: str, parts_of: Callable[[Facts], Iterable[Part]]) -> Callable[[Sequence[Facts]], Section]:
    """A section with the parts of each run, under its label where there are several."""

    def section(runs: Sequence[Facts]) -> Section:
        found: list[Part] = []
        for facts in runs:
            parts = [part for part in parts_of(facts) if part]
            found += [Heading(facts.label)] * (len(runs) > 1 and bool(parts)) + parts
        return Section(name, title, found)

    return section


def text(value: Any) -> str:
    """Any value, or a dash for None."""
    return NONE if value is None else str(value)


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec`` with its unit, or a dash."""
    return format(value, spec) + unit if fileio.is_number(value) else NONE


def duration(seconds: float | None) -> str:
    """``40 ms``, ``12.3 s``, ``4 min 05 s``, ``1 h 30 min``."""
    if seconds is None or not fileio.is_number(seconds):
        return NONE
    if 0 < seconds < 0.05:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"


def rate(images_per_sec: float | None) -> str:
    """Images a second, with decimals for slow runs: ``2,010``, ``10.5``, ``0.42``."""
    speed = images_per_sec or 0.0
    return number(images_per_sec, ",.0f" if speed >= 20 else ".1f" if speed >= 2 else ".2g")


def memory(mb: Any) -> str:
    """Megabytes as ``812 MB`` or ``15.2 GB``."""
    return number(mb, ",.0f", " MB") if not fileio.is_number(mb) or mb < 1024 else f"{mb / 1024:,.1f} GB"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'s' * (count != 1)}"

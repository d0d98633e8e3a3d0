"""Parts of a report: sections with text, tables, charts and images.

All text in them is plain, and a run may be a stranger's: the templates escape it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trainkit.common.markdown import markdown_table
from trainkit.report.charts import Picture
from trainkit.report.facts import Facts

ReportRow = tuple[str, ...]
MEASURE = ("measure", "value")


class Table(NamedTuple):
    """A table, or nothing where it has no rows. Columns from ``numbers_from`` on are numbers."""

    header: ReportRow
    rows: Sequence[ReportRow]
    numbers_from: int = 99
    caption: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def markdown(self) -> str:
        """The table as GitHub and GitLab show it."""
        return markdown_table(self.header, self.rows, numbers_from=self.numbers_from)


class Charts(NamedTuple):
    """Charts side by side, or one below the other if ``wide``; in the log book they are one file of that name."""

    name: str
    pictures: Sequence[Picture | None]
    title: str = ""
    """A few words on what they show."""
    legend: Sequence[tuple[str, int]] = ()
    """(name, colour) of runs or parts."""
    wide: bool = False

    def __bool__(self) -> bool:
        return any(self.pictures)


class Items(NamedTuple):
    """A list; of the words of a line those that are `Code` are shown as such."""

    lines: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.lines)


class Text(NamedTuple):
    """A paragraph, of words as in `Items`."""

    words: Sequence[str]


class Block(NamedTuple):
    """Lines of code or output."""

    text: str


class Heading(NamedTuple):
    """A line above parts that belong together."""

    text: str


class Fold(NamedTuple):
    """Parts that a page shows on request."""

    title: str
    parts: Sequence[Part]


class Gallery(NamedTuple):
    """Small images, each a PNG in base64, side by side; the table says what each is, and what it was taken for."""

    pngs: Sequence[str]
    table: Table


Part = Table | Charts | Text | Items | Block | Heading | Fold | Gallery


class ReportSection(NamedTuple):
    """A part of the report, with its name for links; left out where it has no parts."""

    name: str
    title: str
    parts: Sequence[Part]
    note: str = ""

    def __bool__(self) -> bool:
        return any(self.parts)


def of_each(
    name: str, title: str, parts_of: Callable[[Facts], Iterable[Part]]
) -> Callable[[Sequence[Facts]], ReportSection]:
    """A section with the parts of each run, under its label where there are several."""

    def section(runs: Sequence[Facts]) -> ReportSection:
        whole: list[Part] = []
        for facts in runs:
            parts = [part for part in parts_of(facts) if part]
            if parts and len(runs) > 1:
                whole.append(Heading(facts.label))
            whole += parts
        return ReportSection(name, title, whole)

    return section

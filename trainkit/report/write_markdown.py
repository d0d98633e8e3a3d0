"""The log book: ``logbook.md`` with its charts beside it as SVG, ready to be committed or handed in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report.charts import COLOURS, drawing
from trainkit.report.comparison import MOST_DRAWN, comparison_table, outcome, sweep_tables
from trainkit.report.document import Block, Charts, Code, Fold, Heading, Items, Part, Section, Table, Text
from trainkit.report.facts import Facts
from trainkit.report.figures import curves
from trainkit.report.sections import SEVERAL, headline, of_runs, of_several
from trainkit.run.folder import run_at

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
MARK = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"


@dataclass(frozen=True)
class _Book:
    """A log book that is being written."""

    out: Path
    written: list[Path] = field(default_factory=list)

    def section(self, section: Section, heading: str, slug: str = "") -> str:
        """A section as Markdown; its charts are drawn into files, unless ``slug`` is "-"."""
        parts = [self._part(part, heading, slug) for part in section.parts if part]
        note = terminal.literal(section.note) if section.note else ""
        return "\n\n".join([f"{heading} {section.title}", *filter(None, [note, *parts])]) if any(parts) else ""

    def comparison(self, runs: Sequence[Facts]) -> list[str]:
        """The sections that set runs against each other, and their curves."""
        sections = [section(runs) for section in SEVERAL]
        return [self.section(section, "##") for section in (*sections, curves(runs[:MOST_DRAWN]))]

    def run(self, facts: Facts, title: str, heading: str, slug: str) -> list[str]:
        """The sections on one run."""
        started = next((e["time"] for e in facts.events if e.get("event") == "started" and "time" in e), None)
        when = f" Started {datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M %Z}." if started else ""
        told, alarm = headline(facts)
        alarm = f" **{terminal.literal(alarm)}**" if alarm else ""
        sections = [self.section(section, heading, slug) for section in of_runs([facts])]
        return [f"{title}{terminal.literal(facts.label)}", f"{terminal.literal(told)}{alarm}{when}", *sections]

    def slug(self, label: str) -> str:
        """A run's name for its files; of two that would be alike, each has its own."""
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:_LONGEST_SLUG].strip("-.") or "run"
        taken = {path.name.rpartition("-")[0] for path in self.written}
        return next(name for n in itertools.count(1) if (name := f"{slug}-{n}" if n > 1 else slug) not in taken)

    def _part(self, part: Part, heading: str, slug: str) -> str:
        if isinstance(part, Table):
            name = f"{terminal.literal(part.caption)}:\n\n" if part.caption else ""
            return name + _table(part)
        if isinstance(part, Charts):
            return "" if slug == "-" else self._charts(part, slug)
        if isinstance(part, Items):
            return "\n".join(f"- {_words(line)}" for line in part.lines)
        if isinstance(part, Text):
            return _words(part.words)
        if isinstance(part, Block):
            return terminal.block(part.text)
        if isinstance(part, Heading):
            return f"{heading}# {terminal.literal(part.text)}"
        if isinstance(part, Fold):
            inner = [self._part(item, heading, slug) for item in part.parts if item]
            return "\n\n".join([f"{terminal.literal(part.title)}:", *inner])
        rows = [(photo.label, photo.told, f"{100 * photo.confidence:.1f} %") for photo in part.photos]
        return _table(Table(("class", "taken for", "sure"), rows, 2))

    def _charts(self, part: Charts, slug: str) -> str:
        path = self.out / (f"{slug}-{part.name}.svg" if slug else f"{part.name}.svg")
        text = drawing(part.pictures, legend=part.legend, columns=1 if part.wide else 2)
        fileio.write(path, text.encode(errors="replace"), run_at(self.out))
        self.written.append(path)
        return f"![{terminal.literal(part.title)}]({path.name})"

    def write(self, name: str, parts: Sequence[str]) -> list[Path]:
        path = self.out / name
        fileio.write(path, "\n\n".join([MARK, *filter(None, parts)]) + "\n", run_at(self.out))
        return [path, *self.written]


def write_logbook(runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its charts; the paths of what was written, the log book first.

    Works for runs that are going on, were interrupted or lack files: the log book says what is missing.

    Raises:
        UserError: no metrics in any of the runs; ``out`` cannot be written; a ``logbook.md`` there is somebody else's.
    """
    _require_something(runs)
    book = _Book(out)
    with written_to(out / "logbook.md"):
        if len(runs) == 1:
            return book.write("logbook.md", book.run(runs[0], "# Log book: ", "##", book.slug(runs[0].label)))
        parts = [f"# Log book of {len(runs)} runs", *book.comparison(runs)]
        if rest := runs[MOST_DRAWN:]:
            one = terminal.code(terminal.command("report", rest[0].run_dir.path))
            parts.append(f"Here are pictures of the first {MOST_DRAWN}; every other has its own by {one}.")
        for number, facts in enumerate(runs):
            parts += book.run(facts, "## ", "###", book.slug(facts.label) if number < MOST_DRAWN else "-")
        return book.write("logbook.md", parts)


def write_sweep(sweep: Path, runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` of a sweep: its results, the best first, and the log books of the best runs.

    Raises UserError where it cannot be written.
    """
    found = sorted(runs, key=lambda facts: facts.rank)
    best, book = found[:COLOURS], _Book(out)
    with written_to(out / "logbook.md"):
        parts = [f"# Log book of the sweep {terminal.literal(terminal.one_line(sweep.name))}"]
        parts += [terminal.literal(" ".join(outcome(found)))]
        parts += [book.section(section, "##") for section in (*of_several(found), curves(best))]
        if rest := found[COLOURS:]:
            one = terminal.code(terminal.command("report", rest[0].run_dir.path))
            parts.append(f"Here are the best {len(best)} of them; every other has its log book by {one}.")
        for facts in best:
            parts += book.run(facts, "## ", "###", book.slug(facts.label))
        return book.write("logbook.md", parts)


def write_comparison(runs: Sequence[Facts], out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its charts; its table, and the paths.

    Raises UserError as `write_logbook` does.
    """
    _require_something(runs)
    book = _Book(out)
    with written_to(out / "comparison.md"):
        return _table(comparison_table(runs)), book.write("comparison.md", book.comparison(runs))


def write_results(runs: Sequence[Facts], out: Path) -> str:
    """Write ``out/results.md``, the table of a sweep; its text.

    Raises UserError where it cannot be written.
    """
    text = "\n\n".join(map(_table, sweep_tables(sorted(runs, key=lambda facts: facts.rank)))) + "\n"
    with written_to(out / RESULTS) as path:
        fileio.write(path, text, run_at(out))
    return text


def _table(part: Table) -> str:
    return terminal.markdown_table(part.header, part.rows, numbers_from=part.numbers_from)


def _words(words: Sequence[str]) -> str:
    return "".join(terminal.code(word) if isinstance(word, Code) else terminal.literal(word) for word in words)


def _require_something(found: Sequence[Facts]) -> None:
    """Raises UserError where none of the runs has begun."""
    if not any(facts.train or facts.val or facts.test or facts.started("world_size") for facts in found):
        raise UserError(
            f"Nothing to report on in {', '.join(facts.label for facts in found)}.",
            why="No training has begun: there are neither metrics nor a start.",
            fix=f"Ask what keeps it: `{terminal.command('why', found[0].run_dir.path)}`.",
        )


@contextmanager
def written_to(path: Path) -> Iterator[Path]:
    """Its folder is made. Raises UserError where it cannot be written, or would replace what somebody else wrote."""
    try:
        fileio.make_folder(path.parent)
        marked = path.name in ("logbook.md", "comparison.md", "report.html")
        if marked and path.is_file() and not path.is_symlink() and _BY not in fileio.read_start(path, 400):
            raise UserError(
                f"{path} was not written by this command.",
                why="It would be replaced.",
                fix="Choose another folder with --out FOLDER, or move that file away.",
            )
        yield path
    except OSError as error:
        raise UserError(
            f"Cannot write {path}.",
            why=f"{error.strerror}: {error.filename}",
            fix="Choose another folder with --out FOLDER.",
        ) from None

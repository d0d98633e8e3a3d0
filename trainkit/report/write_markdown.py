"""The log book: ``logbook.md`` with its charts beside it as SVG, ready to be committed or handed in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report import document as doc
from trainkit.report.charts import COLOURS, drawing
from trainkit.report.comparison import MOST_DRAWN, comparison_table, outcome, sweep_tables
from trainkit.report.facts import Facts
from trainkit.report.figures import curves
from trainkit.report.sections import SEVERAL, headline, of_runs, of_several
from trainkit.run.folder import run_at

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
MARK = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"


def write_logbook(runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its charts; the paths of what was written, the log book first.

    Works for runs that are going on, were interrupted or lack files: the log book says what is missing.

    Raises:
        UserError: no metrics in any of the runs; ``out`` cannot be written; a ``logbook.md`` there is somebody else's.
    """
    _require_something(runs)
    with written_to(out / "logbook.md"):
        book = _Book(out)
        if len(runs) == 1:
            book.run(runs[0], "# Log book: ", "##", draw=True)
            return book.write("logbook.md")
        book.lines.append(f"# Log book of {len(runs)} runs")
        book.compare(runs)
        if rest := runs[MOST_DRAWN:]:
            one = terminal.code(terminal.command("report", rest[0].run_dir.path))
            book.lines.append(f"Here are pictures of the first {MOST_DRAWN}; every other has its own by {one}.")
        for number, facts in enumerate(runs):
            book.run(facts, "## ", "###", draw=number < MOST_DRAWN)
        return book.write("logbook.md")


def write_sweep(sweep: Path, runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` of a sweep: its results, the best first, and the log books of the best runs.

    Raises UserError where it cannot be written.
    """
    found = sorted(runs, key=lambda facts: facts.rank)
    with written_to(out / "logbook.md"):
        book = _Book(out)
        name = terminal.literal(terminal.one_line(sweep.name))
        book.lines += [f"# Log book of the sweep {name}", terminal.literal(" ".join(outcome(found)))]
        for section in (*of_several(found), curves(found[:COLOURS])):
            book.section(section, "##")
        if rest := found[COLOURS:]:
            one = terminal.code(terminal.command("report", rest[0].run_dir.path))
            book.lines.append(f"Here are the best {COLOURS} of them; every other has its log book by {one}.")
        for facts in found[:COLOURS]:
            book.run(facts, "## ", "###", draw=True)
        return book.write("logbook.md")


def write_comparison(runs: Sequence[Facts], out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its charts; its table, and the paths.

    Raises UserError as `write_logbook` does.
    """
    _require_something(runs)
    with written_to(out / "comparison.md"):
        book = _Book(out)
        book.compare(runs)
        return _table(comparison_table(runs)), book.write("comparison.md")


def write_results(runs: Sequence[Facts], out: Path) -> str:
    """Write ``out/results.md``, the table of a sweep; its text.

    Raises UserError where it cannot be written.
    """
    text = "\n\n".join(map(_table, sweep_tables(sorted(runs, key=lambda facts: facts.rank)))) + "\n"
    with written_to(out / RESULTS) as path:
        fileio.write(path, text, run_at(out))
    return text


class _Book:
    """A file in Markdown that is being written, with the charts beside it that are written already."""

    def __init__(self, out: Path) -> None:
        self.out, self.lines, self.written = out, [MARK], list[Path]()

    def write(self, name: str) -> list[Path]:
        """Write it; its path, and those of the charts."""
        fileio.write(self.out / name, "\n\n".join(filter(None, self.lines)) + "\n", run_at(self.out))
        return [self.out / name, *self.written]

    def compare(self, runs: Sequence[Facts]) -> None:
        """The sections that set runs against each other, and their curves."""
        for section in [*(section(runs) for section in SEVERAL), curves(runs[:MOST_DRAWN])]:
            self.section(section, "##")

    def run(self, facts: Facts, title: str, heading: str, *, draw: bool) -> None:
        """The sections on one run. Its charts have names of their own, also where two runs' would be alike."""
        started = next((e["time"] for e in facts.events if e.get("event") == "started" and "time" in e), None)
        when = f" Started {datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M %Z}." if started else ""
        told, alarm = headline(facts)
        alarm = f" **{terminal.literal(alarm)}**" if alarm else ""
        self.lines += [f"{title}{terminal.literal(facts.label)}", f"{terminal.literal(told)}{alarm}{when}"]
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", facts.label)[:_LONGEST_SLUG].strip("-.") or "run"
        taken = {path.name.rpartition("-")[0] for path in self.written}
        own = next(name for n in itertools.count(1) if (name := f"{slug}-{n}" if n > 1 else slug) not in taken)
        for section in of_runs([facts]):
            self.section(section, heading, f"{own}-" if draw else None)

    def section(self, section: doc.Section, heading: str, prefix: str | None = "") -> None:
        """A section, unless it is empty; ``prefix``: of the names of its charts, which None leaves out."""
        parts = [self._part(part, heading, prefix) for part in section.parts if part]
        if any(parts):
            self.lines += [f"{heading} {section.title}", terminal.literal(section.note), *parts]

    def _part(self, part: doc.Part, heading: str, prefix: str | None) -> str:
        if isinstance(part, doc.Table):
            return (f"{terminal.literal(part.caption)}:\n\n" if part.caption else "") + _table(part)
        if isinstance(part, doc.Charts):
            return "" if prefix is None else self._charts(part, self.out / f"{prefix}{part.name}.svg")
        if isinstance(part, doc.Items):
            return "\n".join(f"- {_words(line)}" for line in part.lines)
        if isinstance(part, doc.Text):
            return _words(part.words)
        if isinstance(part, doc.Block):
            return terminal.block(part.text)
        if isinstance(part, doc.Heading):
            return f"{heading}# {terminal.literal(part.text)}"
        if isinstance(part, doc.Fold):
            inner = [self._part(item, heading, prefix) for item in part.parts if item]
            return "\n\n".join([f"{terminal.literal(part.title)}:", *inner])
        rows = [(photo.label, photo.told, f"{100 * photo.confidence:.1f} %") for photo in part.photos]
        return _table(doc.Table(("class", "taken for", "sure"), rows, 2))

    def _charts(self, part: doc.Charts, path: Path) -> str:
        text = drawing(part.pictures, legend=part.legend, columns=1 if part.wide else 2)
        fileio.write(path, text.encode(errors="replace"), run_at(self.out))
        self.written.append(path)
        return f"![{terminal.literal(part.title)}]({path.name})"


def _table(part: doc.Table) -> str:
    return terminal.markdown_table(part.header, part.rows, numbers_from=part.numbers_from)


def _words(words: Sequence[str]) -> str:
    return "".join(terminal.code(word) if isinstance(word, doc.Code) else terminal.literal(word) for word in words)


def _require_something(found: Sequence[Facts]) -> None:
    """Raises UserError where none of the runs has begun."""
    if not any(facts.begun or facts.test for facts in found):
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

"""Write a report: as a page of HTML, and as a log book in Markdown with its charts beside it.

Works for runs that are going on, were interrupted or lack files: the report says what is missing. Each function raises
UserError where it cannot write, or where a file of its name is somebody else's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report import document as doc
from trainkit.report.comparison import comparison, comparison_table, outcome, sweep_tables
from trainkit.report.document import COLOURS, NONE, duration, memory, number, rate, text
from trainkit.report.facts import Facts
from trainkit.report.figures import curves
from trainkit.report.sections import headline, is_sweep, of_runs, of_several
from trainkit.run.folder import run_at

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
_LONG = 60
"""Letters from which on a cell is broken into lines: one long name would push the other columns off the page."""
_MOST_LINES = 12


class _Report(NamedTuple):
    """What page and log book hold."""

    title: str
    lead: list[tuple[str, str]]
    """Paragraphs, each with an alarm or none."""
    sections: list[doc.Section]


def _report(runs: Sequence[Facts]) -> _Report:
    """Of one run, of several against the first, or of a sweep with the best run first."""
    if not is_sweep(runs):
        title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
        lead = [_lead(facts, name=len(runs) > 1) for facts in runs[:_MOST_LINES]]
        return _Report(title, lead, [*of_several(runs), *of_runs(runs)])
    ranked = sorted(runs, key=lambda facts: facts.rank)
    sentences = outcome(ranked)
    if len(runs) > COLOURS:
        sentences.append(f"Below the results are the best {COLOURS} of them.")
    title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {len(runs)} runs"
    sections = [*of_several(ranked), *of_runs(ranked[:COLOURS])]
    return _Report(title, [(sentence, "") for sentence in sentences], sections)


def _lead(facts: Facts, *, name: bool) -> tuple[str, str]:
    """What a run trains and how far it came, after its label if it is to have its name; and an alarm or none."""
    settings = [facts.setting(f"{section}.name") for section in ("model", "data", "strategy")]
    about = ", ".join(str(setting) for setting in settings if setting)
    words, alarm = headline(facts)
    if about:
        words = f"{about}. {words}"
    return f"{facts.label}: {words}" if name else words, alarm


def write_logbook(runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its charts; the paths, the log book first. Refused where no run has begun."""
    report = _report(runs)
    if not is_sweep(runs):
        _require_something(runs)
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", runs[0].label)[:_LONGEST_SLUG].strip("-.") or "run"
    with _book(out, "logbook.md", f"{slug}-" if len(runs) == 1 else "") as book:
        book.lines.append(f"# Log book: {terminal.literal(report.title)}")
        for words, alarm in report.lead:
            book.lines.append(terminal.literal(words) + (f" **{terminal.literal(alarm)}**" if alarm else ""))
        book.write(report.sections)
    return book.written


def write_comparison(runs: Sequence[Facts], out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its charts; its table, and the paths."""
    _require_something(runs)
    with _book(out, "comparison.md") as book:
        book.write([comparison(runs), curves(runs)])
    return _table(comparison_table(runs)), book.written


def write_results(runs: Sequence[Facts], out: Path) -> str:
    """Write ``out/results.md``, the table of a sweep; its text."""
    text = "\n\n".join(map(_table, sweep_tables(sorted(runs, key=lambda facts: facts.rank)))) + "\n"
    with written_to(out / RESULTS) as path:
        fileio.write(path, text, run_at(out))
    return text


@contextmanager
def _book(out: Path, name: str, prefix: str = "") -> Iterator[_Book]:
    """A file in Markdown, which is written at the end; ``prefix``: of the names of its charts."""
    with written_to(out / name) as path:
        book = _Book(out, prefix)
        yield book
        fileio.write(path, "\n\n".join(filter(None, book.lines)) + "\n", run_at(out))
        book.written.insert(0, path)


class _Book:
    """The text of a file in Markdown, and the files that are written already: the charts beside it."""

    def __init__(self, out: Path, prefix: str) -> None:
        self.out, self.prefix, self.written = out, prefix, list[Path]()
        self._drawn = Counter[str]()
        self.lines = [f"{_BY}. A new report replaces this file: copy it before you edit it. -->"]

    def write(self, sections: Iterable[doc.Section]) -> None:
        """Add the sections that are not empty."""
        for section in sections:
            parts = [self._part(part) for part in section.parts if part]
            if any(parts):
                self.lines += [f"## {section.title}", terminal.literal(section.note), *parts]

    def _part(self, part: doc.Part) -> str:
        match part:
            case doc.Table():
                caption = f"{terminal.literal(part.caption)}:\n\n" if part.caption else ""
                return caption + _table(part)
            case doc.Charts(name, pictures, title, legend, wide):
                self._drawn[name] += 1  # each run may have a chart of that name
                number = f"-{self._drawn[name]}" if self._drawn[name] > 1 else ""
                path = self.out / f"{self.prefix}{name}{number}.svg"
                svg = doc.drawing(pictures, legend=legend, columns=1 if wide else 2)
                fileio.write(path, svg.encode(errors="replace"), run_at(self.out))
                self.written.append(path)
                return f"![{terminal.literal(title)}]({path.name})"
            case doc.Items(lines):
                return "\n".join(f"- {_words(line)}" for line in lines)
            case doc.Text(words):
                return _words(words)
            case doc.Block(text):
                return terminal.block(text)
            case doc.Heading(text):
                return f"### {terminal.literal(text)}"
            case doc.Fold(title, parts):
                inner = [self._part(item) for item in parts if item]
                return "\n\n".join([f"{terminal.literal(title)}:", *inner])
            case doc.Gallery(photos):
                rows = [(photo.label, photo.told, photo.sure) for photo in photos]
                return _table(doc.Table(("class", "taken for", "sure"), rows, 2))


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


def write_page(runs: Sequence[Facts], out: Path) -> Path:
    """Write ``out/report.html``, one file that shows one run or compares several; its path."""
    with written_to(out / "report.html") as path:
        fileio.write(path, _page(runs).encode(errors="replace"), run_at(out))
    return path


def _page(runs: Sequence[Facts]) -> str:
    report, here = _report(runs), Path(__file__).parent
    template, style, script = (fileio.read_text(here / f"page.{kind}", follow=True) for kind in ("html", "css", "js"))
    style += doc.STYLE
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.tests["code"] = lambda word: isinstance(word, doc.Code)
    return environment.from_string(template).render(
        mark=f"{_BY}, which replaces it the next time. -->",
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        title=report.title,
        style_sheet=style,
        script=script,
        lead=report.lead,
        figures=_figures(runs[0]) if len(runs) == 1 else None,
        sections=[section for section in report.sections if any(section.parts)],
        style=_style,
        now=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style(part: doc.Table, column: int, cell: str = "") -> Markup:
    """The class of a cell of a table, as an attribute."""
    name = "long" if len(cell) > _LONG else "number" if column >= part.numbers_from else ""
    return Markup(f' class="{name}"' if name else "")


def _figures(facts: Facts) -> list[tuple[str, str]]:
    """What a reader wants to know first, where it is known."""
    name, metric, loss = facts.described.headline, facts.headline, (facts.test or {}).get("loss")
    pairs = [
        (f"best val {name}", doc.measured(facts.best, metric)),
        (f"test {name}", doc.measured(facts.tested, metric)),
        ("test loss", NONE if name == "loss" else number(loss, ".4f")),
        ("training time", duration(facts.train_seconds)),
        ("images/s, median", rate(facts.images_per_sec)),
        ("peak memory", memory(facts.max_memory_mb)),
        ("processors", text(facts.processors)),
        ("attempts", text(facts.attempts or None)),
    ]
    return [(name, value) for name, value in pairs if value != NONE]

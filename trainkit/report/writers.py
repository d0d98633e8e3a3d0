"""Write a report: as a page of HTML, and as Markdown."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report import document as doc
from trainkit.report.comparison import MOST_DRAWN, comparison_table, outcome, sweep_tables
from trainkit.report.document import (
    COLOURS,
    NONE,
    STYLE,
    Html,
    Picture,
    drawing,
    duration,
    join,
    memory,
    number,
    rate,
    tag,
    text,
)
from trainkit.report.facts import Facts
from trainkit.report.figures import curves
from trainkit.report.sections import SEVERAL, headline, is_sweep, of_runs, of_several
from trainkit.run.folder import run_at

# The log book: ``logbook.md`` with its charts beside it as SVG, ready to be committed or handed in.

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
MARKDOWN_MARK = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"


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
        self.out, self.lines, self.written = out, [MARKDOWN_MARK], list[Path]()

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


# ``report.html``: one file that shows one run or compares several; it needs no network, and no script to be read.
#
# What a run says is escaped (`charts.tag`), for a run may be a stranger's. Should something slip through all the
# same, the page's policy runs no script but its own and loads nothing from anywhere.

FILE = "report.html"
HTML_MARK = "<!-- Written by `python -m jobs.report`, which replaces it the next time. -->"
_HERE = Path(__file__).parent
_LONG = 60
"""Letters from which on a cell is broken into lines: one long name would push the other columns off the page."""
_MOST_LINES = 12


def write_page(runs: Sequence[Facts], out: Path) -> Path:
    """Write ``out/report.html``; its path.

    Works for runs that are going on, were interrupted or lack files: the page says what is missing.

    Raises:
        UserError: it cannot be written, or a ``report.html`` there is somebody else's.
    """
    with written_to(out / FILE) as path:
        fileio.write(path, page(runs).encode(errors="replace"), run_at(out))
    return path


def page(runs: Sequence[Facts]) -> str:
    """The whole document."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    sweep = is_sweep(runs)
    if sweep:
        title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {title}"
        runs = sorted(runs, key=lambda facts: facts.rank)
    every = (*of_several(runs), *of_runs(runs[:COLOURS] if sweep else runs))
    sections = [each for each in every if any(each.parts)]
    style, script = (fileio.read_text(_HERE / name, follow=True) for name in ("page.css", "page.js"))
    style += STYLE
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", f"{title} · trainkit"),
        Html(f"<style>{style}</style>"),
    )
    links = [tag("li", tag("a", each.title, href=f"#{each.name}")) for each in sections]
    figures = _figures(runs[0]) if len(runs) == 1 else None
    body = tag(
        "body",
        tag("header", tag("h1", title), *_lead(runs, sweep), figures),
        tag("nav", tag("ul", *links), aria_label="parts of this report"),
        tag("main", *map(_section, sections)),
        tag("footer", tag("p", f"Made by trainkit, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.")),
        Html(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{HTML_MARK}\n{tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _lead(runs: Sequence[Facts], sweep: bool) -> list[Html]:
    if sweep:
        more = [f"Below the results are the best {COLOURS} of them."] * (len(runs) > COLOURS)
        return [tag("p", sentence, class_="lead") for sentence in [*outcome(runs), *more]]
    lines = []
    for facts in runs[:_MOST_LINES]:
        name = f"{facts.label}: " if len(runs) > 1 else ""
        named = (facts.setting(f"{key}.name") for key in ("model", "data", "strategy"))
        about = ", ".join(str(item) for item in named if item)
        told, alarm = headline(facts)
        said = tag("span", f" {alarm}", class_="alarm c1") if alarm else None
        lines.append(tag("p", f"{name}{about}{'. ' if about else ''}{told}", said, class_="lead"))
    return lines


def _figures(facts: Facts) -> Html:
    name, metric, loss = facts.described.headline, facts.headline, (facts.test or {}).get("loss")
    unit = f" {metric.unit}".rstrip()
    pairs = [
        (f"best val {name}", number(facts.best, metric.spec, unit)),
        (f"test {name}", number(facts.tested, metric.spec, unit)),
        ("test loss", number(loss, ".4f") if name != "loss" else NONE),
        ("training time", duration(facts.train_seconds)),
        ("images/s, median", rate(facts.images_per_sec)),
        ("peak memory", memory(facts.max_memory_mb)),
        ("processors", text(facts.processors)),
        ("attempts", text(facts.attempts or None)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value != NONE]
    return tag("dl", *shown, class_="figures")


def _section(section: doc.Section) -> Html:
    note = tag("p", section.note, class_="note") if section.note else None
    heading = tag("h2", section.title, id=f"{section.name}-title")
    parts = map(_part, section.parts)
    return tag("section", heading, note, *parts, id=section.name, aria_labelledby=f"{section.name}-title")


def _part(part: doc.Part) -> Html | None:
    if not part:
        return None
    if isinstance(part, doc.Table):
        return table(part)
    if isinstance(part, doc.Charts):
        block = " block" * part.wide
        keys = [tag("li", tag("span", class_=f"swatch c{c}{block}"), name) for name, c in part.legend]
        legend = tag("ul", *keys, class_="legend", aria_label="colours") if keys else None
        pictures = [_figure(picture) for picture in part.pictures if picture is not None]
        return join([legend, tag("div", *pictures, class_="lanes" if part.wide else "charts")])
    if isinstance(part, doc.Items):
        return tag("ul", *(tag("li", *map(_word, words)) for words in part.lines))
    if isinstance(part, doc.Text):
        return tag("p", *map(_word, part.words), class_="note")
    if isinstance(part, doc.Block):
        return tag("pre", part.text, tabindex=0)
    if isinstance(part, doc.Heading):
        return tag("h3", part.text)
    if isinstance(part, doc.Fold):
        return tag("details", tag("summary", part.title), *map(_part, part.parts))
    return tag("div", *map(_photo, part.photos), class_="gallery")


def _word(word: str) -> Html | str:
    return tag("code", word) if isinstance(word, doc.Code) else word


def _figure(picture: Picture) -> Html:
    unit = tag("span", picture.unit, class_="unit") if picture.unit else None
    caption = tag("figcaption", picture.title, " ", unit) if picture.title or unit else None
    has_readout = "data_plot" in picture.data
    return tag("figure", caption, tag("div", picture.svg(), class_="plot"), class_="chart" if has_readout else None)


def table(part: doc.Table) -> Html:
    """A table that scrolls by itself where it is wider than the page."""

    def style(at: int, cell: str) -> str | None:
        return "long" if len(cell) > _LONG else "number" if at >= part.numbers_from else None

    top = [tag("th", cell, scope="col", class_=style(at, "")) for at, cell in enumerate(part.header)]
    body = []
    for first, *others in part.rows:
        head = tag("th", first, scope="row", class_="long" if len(first) > _LONG else None)
        body.append(tag("tr", head, *(tag("td", cell, class_=style(at, cell)) for at, cell in enumerate(others, 1))))
    name = tag("caption", part.caption) if part.caption else None
    whole = tag("table", name, tag("thead", tag("tr", *top)), tag("tbody", *body))
    label = part.caption or part.header[0] or "table"
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)


def _photo(photo: doc.Photo) -> Html:
    sure = f"{100 * photo.confidence:.1f} %"
    words = f"{photo.label}, taken for {photo.told} with {sure}"
    style = "photo" if photo.is_large else None
    picture = tag("img", src=f"data:image/png;base64,{photo.png}", alt=words, class_=style)
    said = tag("span", photo.label, " ", tag("span", "taken for", class_="muted"), " ", tag("b", photo.told))
    return tag("figure", picture, tag("figcaption", said, tag("br"), tag("span", f"{sure} sure", class_="muted")))

"""Write a report: as a page of HTML, and as a log book in Markdown with its charts beside it.

Works for runs that are going on, were interrupted or lack files: the report says what is missing. Each function raises
UserError where it cannot write, or where a file of its name is somebody else's.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.jsonl import is_number
from trainkit.report import fit, text_sections
from trainkit.report.chart_sections import attempts, curves, hardware, spent, timeline
from trainkit.report.charts import COLOURS, drawing
from trainkit.report.class_sections import classes, mistakes
from trainkit.report.collection import collect, of_one_sweep, ranked
from trainkit.report.comparison import comparison, comparison_table, is_about_speed
from trainkit.report.document import Charts, ReportRow, ReportSection, of_each
from trainkit.report.facts import Facts
from trainkit.report.sweep_sections import outcome, sweep_tables, swept
from trainkit.report.templates import STYLE, TEMPLATES, source
from trainkit.report.values import NONE, duration, known_rows, memory, number, rate, text, with_unit
from trainkit.run.folder import RunDir, run_at

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
_CARD_BY = "# Written by `trainkit export`, which replaces this file."
_MOST_LINES = 12
_MOST_CLASSES = 100

_RUN_SECTIONS: Sequence[Callable[[Sequence[Facts]], ReportSection]] = (
    curves,
    of_each("splits", "Results by split", text_sections.results),
    of_each("asked", "What was asked", text_sections.asked),
    of_each("where", "Where it ran", text_sections.where),
    of_each("settings", "Settings", text_sections.settings),
    of_each("cost", "Cost", text_sections.cost),
    of_each("fit", "Ask for this next time", fit.section),
    timeline,
    of_each("attempts", "Attempts", attempts),
    spent,
    of_each("hardware", "Hardware", hardware),
    classes,
    mistakes,
    of_each("rounds", "Rounds and who contributed", text_sections.rounds),
    of_each("missing", "Not recorded", text_sections.missing),
    of_each("files", "Files", text_sections.places),
)
"""Sections on each run, in order; a new one is a function here."""


def _of_several(runs: Sequence[Facts]) -> list[ReportSection]:
    """Sections that set runs against each other; of a sweep, whose best run is the first, with its results."""
    if not of_one_sweep(runs):
        return [comparison(runs)]
    sections = [swept(runs)]
    if any(is_about_speed(key) for facts in runs for key in facts.point):
        sections.append(comparison(runs))
    return sections


def _of_runs(runs: Sequence[Facts]) -> list[ReportSection]:
    """Sections on each run."""
    return [section(runs) for section in _RUN_SECTIONS]


def _report(runs: Sequence[Facts]) -> dict[str, Any]:
    """Title, lead and sections of page and log book; a paragraph of the lead has an alarm or none.

    They are of one run, of several against the first, or of a sweep with the best run first.
    """
    runs = ranked(runs)
    if of_one_sweep(runs):
        sections = [*_of_several(runs), *_of_runs(runs[:COLOURS])]
        lead = [(sentence, "") for sentence in outcome(runs)]
        if len(runs) > COLOURS:
            lead.append((f"Below the results are the best {COLOURS} of them.", ""))
        title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {len(runs)} runs"
    else:
        sections = [*_of_several(runs), *_of_runs(runs)]
        lead = [_lead(facts, f"{facts.label}: ") for facts in runs[:_MOST_LINES]]
        title = f"{len(runs)} runs"
        if len(runs) == 1:
            lead = [_lead(runs[0], "")]
            title = runs[0].label
    return {"title": title, "lead": lead, "sections": sections}


def _lead(facts: Facts, before: str) -> tuple[str, str]:
    """Say what a run trains and how far it came, after the words ``before`` that; and an alarm or none."""
    names = []
    if facts.is_script:
        names.append(text_sections.script_name(facts))
    for section in () if facts.is_script else ("model", "data", "strategy"):
        name = facts.setting(f"{section}.name")
        if name:
            names.append(str(name))
    words, alarm = text_sections.headline(facts)
    if names:
        words = f"{', '.join(names)}. {words}"
    return before + words, alarm


def write_logbook(runs: Sequence[Facts], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its charts; the paths, the log book first. Refused where no run has begun."""
    report = _report(runs)
    if not of_one_sweep(runs):
        _require_something(runs)
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", runs[0].label)[:_LONGEST_SLUG].strip("-.") or "run"
    return _write_book(report, out / "logbook.md", f"{slug}-" if len(runs) == 1 else "")


def write_comparison(runs: Sequence[Facts], out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its charts; its table, and the paths."""
    _require_something(runs)
    report = {"title": "", "lead": [], "sections": [comparison(runs), curves(runs)]}
    return comparison_table(runs).markdown(), _write_book(report, out / "comparison.md")


def write_results(runs: Sequence[Facts], out: Path) -> str:
    """Write ``out/results.md``, the table of a sweep; its text."""
    best_first = sorted(runs, key=lambda facts: facts.rank)
    text = "\n\n".join(table.markdown() for table in sweep_tables(best_first)) + "\n"
    with written_to(out / RESULTS) as path:
        fileio.write(path, text, run_at(out))
    return text


def _write_book(report: Mapping[str, Any], path: Path, prefix: str = "") -> list[Path]:
    """Write a file in Markdown, and its charts beside it under names with ``prefix``; the paths."""
    written = [path]
    times = Counter[str]()

    def draw(charts: Charts) -> str:
        times[charts.name] += 1  # each run may have a chart of that name
        name = f"{prefix}{charts.name}"
        if times[charts.name] > 1:
            name += f"-{times[charts.name]}"
        written.append(path.with_name(f"{name}.svg"))
        svg = drawing(charts.pictures, legend=charts.legend, wide=charts.wide)
        fileio.write(written[-1], svg.encode(errors="replace"), run_at(path.parent))
        return written[-1].name

    mark = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"
    with written_to(path):
        text = TEMPLATES.get_template("book.md").render(report, mark=mark, draw=draw)
        fileio.write(path, text, run_at(path.parent))
    return written


def _require_something(found: Sequence[Facts]) -> None:
    """Raises UserError where none of the runs has begun."""
    if not any(facts.begun or facts.test for facts in found):
        raise UserError(
            f"Nothing to report on in {', '.join(facts.label for facts in found)}.",
            why="No training has begun: there are neither metrics nor a start.",
            fix=f"Ask what keeps it: `{terminal.command('why', found[0].run_dir.path)}`.",
        )


def require_own(paths: Iterable[Path]) -> None:
    """Refuse files that cannot be written, or that somebody else wrote, before the first of them is replaced."""
    fix = "Choose another folder with --out FOLDER, or move that one away."
    for path in paths:
        if path.is_dir():
            raise UserError(f"Cannot write {path}.", why="It is a folder.", fix=fix)
        is_ours = path.name in ("logbook.md", "comparison.md", "report.html")
        with fileio.disk_errors_as(f"Cannot write {path}.", fix=fix):
            if is_ours and path.is_file() and not path.is_symlink() and _BY not in fileio.read_start(path, 400):
                raise UserError(f"{path} was not written by this command.", why="It would be replaced.", fix=fix)


class Report(NamedTuple):
    """A report that was written."""

    text: str
    """Its tables, where they are shown as well: a comparison, or the results of a sweep. Else empty."""
    files: list[Path]
    """Files that were written: log book or comparison, charts, page."""
    left_out: list[str]
    """A sentence for each run whose records cannot be read."""


def report_on(
    runs: Sequence[RunDir], out: Path | None = None, *, compare: bool = False, is_sweep: bool = False
) -> Report:
    """Write log book and page of one run, of several, or of a sweep's.

    Args:
        out: the folder; None: the run's or sweep's own, or ./report for several.
        compare: comparison.md in place of the log book; the first run is the reference.
    """
    if compare and len(runs) < 2:
        why = "There is nothing to set this one against."
        fix = f"Name the reference first: `{terminal.command('report', 'REFERENCE', runs[0].path, '--compare')}`."
        raise UserError("--compare needs two runs or more.", why=why, fix=fix)
    facts, left_out = _readable(collect(runs), compare)
    if out is None and len(runs) == 1:
        out = runs[0].path
    elif out is None:
        out = runs[0].path.parent if is_sweep else Path("report")
    out = out.absolute()
    require_own([out / ("comparison.md" if compare else "logbook.md"), out / "report.html"])
    if compare:
        text, files = write_comparison(facts, out)
        text += "\n"
    elif is_sweep:
        require_own([out / RESULTS])
        text = write_results(facts, out)
        files = [out / RESULTS, *write_logbook(facts, out)]
    else:
        text = ""
        files = write_logbook(facts, out)
    files.append(write_page(facts, out))
    return Report(text, files, left_out)


def _readable(facts: Sequence[Facts], compare: bool) -> tuple[list[Facts], list[str]]:
    """Leave out runs whose records cannot be read, and say why; but no reference of a comparison, and not all runs."""
    found: list[Facts] = []
    left_out: list[str] = []
    for item in facts:
        try:
            item.require_readable()
            found.append(item)
        except UserError as error:
            is_last_hope = item is facts[-1] and not found
            is_reference = compare and item is facts[0]
            if is_last_hope or is_reference:
                raise
            left_out.append(f"Left out: {item.label}. {terminal.one_line(f'{error.what} {error.why}')}")
    return found, left_out


@contextmanager
def written_to(path: Path) -> Iterator[Path]:
    """Make the folder of a file that is to be written.

    Raises UserError where it cannot be written, or would replace what somebody else wrote.
    """
    with fileio.disk_errors_as(f"Cannot write {path}.", fix="Choose another folder with --out FOLDER."):
        fileio.make_folder(path.parent)
        require_own([path])
        yield path


def write_page(runs: Sequence[Facts], out: Path) -> Path:
    """Write ``out/report.html``, one file that shows one run or compares several; its path."""
    with written_to(out / "report.html") as path:
        fileio.write(path, _page(runs).encode(errors="replace"), run_at(out))
    return path


def _page(runs: Sequence[Facts]) -> str:
    style = source("page.css") + STYLE
    script = source("page.js")
    return TEMPLATES.get_template("page.html").render(
        _report(runs),
        mark=f"{_BY}, which replaces it the next time. -->",
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        style_sheet=style,
        script=script,
        figures=_figures(runs[0]) if len(runs) == 1 else [],
        now=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _figures(facts: Facts) -> list[ReportRow]:
    """Figures that a reader wants to know first, where they are known."""
    name = facts.task_metrics.headline
    metric = facts.headline
    loss = (facts.test or {}).get("loss")
    rows = [
        (f"best val {name}", with_unit(facts.best, metric)),
        (f"test {name}", with_unit(facts.tested, metric)),
        ("test loss", NONE if name == "loss" else number(loss, ".4f")),
        ("training time", duration(facts.train_seconds)),
        ("images/s, median", rate(facts.images_per_sec)),
        ("peak memory", memory(facts.max_memory_mb)),
        ("processors", text(facts.processors)),
        ("attempts", text(facts.attempts or None)),
    ]
    return known_rows(rows)


def card(facts: Facts, about: Mapping[str, Any], file: str) -> str:
    """A model card (``README.md`` as the Hugging Face Hub reads it) of an exported ``file``, which says ``about``.

    Test metrics are told of the best weights alone: they were measured of no others.
    """
    prefix = "ema_" if about["weights"] == "ema" else ""
    record = facts.test or {}
    if about["step"] != facts.summary.get("best_step"):
        record = {}
    results = []
    rows = []
    for name, metric in facts.task_metrics.metrics.items():
        value = record.get(f"{prefix}{name}")
        if name != "loss" and is_number(value):
            results.append((name, metric, round(float(value), 4)))
            rows.append((f"{metric.label}, test", with_unit(results[-1][2], metric)))
    rows += [
        ("parameters", number(facts.summary.get("params"), ",")),
        ("epochs", number(facts.summary.get("epochs"), ".4g")),
        ("training time", duration(facts.train_seconds)),
        ("processors", text(facts.processors)),
        ("energy", text_sections.energy(facts.energy)),
        ("seed", text(facts.setting("seed"))),
    ]
    data = str(facts.setting("data.name"))
    if facts.setting("data.fake") is True:
        data = f"made-up images in place of {data}"
    return TEMPLATES.get_template("card.md").render(
        facts=facts, about=about, file=file, mark=_CARD_BY, results=results, most=_MOST_CLASSES,
        rows=known_rows(rows), data=data,
        tags=sorted({"image-classification", "trainkit", about["library"]} - {"user"}),
    )  # fmt: skip


def place_of_card(folder: Path) -> Path:
    """``README.md`` in that folder. Raises UserError where somebody else wrote the one that is there."""
    path = folder / "README.md"
    if path.is_dir() or (path.exists() and _CARD_BY not in fileio.read_start(path, 400, follow=True)):
        why = "It would be replaced."
        fix = "Export into a folder of its own, such as export/model.onnx."
        raise UserError(f"{path} was not written by this command.", why=why, fix=fix)
    return path


def write_card(text: str, folder: Path) -> Path:
    """Write `card` to `place_of_card`; its path."""
    with written_to(place_of_card(folder)) as path:
        fileio.write(path, text)
    return path

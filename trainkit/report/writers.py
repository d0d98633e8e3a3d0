"""Write a report: as a page of HTML, and as a log book in Markdown with its charts beside it.

Works for runs that are going on, were interrupted or lack files: the report says what is missing. Each function raises
UserError where it cannot write, or where a file of its name is somebody else's.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.fileio import is_number
from trainkit.report import document as doc
from trainkit.report.comparison import comparison, comparison_table, outcome, sweep_tables
from trainkit.report.document import COLOURS, NONE, duration, memory, number, rate, text
from trainkit.report.facts import Facts
from trainkit.report.figures import curves
from trainkit.report.sections import energy, headline, is_sweep, of_runs, of_several
from trainkit.run.folder import run_at

RESULTS = "results.md"
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_BY = "<!-- Written by `python -m jobs.report`"
_CARD_BY = "# Written by `trainkit export`, which replaces this file."
_MOST_LINES = 12
_MOST_CLASSES = 100


def _report(runs: Sequence[Facts]) -> dict[str, Any]:
    """What page and log book hold: a title, a lead of paragraphs, each with an alarm or none, and sections.

    Of one run, of several against the first, or of a sweep with the best run first.
    """
    if is_sweep(runs):
        ranked = sorted(runs, key=lambda facts: facts.rank)
        sections = [*of_several(ranked), *of_runs(ranked[:COLOURS])]
        lead = [(sentence, "") for sentence in outcome(ranked)]
        if len(runs) > COLOURS:
            lead.append((f"Below the results are the best {COLOURS} of them.", ""))
        title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {len(runs)} runs"
    else:
        sections = [*of_several(runs), *of_runs(runs)]
        lead = [_lead(facts, name=len(runs) > 1) for facts in runs[:_MOST_LINES]]
        title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    return {"title": title, "lead": lead, "sections": sections}


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
    return _write_book(report, out / "logbook.md", f"{slug}-" if len(runs) == 1 else "")


def write_comparison(runs: Sequence[Facts], out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its charts; its table, and the paths."""
    _require_something(runs)
    report = {"title": "", "lead": [], "sections": [comparison(runs), curves(runs)]}
    written = _write_book(report, out / "comparison.md")
    return doc.markdown(comparison_table(runs)), written


def write_results(runs: Sequence[Facts], out: Path) -> str:
    """Write ``out/results.md``, the table of a sweep; its text."""
    text = "\n\n".join(map(doc.markdown, sweep_tables(sorted(runs, key=lambda facts: facts.rank)))) + "\n"
    with written_to(out / RESULTS) as path:
        fileio.write(path, text, run_at(out))
    return text


def _write_book(report: Mapping[str, Any], path: Path, prefix: str = "") -> list[Path]:
    """Write a file in Markdown, and its charts beside it under names with ``prefix``; the paths."""
    written, drawn = [path], Counter[str]()

    def draw(charts: doc.Charts) -> str:
        drawn[charts.name] += 1  # each run may have a chart of that name
        number = f"-{drawn[charts.name]}" if drawn[charts.name] > 1 else ""
        written.append(path.with_name(f"{prefix}{charts.name}{number}.svg"))
        svg = doc.drawing(charts.pictures, legend=charts.legend, wide=charts.wide)
        fileio.write(written[-1], svg.encode(errors="replace"), run_at(path.parent))
        return written[-1].name

    mark = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"
    with written_to(path):
        text = doc.TEMPLATES.get_template("book.md").render(report, mark=mark, draw=draw)
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


@contextmanager
def written_to(path: Path) -> Iterator[Path]:
    """Its folder is made. Raises UserError where it cannot be written, or would replace what somebody else wrote."""
    with fileio.disk_errors_as(f"Cannot write {path}.", fix="Choose another folder with --out FOLDER."):
        fileio.make_folder(path.parent)
        marked = path.name in ("logbook.md", "comparison.md", "report.html")
        if marked and path.is_file() and not path.is_symlink() and _BY not in fileio.read_start(path, 400):
            raise UserError(
                f"{path} was not written by this command.",
                why="It would be replaced.",
                fix="Choose another folder with --out FOLDER, or move that file away.",
            )
        yield path


def write_page(runs: Sequence[Facts], out: Path) -> Path:
    """Write ``out/report.html``, one file that shows one run or compares several; its path."""
    with written_to(out / "report.html") as path:
        fileio.write(path, _page(runs).encode(errors="replace"), run_at(out))
    return path


def _page(runs: Sequence[Facts]) -> str:
    style, script = doc.source("page.css") + doc.STYLE, doc.source("page.js")
    return doc.TEMPLATES.get_template("page.html").render(
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


def card(facts: Facts, about: Mapping[str, Any], file: str) -> str:
    """A model card (``README.md`` as the Hugging Face Hub reads it) of an exported ``file``, which says ``about``.

    Test metrics are told of the best weights alone: they were measured of no others.
    """
    prefix, known = "ema_" if about["weights"] == "ema" else "", facts.described.metrics
    record = (facts.test or {}) if about["step"] == facts.summary.get("best_step") else {}
    measured = {name: record.get(f"{prefix}{name}", None) for name in known if name != "loss"}
    results = [(name, known[name], round(float(value), 4)) for name, value in measured.items() if is_number(value)]
    rows = [(f"{metric.label}, test", doc.measured(value, metric)) for _, metric, value in results]
    params = facts.summary.get("params")
    rows += [
        ("parameters", f"{params:,}" if is_number(params) else NONE),
        ("epochs", number(facts.summary.get("epochs"), ".4g")),
        ("training time", duration(facts.train_seconds)),
        ("processors", text(facts.processors)),
        ("energy", energy(facts.energy)),
        ("seed", text(facts.setting("seed"))),
    ]
    data = f"{'made-up images in place of ' * (facts.setting('data.fake') is True)}{facts.setting('data.name')}"
    return doc.TEMPLATES.get_template("card.md").render(
        facts=facts, about=about, file=file, mark=_CARD_BY, results=results, most=_MOST_CLASSES,
        rows=[row for row in rows if row[1] != NONE], data=data,
        tags=sorted({"image-classification", "trainkit", about["library"]} - {"user"}),
    )  # fmt: skip


def place_of_card(folder: Path) -> Path:
    """``README.md`` in that folder. Raises UserError where somebody else wrote the one that is there."""
    path = folder / "README.md"
    if path.exists() and _CARD_BY not in fileio.read_start(path, 400, follow=True):
        why, fix = "It would be replaced.", "Export into a folder of its own, such as export/model.onnx."
        raise UserError(f"{path} was not written by this command.", why=why, fix=fix)
    return path


def write_card(text: str, folder: Path) -> Path:
    """Write `card` to `place_of_card`; its path."""
    with written_to(place_of_card(folder)) as path:
        fileio.write(path, text)
    return path

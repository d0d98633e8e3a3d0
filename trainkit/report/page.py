"""``report.html``: one file that shows one run or compares several; it needs no network, and no script to be read.

What a run says is text and is escaped (`page_markup`), for a run may be a stranger's. Should something slip through all
the same, the page's policy runs no script but its own and loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.report import comparing, contributors, tables
from trainkit.report.facts import Facts, Runs, collect
from trainkit.report.logbook import written_to
from trainkit.report.page_classes import classes
from trainkit.report.page_costs import hardware, scaling, spent
from trainkit.report.page_curves import MOST, curves
from trainkit.report.page_markup import Html, section, table, tag, with_code
from trainkit.report.page_sweep import outcome, swept
from trainkit.report.page_timeline import timeline
from trainkit.report.sweep import by_accuracy
from trainkit.report.tables import NONE, duration, memory, number, speed_spec
from trainkit.run.folder import run_at

FILE = "report.html"
MARK = "<!-- Written by `python -m jobs.report`, which replaces it the next time. -->"
SETTING, MEASURE = ("setting", "value"), ("measure", "value")
_HERE = Path(__file__).parent


def write_page(runs: Runs, out: Path) -> Path:
    """Write ``out/report.html``; its path.

    Works for runs that are going on, were interrupted or lack files: the page says what is missing.

    Raises:
        UserError: it cannot be written, or a ``report.html`` there is somebody else's.
    """
    with written_to(out / FILE) as path:
        fileio.write(path, page(collect(runs)).encode(errors="replace"), run_at(out))
    return path


def page(runs: Sequence[Facts]) -> str:
    """The whole document."""
    is_sweep = len(runs) > 1 and all(facts.point for facts in runs)
    about_speed = not is_sweep or comparing.is_about_speed(key for facts in runs for key in facts.point)
    in_order = sorted(runs, key=by_accuracy) if is_sweep else runs
    detailed = in_order[:MOST] if is_sweep else runs
    style, script = (fileio.read_text(_HERE / name, follow=True) for name in ("page.css", "page.js"))
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    if is_sweep:
        title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {title}"
    parts = [
        swept(in_order) if is_sweep else None,
        _comparison(runs) if about_speed else None,
        curves(in_order),
        timeline(detailed),
        scaling(runs) if about_speed else None,
        spent(detailed),
        hardware(detailed),
        classes(detailed),
        _rounds(detailed),
        _settings(detailed),
        _missing(detailed),
    ]
    there = [part for part in parts if part]
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
    body = tag(
        "body",
        tag("header", tag("h1", title), *_lead(in_order, is_sweep), _figures(runs[0]) if len(runs) == 1 else None),
        tag("nav", tag("ul", *_links(there)), aria_label="parts of this report"),
        tag("main", *there),
        _foot(in_order),
        Html(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{MARK}\n{tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _links(parts: Sequence[Html]) -> list[Html]:
    names = {
        "results": "Results", "comparison": "Comparison", "curves": "Curves", "timeline": "Time line",
        "scaling": "Scaling", "time": "Where the time went", "hardware": "Hardware", "classes": "Classes",
        "mistakes": "Most confidently wrong", "rounds": "Rounds", "settings": "Settings", "missing": "Not recorded",
    }  # fmt: skip
    whole = "".join(parts)
    there = [(name, title) for name, title in names.items() if f'<section id="{name}"' in whole]
    return [tag("li", tag("a", title, href=f"#{name}")) for name, title in there]


def _lead(runs: Sequence[Facts], is_sweep: bool) -> list[Html]:
    if is_sweep:
        more = [f"Below the results are the best {MOST} of them."] * (len(runs) > MOST)
        return [tag("p", sentence, class_="lead") for sentence in [*outcome(runs), *more]]
    lines = []
    for facts in runs[:12]:
        name = f"{facts.label}: " if len(runs) > 1 else ""
        named = (facts.setting(f"{key}.name") for key in ("model", "data", "strategy"))
        about = ", ".join(str(item) for item in named if item)
        told, alarm = _outcome(facts)
        said = tag("span", f" {alarm}", class_="alarm") if alarm else None
        lines.append(tag("p", f"{name}{about}{'. ' if about else ''}{told}", said, class_="lead"))
    return lines


def _outcome(facts: Facts) -> tuple[str, str]:
    """How far it came, and what went wrong."""
    alarm = f"It has diverged: {facts.setbacks.in_words()}." if facts.setbacks.diverged else ""
    if facts.finished:
        return f"Finished after {facts.steps:,} steps.", alarm
    if not facts.begun:
        return "It has not begun.", alarm
    total = facts.started("total_steps")
    of = f" of {total:,}" if isinstance(total, int) else ""
    # A failure after which a further attempt has started is on the time line.
    last = next((event for event in reversed(facts.events) if event["event"] in ("failed", "started")), None)
    if last is not None and last["event"] == "failed" and last.get("error"):
        alarm = f"It has failed: {str(last['error']).rstrip('.')}. {alarm}".rstrip()
    return f"Not finished: {facts.steps:,}{of} steps.", alarm


def _figures(facts: Facts) -> Html:
    best, test = facts.best_val or {}, facts.test or {}
    seconds, used = facts.train_seconds, facts.max_memory_mb
    pairs = [
        ("best val acc1", number(best.get("acc1"), ".2f", " %")),
        ("test acc1", number(test.get("acc1"), ".2f", " %")),
        ("test loss", number(test.get("loss"), ".4f")),
        ("training time", duration(seconds) if seconds is not None else NONE),
        ("images/s, median", number(facts.images_per_sec, speed_spec(facts.images_per_sec or 0.0))),
        ("peak memory", memory(used)),
        ("processors", str(facts.processors or NONE)),
        ("attempts", str(facts.attempts or NONE)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value != NONE]
    return tag("dl", *shown, class_="figures")


def _comparison(runs: Sequence[Facts]) -> Html:
    if len(runs) < 2:
        return Html()
    header, different = comparing.differences(runs)
    diff = [tag("h3", "Settings that differ"), table(header, different)] if different else []
    rows = comparing.comparison_rows(runs)
    note = f"Speed-up and time ratio are relative to {runs[0].label}."
    parts: list[Html] = [table(comparing.COMPARISON, rows, numbers_from=2)]
    if missing := comparing.not_comparable(runs):
        parts.append(tag("ul", *(tag("li", sentence) for sentence in missing)))
    return section("comparison", "Comparison", *parts, *diff, note=note)


def _rounds(runs: Sequence[Facts]) -> Html:
    parts: list[object] = []
    for facts in runs:
        rounds, contributed = contributors.rounds_rows(facts), contributors.rows(facts)
        if (rounds or contributed) and len(runs) > 1:
            parts.append(tag("h3", facts.label))
        if rounds:
            parts.append(table(MEASURE, rounds))
        if contributed:
            parts.append(table(contributors.HEADER, contributed, numbers_from=1))
    return section("rounds", "Rounds and who contributed", *parts)


def _settings(runs: Sequence[Facts]) -> Html:
    parts: list[object] = []
    for facts in runs:
        rows, costs = tables.settings_rows(facts), tables.cost_rows(facts)
        if not rows and not costs:
            continue
        if len(runs) > 1:
            parts.append(tag("h3", facts.label))
        both = [table(header, found) if found else None for header, found in ((SETTING, rows), (MEASURE, costs))]
        parts.append(tag("div", *both, class_="side settings"))
    return section("settings", "Settings and costs", *parts)


def _missing(runs: Sequence[Facts]) -> Html:
    lists: list[object] = []
    for facts in runs:
        if facts.missing:
            lists += [tag("h3", facts.label)] if len(runs) > 1 else []
            lists.append(tag("ul", *(tag("li", with_code(line)) for line in facts.missing)))
    return section("missing", "Not recorded", *lists)


def _foot(runs: Sequence[Facts]) -> Html:
    lines = [
        tag("p", facts.label if len(runs) > 1 else "Repeat it", ": ", tag("code", again(facts))) for facts in runs[:12]
    ]
    return tag("footer", *lines, tag("p", f"Made by trainkit, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}."))


def again(facts: Facts) -> str:
    """The command that repeats a run."""
    return terminal.command("submit", facts.run_dir.config, "--again")

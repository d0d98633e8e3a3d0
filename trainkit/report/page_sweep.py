"""What a sweep has found: its runs, the best first, what seeds make of a result, and a chart for each swept setting."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from trainkit import fileio
from trainkit.report.facts import Facts
from trainkit.report.page_chart import COLOURS, Axes, Series, line_chart
from trainkit.report.page_markup import NOTHING, Html, section, table, tag
from trainkit.report.points import name_of
from trainkit.report.sweep import best_accuracy, spread, sweep_tables, test_accuracy
from trainkit.report.tables import NONE

_MOST_ROWS = 20


def outcome(runs: Sequence[Facts]) -> list[str]:
    """How far the sweep came, and its best run; ``runs`` has the best first."""
    done = sum(facts.finished for facts in runs)
    lines = [f"{done} of {len(runs)} runs have finished."]
    best = best_accuracy(runs[0])
    if best is not None and set(runs[0].point) == {"seed"}:
        val, test = spread(map(best_accuracy, runs)), spread(map(test_accuracy, runs))
        lines.append(f"In percent, over the seeds: val acc1 {val}" + f", test acc1 {test}" * (test != NONE) + ".")
    elif best is not None:
        tested = test_accuracy(runs[0])
        measured = f", test acc1 {tested:.2f} %" if tested is not None else ""
        equal = sum(best_accuracy(facts) == best for facts in runs) - 1
        others = f" and {equal} other{'s' * (equal > 1)}" if equal else ""
        unfinished = "" if runs[0].finished else " It has not finished."
        lines.append(f"Best by validation: {runs[0].label}{others}, val acc1 {best:.2f} %{measured}.{unfinished}")
    elif any(facts.begun for facts in runs):
        lines.append("No validation was reached.")
    if diverged := [facts.label for facts in runs if facts.setbacks.diverged]:
        lines.append(f"Diverged: {', '.join(diverged)}.")
    return lines


def swept(runs: Sequence[Facts]) -> Html:
    """The section with the results; ``runs`` has the best first."""
    (header, rows), *means = sweep_tables(runs[0].run_dir.path.parent, runs)
    keys = [key for key in runs[0].point if key != "seed"]
    charts = [chart for key in keys if (chart := _against(key, runs))]
    said = [table(*each, numbers_from=1) for each in means]
    said += [tag("div", *charts, class_="charts")] if charts else []
    every = table(header, rows, numbers_from=1)
    if len(rows) > _MOST_ROWS and said:  # they would push what they come to off the screen
        parts = [*said, tag("details", tag("summary", f"All {len(rows)} runs"), every)]
    else:
        parts = [every, *said]
    note = "The best by validation first." if best_accuracy(runs[0]) is not None else ""
    return section("results", "Results", *parts, note=note + " Dots: single runs; lines: their means." * bool(charts))


def _against(key: str, runs: Sequence[Facts]) -> Html:
    """Validation accuracy against one swept setting, a line for each choice of the others; seeds are averaged."""
    values = {facts.label: _as_number(facts.point.get(key)) for facts in runs}
    placed = [
        (x, accuracy, name_of({k: v for k, v in facts.point.items() if k not in (key, "seed")}))
        for facts in runs
        if (x := values[facts.label]) is not None and (accuracy := best_accuracy(facts)) is not None
    ]
    places = sorted({x for x, _, _ in placed})
    if len(places) < 2 or None in values.values():
        return NOTHING
    series = []
    for colour, choice in enumerate(list(dict.fromkeys(name for _, _, name in placed))[:COLOURS]):
        own = [(x, accuracy) for x, accuracy, name in placed if name == choice]
        means = [(at, fmean(y for x, y in own if x == at)) for at in sorted({x for x, _ in own})]
        series.append(Series(choice or "val acc1", means, colour, label=choice or f"{means[-1][1]:.1f}"))
        for at, _ in means:  # of several seeds every one is a dot
            if len(ys := [y for x, y in own if x == at]) > 1:
                series += [Series(f"{choice} single run".strip(), [(at, y)], colour, faint=True) for y in ys]
    axes = Axes("Validation accuracy", "%", key, f"swept {key}", x_may_be_log=True)
    return line_chart(axes, series, x_from=places[0], x_to=places[-1])


def _as_number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if fileio.is_number(value) else None

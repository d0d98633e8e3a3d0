"""The section on a sweep: its results and its best run."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from trainkit.common import jsonl
from trainkit.common.terminal import plural
from trainkit.report.charts import COLOURS, Axes, Picture, Point, Series, line_chart
from trainkit.report.document import Charts, Fold, Part, ReportRow, ReportSection, Table
from trainkit.report.facts import Facts
from trainkit.report.sweep_points import name_of
from trainkit.report.values import NONE, duration, number, numbers

_MOST_CURVES = 200
_MOST_ROWS = 20


def outcome(runs: Sequence[Facts]) -> list[str]:
    """Sentences on how far a sweep came, and on its best run; ``runs`` has the best first."""
    finished = 0
    pruned = 0
    diverged = []
    for facts in runs:
        finished += facts.finished
        pruned += facts.pruned
        if facts.setbacks.diverged:
            diverged.append(facts.label)
    line = f"{finished} of {len(runs)} runs have finished"
    if pruned:
        line += f", {pruned} {'was' if pruned == 1 else 'were'} pruned"
    lines = [f"{line}."]
    if runs[0].best is not None:
        lines.append(_best_in_words(runs))
    elif any(facts.begun for facts in runs):
        lines.append("No validation was reached.")
    if diverged:
        lines.append(f"Diverged: {', '.join(diverged)}.")
    return lines


def _best_in_words(runs: Sequence[Facts]) -> str:
    """Say which run is the best, or of a sweep over seeds their mean."""
    first = runs[0]
    name = first.task_metrics.headline
    metric = first.headline
    bests = [facts.best for facts in runs]
    if set(first.point) == {"seed"}:
        unit = "In percent, over" if metric.unit == "%" else "Over"
        words = f"{unit} the seeds: val {name} {spread(bests)}"
        test = spread([facts.tested for facts in runs])
        if test != NONE:
            words += f", test {name} {test}"
        return f"{words}."
    words = f"Best by validation: {first.label}"
    equal = bests.count(first.best) - 1
    if equal:
        words += f" and {plural(equal, 'other')}"
    words += f", val {name} {metric.text(first.best)}"
    if first.tested is not None:
        words += f", test {name} {metric.text(first.tested)}"
    if not first.finished:
        words += ". It has not finished"
    return f"{words}."


def swept(runs: Sequence[Facts]) -> ReportSection:
    """Results of a sweep; ``runs`` has the best first."""
    every, *means = sweep_tables(runs)
    pictures = []
    for key in runs[0].point:
        if key != "seed":
            pictures.append(_against(key, runs))
    charts = Charts("results", pictures, "results against what was swept")
    parts: list[Part] = [*means, charts]
    if len(runs) > _MOST_ROWS and (means or charts):  # they would push what they come to off the screen
        parts.append(Fold(f"All {len(runs)} runs", [every]))
    else:
        parts.insert(0, every)
    note = ""
    if runs[0].best is not None:
        note = "The best by validation first."
    if charts:
        note += " Dots: single runs; lines: their means."
    return ReportSection("results", "Results", parts, note)


def _swept_keys(runs: Sequence[Facts]) -> list[str]:
    """The settings that were swept, in the order in which the runs have them."""
    keys: dict[str, str] = {}
    for facts in runs:
        keys |= facts.point
    return list(keys)


def _all_numbers(values: Sequence[str]) -> list[float] | None:
    """Values of one setting; None where one is no number."""
    try:
        found = list(map(float, values))
    except ValueError:
        return None
    if not all(map(jsonl.is_number, found)):
        return None
    return found


def sweep_tables(runs: Sequence[Facts]) -> list[Table]:
    """Tables of all runs; and, where seeds were swept, of the means over them, the best first."""
    keys = _swept_keys(runs)
    name = runs[0].task_metrics.headline
    is_chosen = any(facts.last_event("sampled") for facts in runs)
    rows: list[ReportRow] = []
    for facts in runs:
        spec = facts.headline.spec
        row = [facts.run_dir.path.name, *_choice(facts, keys), number(facts.best, spec)]
        row += [number((facts.best_val or {}).get("epoch"), ".1f"), number(facts.tested, spec)]
        row.append(duration(facts.train_seconds))
        if is_chosen:
            row.append(str(facts.last_event("sampled").get("by", NONE)))
        rows.append((*row, _remark(facts)))
    header = ["folder", *keys, f"val {name}", "epoch", f"test {name}", "training time"]
    if is_chosen:
        header.append("chosen by")
    tables = [Table((*header, ""), rows, 1)]
    if "seed" in keys:
        keys.remove("seed")
        tables.append(_means_over_seeds(runs, keys))
    return tables


def _choice(facts: Facts, keys: Iterable[str]) -> list[str]:
    return [facts.point.get(key, NONE) for key in keys]


def _means_over_seeds(runs: Sequence[Facts], keys: Sequence[str]) -> Table:
    """A row for each choice of the other settings, the best first."""
    name = runs[0].task_metrics.headline
    metric = runs[0].headline
    groups = defaultdict[ReportRow, list[Facts]](list)
    for facts in runs:
        groups[tuple(_choice(facts, keys))].append(facts)
    rows: list[tuple[float, ReportRow]] = []
    for choice, group in groups.items():
        vals = [facts.best for facts in group]
        known = numbers(vals)
        place = math.inf
        if known:
            place = statistics.fmean(known)
            if metric.higher_is_better:
                place = -place
        test = spread([facts.tested for facts in group], metric.spec)
        rows.append((place, (*choice, str(len(group)), spread(vals, metric.spec), test)))
    rows.sort(key=itemgetter(0))
    header = (*keys, "seeds", f"val {name}, mean ± sd", f"test {name}, mean ± sd")
    return Table(header, list(map(itemgetter(1), rows)), 1)


def _remark(facts: Facts) -> str:
    if facts.finished:
        return "diverged" if facts.setbacks.diverged else ""
    if facts.pruned:
        return f"pruned after {plural(facts.steps, 'step')}"
    last = facts.last_event("failed", "ended")
    if last.get("event") == "failed" or last.get("state") not in (None, "COMPLETED"):
        return str(last.get("state", "FAILED"))
    if not facts.begun:
        return "not begun"
    return f"{facts.steps} steps so far"


def spread(values: Sequence[float | None], spec: str = ".2f") -> str:
    """``91.00 ± 1.41``: mean and standard deviation of those that are known, and of how many where not of all."""
    known = numbers(values)
    if not known:
        return NONE
    words = format(statistics.fmean(known), spec)
    if len(known) > 1:
        words += f" ± {statistics.stdev(known):{spec}}"
    if len(known) < len(values):
        words += f" (of {len(known)})"
    return words


def _against(key: str, runs: Sequence[Facts]) -> Picture | None:
    """Draw the headline against one swept setting, a line for each choice of the others; seeds are averaged."""
    places = _all_numbers([facts.point.get(key, "") for facts in runs])
    if places is None:
        return None
    drawn: set[float] = set()
    choices: dict[str, Any] = defaultdict(lambda: defaultdict[float, list[float]](list))
    for facts, place in zip(runs, places, strict=True):
        if facts.best is not None:
            others = dict(facts.point)
            del others[key]
            others.pop("seed", None)
            choices[name_of(others)][place].append(facts.best)
            drawn.add(place)
    if len(drawn) < 2:
        return None
    metric = runs[0].headline
    axes = Axes(f"{metric.label}, validation", metric.unit, key, f"swept {key}", x_may_be_log=True)
    series = []
    if max(map(len, choices.values())) == 1:  # dots: no two runs differ in this setting alone
        for choice in list(choices)[:_MOST_CURVES]:
            series.append(Series(choice, _means(choices[choice])))
        return line_chart(axes, series)
    for colour, choice in enumerate(list(choices)[:COLOURS]):
        means = _means(choices[choice])
        name = choice or f"val {runs[0].task_metrics.headline}"
        series.append(Series(name, means, colour, label=choice or f"{means[-1][1]:.3g}"))
        for place, results in sorted(choices[choice].items()):
            if len(results) == 1:  # its mean is drawn there
                continue
            for result in results:
                series.append(Series(f"{choice} single run".strip(), [(place, result)], colour, faint=True))
    return line_chart(axes, series)


def _means(results: dict[float, list[float]]) -> list[Point]:
    """The mean of the results at each place."""
    return [(place, statistics.fmean(results[place])) for place in sorted(results)]

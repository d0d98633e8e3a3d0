"""Sections on several runs: what sets them apart, speed-up and efficiency where they compare, results of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainkit import fileio
from trainkit.config.loading import flatten
from trainkit.report.charts import COLOURS, GREY, Axes, Bar, Picture, Series, bar_chart, line_chart
from trainkit.report.document import (
    NONE,
    TIMES,
    Charts,
    Fold,
    Heading,
    Items,
    Part,
    Row,
    Section,
    Table,
    Text,
    duration,
    memory,
    number,
    plural,
    rate,
    text,
)
from trainkit.report.facts import Facts, name_of

_WORK = ("model.", "data.name", "data.image_size", "data.pack")
"""Settings that change how much work an image is,"""
_NO_WORK = ("model.pretrained", "model.checkpoint")
"""but for these of them."""
_FOR_SPEED = (
    *("strategy.", "launch.", "model.", "data.", "augment.", "optim.name", "train.precision", "train.compile"),
    *("train.global_batch_size", "train.micro_batch_size", "train.channels_last", "train.activation_checkpointing"),
    *("train.ema_decay", "train.deterministic", "checkpoint.asynchronous"),
)
"""Settings that change how fast a run is, or how much memory it takes."""
_MOST_EFFICIENT = 1.05
"""The efficiency beyond which the slower run must have been held up."""
_FEWEST = 3
"""Speeds in a median: the first updates are slow."""
_MOST_COLUMNS = 8
"""Runs beside each other in a table; more are rows of it."""
_MOST_SENTENCES, _MOST_ROWS, MOST_DRAWN = 40, 20, 20


def is_about_speed(keys: Iterable[str]) -> bool:
    """Whether settings that differ are a reason to compare speeds, as a learning rate or a seed is not."""
    return any(key.startswith(_FOR_SPEED) for key in keys)


def comparison(runs: Sequence[Facts]) -> Section:
    """Every run against the first."""
    first = runs[0].label
    header, different = differences(runs)
    simulated = [facts.label for facts in runs if is_simulated(facts)]
    shared = (
        f"The nodes of {', '.join(simulated)} were simulated on one machine, whose processors their ranks share:"
        " speed-up and efficiency say nothing of real nodes."
    )
    parts: list[Part] = [
        comparison_table(runs),
        Items([[sentence] for sentence in not_comparable(runs)]),
        Charts("throughput", [_throughput(runs[:MOST_DRAWN])], "images per second of every run", wide=True),
    ]
    if simulated:
        parts.insert(2, Text([shared]))
    if different:
        parts += [Heading("Settings that differ"), Table(header, different)]
    note = (
        f"Speed-up: images/s relative to {first}. Efficiency: speed-up divided by how many times more processors there"
        " are (ranks, or GPUs under DataParallel). Time ratio: training time of"
        f" {first} divided by that of the run, where both saw the same number of images to the end. Memory saved: of"
        f" the rank that needs most, relative to {first}, where a rank takes as many images in one pass."
    )
    return Section("comparison", "Comparison", parts if len(runs) > 1 else (), note)


def comparison_table(runs: Sequence[Facts]) -> Table:
    """One row a run, set against the first."""
    name = runs[0].described.headline
    header = (
        "run", "strategy", "processors", "steps", f"val {name}", f"test {name}", "training time", "images/s",
        "speed-up", "efficiency", "time ratio", "peak memory of a rank", "memory saved",
    )  # fmt: skip
    return Table(header, [_compared(facts, runs[0]) for facts in runs], 2)


def not_comparable(runs: Sequence[Facts]) -> list[str]:
    """Which runs were not set against the first, and why, in sentences; of many the first ones."""
    found = _not_comparable(runs)
    more = len(found) - _MOST_SENTENCES
    return [*found[:_MOST_SENTENCES], f"And {more} more like these."] if more > 0 else found


def _not_comparable(runs: Sequence[Facts]) -> list[str]:
    found = [f"{facts.label} has not begun." for facts in runs if not facts.begun]
    for facts in runs[1:]:
        if not (facts.begun and runs[0].begun):
            continue
        if work := other_work(facts, runs[0]):
            found.append(f"{facts.label} is not compared in speed, time and memory: {', '.join(work)}.")
            continue
        if why := no_speed_up(facts, runs[0]):
            found.append(f"{facts.label} has no speed-up: {why}.")
        elif also := _also_differs(facts, runs[0]):
            found.append(f"The speed-up of {facts.label} is also that of other settings: {', '.join(also)}.")
        if time := _other_length(facts, runs[0]):
            found.append(f"{facts.label} has no time ratio: {', '.join(time)}.")
        if passes := _other_pass(facts, runs[0]):
            found.append(f"{facts.label} has no memory saved: {', '.join(passes)}.")
    return found


def no_speed_up(facts: Facts, first: Facts) -> str:
    """Why the speeds of two runs are not compared; empty where they are."""
    if work := other_work(facts, first):
        return ", ".join(work)
    for item in (first, facts):
        if hindered := item.hindered_by:
            return f"of {item.label} {hindered}"
        if 0 < len(item.speeds) < _FEWEST:
            return f"{item.label} has {plural(len(item.speeds), 'train record')}, and the first updates are slow"
    speed, reference = facts.images_per_sec, first.images_per_sec
    more = facts.processors / first.processors if facts.processors and first.processors else None
    if speed and reference and more and more > 1 and speed / reference > more * _MOST_EFFICIENT:
        return (
            f"it came to {speed / reference:.2f}{TIMES} the speed with {more:g}{TIMES} the processors, so something"
            f" held {first.label} up"
        )
    return ""


def _also_differs(facts: Facts, first: Facts) -> list[str]:
    """Other settings than strategy and ranks that change the speed."""
    own, theirs = dict(flatten(facts.config)), dict(flatten(first.config))
    keys = [key for key in _keys(own, theirs) if is_about_speed([key]) and not key.startswith(("strategy.", "launch."))]
    found = [f"{key} {text(own.get(key))} and not {text(theirs.get(key))}" for key in keys if key != "data.root"]
    for key in ("precision", "device"):
        mine, other = facts.started(key), first.started(key)
        if mine and other and mine != other and not any(name.endswith(f".{key}") for name in keys):
            found.append(f"{key} {mine} and not {other}")
    return found


def differences(runs: Sequence[Facts]) -> tuple[Row, list[Row]]:
    """Header and rows of the settings that are not the same in all runs: a column a run, of many runs a row each."""
    ignored = ("launch.", "monitor.", "collaborative.", "data.root", "data.workers")
    flat = [dict(flatten(facts.config)) for facts in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if not key.startswith(ignored))
    nodes = ["launch.nodes", "launch.ntasks_per_node", "launch.gpus_per_node"]
    rows = [
        (key, *(text(settings.get(key)) for settings in flat))
        for key in [*keys, *nodes]
        if len({repr(settings.get(key)) for settings in flat}) > 1
    ]
    labels = [facts.label for facts in runs]
    if not rows or len(runs) <= _MOST_COLUMNS:
        return ("setting", *labels), rows
    header, *turned = zip(("run", *labels), *rows, strict=True)
    return header, turned


def _compared(facts: Facts, first: Facts) -> Row:
    same_work, same_speed = not other_work(facts, first), not no_speed_up(facts, first)
    speed, reference = facts.images_per_sec, first.images_per_sec
    speed_up = speed / reference if same_speed and speed and reference else None
    more = facts.processors / first.processors if facts.processors and first.processors else None
    seconds, first_seconds = facts.train_seconds, first.train_seconds
    same_length = same_work and not _other_length(facts, first)
    ratio = first_seconds / seconds if same_speed and same_length and seconds and first_seconds else None
    used, first_used = (max(item.memory_of_ranks, default=None) for item in (facts, first))
    same_pass = same_work and not _other_pass(facts, first) and facts is not first
    saved = 100 * (1 - used / first_used) if same_pass and used and first_used else None
    metric = facts.headline
    return (
        facts.label,
        text(facts.setting("strategy.name")),
        text(facts.processors),
        str(facts.steps) if facts.begun else NONE,
        number(facts.best, metric.spec, f" {metric.unit}".rstrip()),
        number(facts.tested, metric.spec, f" {metric.unit}".rstrip()),
        duration(seconds),
        rate(speed),
        number(speed_up, ".2f", TIMES),
        number(speed_up / more * 100 if speed_up and more else None, ".0f", " %"),
        number(ratio, ".2f", TIMES),
        memory(used),
        number(saved if saved is None else round(saved), "+", " %"),
    )


def other_work(facts: Facts, first: Facts) -> list[str]:
    """Settings by which an image is another amount of work."""
    own, theirs = _work(facts), _work(first)
    return [f"{key} {text(own.get(key))} and not {text(theirs.get(key))}" for key in _keys(own, theirs)]


def _other_length(facts: Facts, first: Facts) -> list[str]:
    """Why the times of two runs are not compared."""
    if unfinished := [item.label for item in (first, facts) if not item.finished]:
        return [f"{' and '.join(unfinished)} did not come to the end"]
    still = [(item.label, item.still_seconds) for item in (first, facts)]
    if paused := [
        f"{label} stood still for {duration(seconds)} of its training" for label, seconds in still if seconds
    ]:
        return paused
    own, theirs = _images(facts), _images(first)
    return [] if own == theirs else [f"it saw {own:,} images and not {theirs:,}"]


def _other_pass(facts: Facts, first: Facts) -> list[str]:
    """Why the memory of two runs is not compared."""
    own, theirs = (item.started("micro_batch_size") for item in (facts, first))
    kinds = [item.started("device") for item in (facts, first)]
    if None in kinds or (own is None) != (theirs is None):
        return ["one of the two has not told its device or the images of a pass"]
    different = [] if own == theirs else [f"a rank takes {own} images in one pass and not {theirs}"]
    if kinds[0] != kinds[1]:
        different.append(f"it ran on {kinds[0]} and not {kinds[1]}")
    # On a CPU the memory is that of the process, which tried larger batches first.
    tried = [item.label for item in (facts, first) if any(e.get("event") == "probed" for e in item.events)]
    if kinds[0] == "cpu" and tried:
        different.append(f"train.micro_batch_size=auto has tried sizes in the process of {' and '.join(tried)}")
    return different


def _images(facts: Facts) -> int:
    return facts.steps * facts.count("train.global_batch_size")


def _work(facts: Facts) -> dict[str, Any]:
    flat = dict(flatten(facts.config))
    return {key: value for key, value in flat.items() if key.startswith(_WORK) and key not in _NO_WORK}


def _keys(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys([*own, *theirs]) if own.get(key) != theirs.get(key)]


def is_simulated(facts: Facts) -> bool:
    """Whether several nodes were one machine."""
    hosts, nodes = facts.started("hosts"), facts.setting("launch.nodes")
    return isinstance(hosts, list) and len(hosts) == 1 and isinstance(nodes, int) and nodes > 1


def _throughput(runs: Sequence[Facts]) -> Picture | None:
    """A bar a run; no ratio where speeds do not compare."""
    known = [(facts, speed) for facts in runs if (speed := facts.images_per_sec)]
    if not known:
        return None
    reference, reference_speed = known[0]
    bars = []
    for facts, speed in known:
        same = reference is runs[0] and facts is not reference and not no_speed_up(facts, reference)
        more = facts.processors / reference.processors if facts.processors and reference.processors else 1.0
        ratio = f"  {speed / reference_speed:.2f}{TIMES}" if same else ""
        mark = reference_speed * more if same and more != 1 else None
        bars.append(Bar(facts.label, speed, rate(speed) + ratio, GREY if facts is reference else 0, mark=mark))
    unit = "images/s, median" + "; |: linear scaling" * any(bar.mark for bar in bars)
    return bar_chart("Training throughput", unit, bars)


def scaling(runs: Sequence[Facts]) -> Section:
    """Speed-up and efficiency against the run with the fewest processors, where not all have as many.

    Of several runs with as many processors the median counts; those that do not compare are left out.
    """
    known = [(facts, many, speed) for facts in runs if (many := facts.processors) and (speed := facts.images_per_sec)]
    known.sort(key=lambda item: item[1])
    reasons = {facts.label: no_speed_up(facts, known[0][0]) for facts, _, _ in known}
    told = [item for item in known if not reasons[item[0].label]]
    speeds = {many: statistics.median(speed for _, other, speed in told if other == many) for _, many, _ in told}
    if len(speeds) < 2:
        return Section("scaling", "Scaling", ())
    fewest, most = min(speeds), max(speeds)
    up = [(float(many), speed / speeds[fewest]) for many, speed in speeds.items()]
    share = [(many, 100 * ratio * fewest / many) for many, ratio in up]
    linear = Series("linear", [(float(fewest), 1.0), (float(most), most / fewest)], GREY, label="linear", dashed=True)
    measured = Series("measured", up, label=f"{up[-1][1]:.2f}{TIMES}")
    efficiency = Series("efficiency", share, label=f"{share[-1][1]:.0f} %")
    axes = Axes("Speed-up", TIMES, "processors", "scaling", low=0.0)
    percent = Axes("Efficiency", "%", "processors", "scaling", low=0.0, high=100.0)
    charts = [line_chart(axes, [linear, measured], x_from=0.0), line_chart(percent, [efficiency], x_from=0.0)]
    rows = [
        (facts.label, str(many), rate(speed), f"{speed / speeds[fewest]:.2f}{TIMES}",
         f"{100 * speed / speeds[fewest] * fewest / many:.0f} %")
        for facts, many, speed in told
    ]  # fmt: skip
    note = f"Median images/s against {told[0][0].label}, the smallest. Processors: ranks, or GPUs under DataParallel."
    note += "".join(f" Without {label}: {reason}." for label, reason in reasons.items() if reason)
    table = Table(("run", "processors", "images/s", "speed-up", "efficiency"), rows, 1)
    return Section("scaling", "Scaling", [Charts("scaling", charts, "speed-up and efficiency"), table], note)


def outcome(runs: Sequence[Facts]) -> list[str]:
    """How far a sweep came, and its best run, in sentences; ``runs`` has the best first."""
    first, name, metric = runs[0], runs[0].described.headline, runs[0].headline
    lines = [f"{sum(facts.finished for facts in runs)} of {len(runs)} runs have finished."]
    if first.best is not None and set(first.point) == {"seed"}:
        val, test = (spread(values) for values in ([f.best for f in runs], [f.tested for f in runs]))
        unit = "In percent, over" if metric.unit == "%" else "Over"
        lines.append(f"{unit} the seeds: val {name} {val}" + f", test {name} {test}" * (test != NONE) + ".")
    elif first.best is not None:
        tested = f", test {name} {metric.text(first.tested)}" if first.tested is not None else ""
        equal = sum(facts.best == first.best for facts in runs) - 1
        others = f" and {plural(equal, 'other')}" if equal else ""
        unfinished = "" if first.finished else " It has not finished."
        best = f"{first.label}{others}, val {name} {metric.text(first.best)}"
        lines.append(f"Best by validation: {best}{tested}.{unfinished}")
    elif any(facts.begun for facts in runs):
        lines.append("No validation was reached.")
    if diverged := [facts.label for facts in runs if facts.setbacks.diverged]:
        lines.append(f"Diverged: {', '.join(diverged)}.")
    return lines


def swept(runs: Sequence[Facts]) -> Section:
    """The results of a sweep; ``runs`` has the best first."""
    every, *means = sweep_tables(runs)
    keys = [key for key in runs[0].point if key != "seed"]
    charts = Charts("results", [_against(key, runs) for key in keys], "results against what was swept")
    parts: list[Part] = [*means, *[charts] * bool(charts)]
    if len(runs) > _MOST_ROWS and parts:  # they would push what they come to off the screen
        parts.append(Fold(f"All {len(runs)} runs", [every]))
    else:
        parts.insert(0, every)
    note = "The best by validation first." if runs[0].best is not None else ""
    return Section("results", "Results", parts, note + " Dots: single runs; lines: their means." * bool(charts))


def sweep_tables(runs: Sequence[Facts]) -> list[Table]:
    """All runs; and, where seeds were swept, the means over them."""
    keys = list(dict.fromkeys(key for facts in runs for key in facts.point))
    name, spec = runs[0].described.headline, runs[0].headline.spec
    rows: list[Row] = []
    groups: dict[Row, list[Facts]] = {}
    for facts in runs:
        best = (number(facts.best, spec), number((facts.best_val or {}).get("epoch"), ".1f"))
        rest = (number(facts.tested, spec), duration(facts.train_seconds), _remark(facts))
        rows.append((facts.run_dir.path.name, *(facts.point.get(key, NONE) for key in keys), *best, *rest))
        groups.setdefault(tuple(facts.point.get(key, NONE) for key in keys if key != "seed"), []).append(facts)
    tables = [Table(("folder", *keys, f"val {name}", "epoch", f"test {name}", "training time", ""), rows, 1)]
    if "seed" in keys:

        def mean(group: Sequence[Facts]) -> float:
            known = [facts.best for facts in group if facts.best is not None]
            sign = -1 if runs[0].headline.higher_is_better else 1
            return sign * statistics.fmean(known) if known else float("inf")

        means = [
            (*values, str(len(group)), spread([f.best for f in group], spec), spread([f.tested for f in group], spec))
            for values, group in sorted(groups.items(), key=lambda item: mean(item[1]))
        ]
        others = [key for key in keys if key != "seed"]
        tables.append(Table((*others, "seeds", f"val {name}, mean ± sd", f"test {name}, mean ± sd"), means, 1))
    return tables


def _remark(facts: Facts) -> str:
    if facts.finished:
        return "diverged" if facts.setbacks.diverged else ""
    last: Mapping[str, object] = next(
        (event for event in reversed(facts.events) if event.get("event") in ("failed", "ended")), {}
    )
    if last.get("event") == "failed" or last.get("state") not in (None, "COMPLETED"):
        return str(last.get("state", "FAILED"))
    return f"{facts.steps} steps so far" if facts.begun else "not begun"


def spread(values: Sequence[float | None], spec: str = ".2f") -> str:
    """``91.00 ± 1.41``: mean and standard deviation of those that are known, and of how many where not of all."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    deviation = f" ± {statistics.stdev(known):{spec}}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):{spec}}{deviation}" + f" (of {len(known)})" * (len(known) < len(values))


def _against(key: str, runs: Sequence[Facts]) -> Picture | None:
    """The headline against one swept setting, a line for each choice of the others; seeds are averaged."""
    values = [_as_number(facts.point.get(key)) for facts in runs]
    placed = [
        (x, facts.best, name_of({k: v for k, v in facts.point.items() if k not in (key, "seed")}))
        for x, facts in zip(values, runs, strict=True)
        if x is not None and facts.best is not None
    ]
    if len({x for x, _, _ in placed}) < 2 or None in values:
        return None
    series, name, metric = [], runs[0].described.headline, runs[0].headline
    for colour, choice in enumerate(list(dict.fromkeys(name for _, _, name in placed))[:COLOURS]):
        own = [(x, value) for x, value, name in placed if name == choice]
        means = [(at, statistics.fmean(y for x, y in own if x == at)) for at in sorted({x for x, _ in own})]
        series.append(Series(choice or f"val {name}", means, colour, label=choice or f"{means[-1][1]:.3g}"))
        for at, _ in means:
            if len(ys := [y for x, y in own if x == at]) > 1:
                series += [Series(f"{choice} single run".strip(), [(at, y)], colour, faint=True) for y in ys]
    title = f"{metric.label}, validation"
    return line_chart(Axes(title, metric.unit, key, f"swept {key}", x_may_be_log=True), series)


def _as_number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if fileio.is_number(number) else None

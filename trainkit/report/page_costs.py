"""Where the time went, how hard the hardware worked, and what more of it has brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from trainkit.report import comparing, tables
from trainkit.report.drawing import time_unit
from trainkit.report.facts import Facts
from trainkit.report.page_chart import COLOURS, Axes, Series, line_chart
from trainkit.report.page_markup import NOTHING, Html, join, section, table, tag
from trainkit.report.page_scales import Point
from trainkit.report.samples import HostSamples
from trainkit.report.tables import TIMES, Row, number

# The parts of an update by what a reader looks for: computing is blue, waiting is not.
_COLOURS = {
    "data": 4, "copy": 5, "forward": 0, "backward": 6, "exposed": 1, "optimizer": 2, "checkpoint": 3, "evaluation": 7,
}  # fmt: skip
_OTHER = 7
_MEANING = {
    "data": "waiting for data", "exposed": "communication that computing does not hide", "copy": "preparing a batch",
    "checkpoint": "waiting for a checkpoint", "start": "start to first batch", "other": "the loop itself",
}  # fmt: skip
_MOST_HOSTS, _MOST_LABELS = 8, 4


def spent(runs: Sequence[Facts]) -> Html:
    """The section on where the time of rank 0 went."""
    told = [(facts, parts) for facts in runs if (parts := facts.spent)]
    if not told:
        return NOTHING
    names = list(dict.fromkeys(name for _, parts in told for name in parts))
    pictures: list[object] = []
    for facts, parts in told:
        if len(told) > 1:
            pictures.append(tag("p", f"{facts.label}, {tables.duration(sum(parts.values()))}", class_="note"))
        pictures.append(_bar(facts.label, parts))
    keys = [tag("li", tag("span", class_=f"swatch block {_colour(name)}"), name) for name in names]
    rows: list[Row] = []
    for name in names:
        cells = []
        for _, parts in told:
            share = 100 * parts.get(name, 0.0) / sum(parts.values())
            cells += [number(parts.get(name), ",.1f"), number(share if name in parts else None, ".1f", " %")]
        rows.append((name + (f": {_MEANING[name]}" if name in _MEANING else ""), *cells))
    heads = [head for facts, _ in told for head in (f"{facts.label}, s" if len(told) > 1 else "seconds", "of all")]
    whole = table(("part", *heads), rows, numbers_from=1)
    note = "Time of rank 0 over all attempts; at any moment it is spent on exactly one thing."
    return section(
        "time", "Where the time went", tag("div", *pictures, class_="lanes"), tag("ul", *keys, class_="legend"), whole,
        note=note,
    )  # fmt: skip


def _colour(name: str) -> str:
    return f"c{_COLOURS[name]}" if name in _COLOURS else f"c{_OTHER} quiet"


def _bar(label: str, parts: dict[str, float]) -> Html:
    total, before = sum(parts.values()), 0.0
    found = []
    for name, seconds in parts.items():
        share = 100 * seconds / total
        said = tag("title", f"{name} {seconds:,.1f} s, {share:.1f} %")
        style = f"part {_colour(name)}"
        found.append(tag("rect", said, x=f"{before:.3f}%", y=0, width=f"{share:.3f}%", height=26, class_=style))
        if share > 8.5:
            at, style = f"{before + share / 2:.3f}%", "inside middle" + " on-quiet" * (name not in _COLOURS)
            style += " if-wide" * (share < 24)
            found.append(tag("text", f"{name} {share:.0f} %", x=at, y=17, class_=style))
        before += share
    words = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in parts.items())
    return tag("svg", *found, width="100%", height=26, role="img", aria_label=f"{label}: {words}", class_="fluid")


def hardware(runs: Sequence[Facts]) -> Html:
    """The section with a table of all devices and, of each node, curves."""
    parts: list[object] = []
    for facts in runs:
        if not facts.hosts:
            continue
        if len(runs) > 1:
            parts.append(tag("h3", facts.label))
        parts.append(table(tables.HARDWARE, tables.hardware_rows(facts), numbers_from=1))
        charts = [chart for host in facts.hosts[:_MOST_HOSTS] for chart in _host(host, facts.label)]
        if any(charts):
            parts.append(tag("div", *charts, class_="charts"))
        if len(facts.hosts) > _MOST_HOSTS:
            parts.append(tag("p", f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes.", class_="note"))
        for host, text in facts.gpus_shown[:_MOST_HOSTS]:
            parts.append(tag("details", tag("summary", f"nvidia-smi on {host}"), tag("pre", text, tabindex=0)))
    return section("hardware", "Hardware", *parts)


def _host(host: HostSamples, run: str) -> list[Html]:
    gpus = host.gpu_indices()
    times = [float(sample["time"]) for sample in host.samples]
    began, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return []
    unit, scale = time_unit(seconds)

    def line(name: str, key: str, colour: int, gpu: int | None = None, by: float = 1.0) -> Series:
        points = sorted(((time - began) / scale, value / by) for time, value in host.series(key, gpu))
        label = f"{name} {points[-1][1]:{'.1f' if by > 1 else '.0f'}}" if points else ""
        return Series(name, points, colour % COLOURS, label=label, lost=_pauses(points))

    def of_gpus(key: str, by: float = 1.0) -> list[Series]:
        lines = [line(f"GPU {index}", key, at, index, by) for at, index in enumerate(gpus)]
        if len(lines) <= _MOST_LABELS:
            return lines
        mean = _mean(lines)  # so many labels would be a thicket
        label = f"GPUs {mean[-1][1]:{'.1f' if by > 1 else '.0f'}}" if mean else ""
        faint = [replace(item, colour=0, faint=True, label="") for item in lines]
        return [*faint, Series("GPUs, mean", mean, 0, label=label, lost=_pauses(mean))]

    memory = [line("node", "memory_used_mb", 7, None, 1024.0), line("job", "process_memory_mb", 5, None, 1024.0)]
    kinds = (
        ("use", "%", [*of_gpus("util_percent"), line("CPUs", "cpu_percent", 7)], 100.0),
        ("memory", "GB", [*of_gpus("memory_used_mb", 1024.0), *memory], None),
        ("power", "W", of_gpus("power_w"), None),
    )
    return [
        line_chart(
            Axes(f"{host.host} · {what}", of, unit, f"{run} {host.host}", low=0.0, high=high),
            lines,
            x_from=0.0,
            x_to=seconds / scale,
        )
        for what, of, lines, high in kinds
    ]


def _mean(lines: Sequence[Series]) -> list[Point]:
    """The mean of all lines at each place."""
    values: dict[float, list[float]] = {}
    for x, y in (point for item in lines for point in item.points):
        values.setdefault(x, []).append(y)
    return [(x, fmean(values[x])) for x in sorted(values)]


def _pauses(points: Sequence[Point]) -> list[float]:
    """Places where samples are missing, between two attempts."""
    if len(points) < 3:
        return []
    usual = median(after[0] - before[0] for before, after in pairwise(points))
    return [(a[0] + b[0]) / 2 for a, b in pairwise(points) if b[0] - a[0] > 3 * usual > 0]


def scaling(runs: Sequence[Facts]) -> Html:
    """Speed-up and efficiency against the run with the fewest processors; nothing where all have as many.

    Of several runs with as many processors the median counts; those that do not compare are left out.
    """
    known = [(facts, many, speed) for facts in runs if (many := facts.processors) and (speed := facts.images_per_sec)]
    known.sort(key=lambda item: item[1])
    reasons = {facts.label: comparing.no_speed_up(facts, known[0][0]) for facts, _, _ in known}
    told = [item for item in known if not reasons[item[0].label]]
    speeds = {many: median(speed for _, other, speed in told if other == many) for _, many, _ in told}
    if len(speeds) < 2:
        return NOTHING
    fewest, most = min(speeds), max(speeds)
    times = {many: speed / speeds[fewest] for many, speed in speeds.items()}
    share = {many: 100 * ratio * fewest / many for many, ratio in times.items()}
    ideal = Series("linear", [(float(fewest), 1.0), (float(most), most / fewest)], 7, label="linear", faint=True)
    up = Series("measured", _points(times), 0, label=f"{times[most]:.2f}{TIMES}")
    efficiency = Series("efficiency", _points(share), 0, label=f"{share[most]:.0f} %")
    charts = [
        line_chart(
            Axes("Speed-up", TIMES, "processors", "scaling", low=0.0), [ideal, up], x_from=0.0, x_to=float(most)
        ),
        line_chart(
            Axes("Efficiency", "%", "processors", "scaling", low=0.0, high=100.0),
            [efficiency],
            x_from=0.0,
            x_to=float(most),
        ),
    ]
    rows = [
        (facts.label, str(many), f"{speed:,.0f}", f"{speed / speeds[fewest]:.2f}{TIMES}",
         f"{100 * speed / speeds[fewest] * fewest / many:.0f} %")
        for facts, many, speed in told
    ]  # fmt: skip
    header = ("run", "processors", "images/s", "speed-up", "efficiency")
    note = f"Median images/s against {told[0][0].label}, the smallest. Processors: ranks, or GPUs under DataParallel."
    note += "".join(f" Without {label}: {reason}." for label, reason in reasons.items() if reason)
    parts = tag("div", *charts, class_="charts"), table(header, rows, numbers_from=1)
    return section("scaling", "Scaling", join(parts), note=note)


def _points(values: Mapping[int, float]) -> list[Point]:
    return [(float(x), y) for x, y in values.items()]

"""Sections with charts: curves, time line, where the time went, hardware."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.hosts import fold
from trainkit.common.terminal import plural
from trainkit.config.task_metrics import Metric
from trainkit.report import charts
from trainkit.report.charts import COLOURS, GREY, Axes, Picture, Point, Series, line_chart, svg_of, time_unit
from trainkit.report.collection import best_of
from trainkit.report.document import Block, Charts, Fold, Part, ReportRow, ReportSection, Table, Text
from trainkit.report.facts import Facts
from trainkit.report.hardware_samples import HostSamples
from trainkit.report.values import NONE, duration, memory, number, numbers_of, text

_PACE = {"lr": Metric("", label="Learning rate"), "images_per_sec": Metric("images/s", label="Throughput")}
"""Curves of train records that are of no metric."""
_FEW_EPOCHS = 2.0
"""An axis of so few epochs would have two numbers: steps are drawn."""
_MOST_LANES = 40
_MOST_ROWS = 100
_MOST_MARKS = 300
_MOST_HOSTS = 8
_SHOWN_BYTES = 16384
_MOST_LABELS = 4
"""Lines of GPUs with labels; of more GPUs the mean has one."""


def curves(runs: Sequence[Facts]) -> ReportSection:
    """Curves of train and val: of one run in two colours, of the best of several runs each in its own."""
    known = [facts for facts in runs if facts.train or facts.val]
    if not known:
        return ReportSection("curves", "Curves", ())
    drawn = best_of(known, COLOURS)
    is_one = len(drawn) == 1
    records: list[dict[str, Any]] = []
    metrics: dict[str, Metric] = {}
    for facts in drawn:
        records += [*facts.train, *facts.val]
        metrics |= facts.task_metrics.metrics
    by = "step"
    if _largest(records, "epoch", 0.0) > _FEW_EPOCHS:
        by = "epoch"
    x_to = _largest(records, by, 1.0)
    restarts: list[Point] = []
    legend: list[tuple[str, int]] = []
    every = 1
    for colour, facts in enumerate(drawn):
        every = max(every, facts.metrics.every)
        if not is_one:
            legend.append((facts.label, colour))
        for place in facts.restarts(by):
            restarts.append((place, GREY if is_one else colour))
    pictures = []
    for key, metric in (metrics | _PACE).items():
        axes = Axes(metric.label, metric.unit, by, "curves", key in _PACE, x_to, key == "loss", restarts=restarts)
        pictures.append(line_chart(axes, _series(drawn, key, metric, by)))
    title = "loss, metrics, learning rate and throughput"
    whole = Charts("curves", pictures, title, legend)

    notes = []
    if not is_one and any(facts.val for facts in drawn):
        notes.append("Thick: validation. Thin: training.")
    if restarts:
        notes.append("Dotted lines: a later attempt went on.")
    if every > 1:
        notes.append(
            f"Of the train records one in {every} is in the curves, medians and estimates here; in the curves also"
            " those with the largest and the smallest loss of each stretch, and the first that is no number."
        )
    if len(known) > COLOURS:
        notes.append(f"The best {COLOURS} of {len(known)} runs, by validation.")
    return ReportSection("curves", "Curves", [whole], " ".join(notes))


def _largest(records: Sequence[Mapping[str, Any]], key: str, default: float) -> float:
    return max(numbers_of(records, key), default=default)


def _series(runs: Sequence[Facts], key: str, metric: Metric, by: str) -> list[Series]:
    """Train and val of one run in two colours; of several each in its own, and train faintly beside val."""
    is_measured = key not in _PACE
    has_val = is_measured and any(key in record for facts in runs for record in facts.val)
    spec = ".3g"
    if metric.unit == "%":
        spec = ".1f"
    splits = ["train"]
    if has_val:
        splits.append("val")
    found = []
    for split, (colour, facts) in product(splits, enumerate(runs)):
        points, lost = facts.curve(key, by, split)
        label = ""
        if points and is_measured:
            label = format(points[-1][1], spec)
        if len(runs) > 1:
            is_faint = has_val and split == "train"
            found.append(Series(f"{facts.label} {split}", points, colour, is_faint, label=label, lost=lost))
        else:
            if label:
                label = f"{split} {label}"
            found.append(Series(split, points, int(split == "val"), label=label, lost=lost))
    return found


_TOLD = (
    "refused", "failed", "cancelled", "excluded", "nonfinite", "rolled_back", "swarm_lost", "swarm_back",
    "average_refused", "peer_banned", "save_failed", "upload_failed",
)  # fmt: skip
"""Events that the table of attempts has not all."""


_NUMBERED = ("attempt", "step", "rank", "round")
"""Fields of events that are told with their names."""
_SAID = ("host", "node", "name", "why", "error")


class _Lane:
    """A run's time, from its first submission; without events where nothing of it has a time."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.events = [event for event in facts.events if jsonl.is_time(event.get("time"))]
        starts = numbers_of(facts.events_of("submitted", "started"), "time")
        if not starts:
            self.events = []
        self.began = min(starts, default=0.0)
        ends = numbers_of([*facts.train[-1:], *facts.val[-1:], *self.events], "time")
        self.seconds = max(ends, default=0.0) - self.began

    def in_words(self) -> str:
        """Attempts, training, waiting and requeues."""
        facts = self.facts
        if not facts.begun:
            if self.seconds <= 0:
                return "It has not begun."
            return f"It has not begun, {duration(self.seconds)} after it was queued."
        running = sum(span.seconds for span in facts.spans)
        waiting = self.seconds - running
        words = [plural(facts.attempts, "attempt"), f"{duration(running)} of training"]
        if waiting > 0.02 * running:
            words.append(f"{duration(waiting)} waiting and starting")
        if facts.requeues:
            words.append(plural(facts.requeues, "requeue"))
        return f"{', '.join(words)}."

    def picture(self, longest: float, name: str) -> Picture:
        """Draw the lane of ``longest`` seconds, under its title, which begins with ``name``."""

        def at(time: float) -> float:
            return 100 * min(1.0, max(0.0, (time - self.began) / (longest or 1.0)))

        waits = []
        bars = []
        waits_from = self.began
        for span in self.facts.spans[:_MOST_MARKS]:
            if span.began > waits_from:
                waits.append((at(waits_from), at(span.began)))
            goes_on = span is self.facts.spans[-1] and not span.how
            colour = 0
            if not span.went_well and not goes_on:
                colour = 1
            bars.append((at(span.began), max(0.15, at(span.ended) - at(span.began)), colour))
            waits_from = span.ended
        if self.began + self.seconds > waits_from:
            waits.append((at(waits_from), at(self.began + self.seconds)))
        saved = []
        for event in self.events:
            if event["event"] == "saved":
                saved.append(at(event["time"]))
        saved = saved[:: max(1, len(saved) // _MOST_MARKS)]
        words = self.in_words()
        body = svg_of("lane", waits=waits, spans=bars, saved=saved, ticks=_time_ticks(longest))
        return Picture(name + words, "", body, f"Time line of {self.facts.label}: {words}", 42)

    def happened(self) -> list[ReportRow]:
        """Its events in words, of many the first and the last."""
        rows: list[ReportRow] = []
        for event in self.events:
            if event["event"] in _TOLD:
                after = duration(max(0.0, event["time"] - self.began))
                rows.append((after, event["event"].replace("_", " "), _details(event)))
        half = _MOST_ROWS // 2
        more = len(rows) - _MOST_ROWS
        if more <= 0:
            return rows
        return [*rows[:half], ("", f"{more} more", ""), *rows[-half:]]


def _details(event: Mapping[str, Any]) -> str:
    words = []
    for key in _NUMBERED:
        if event.get(key) is not None:
            words.append(f"{key} {event[key]}")
    for key in _SAID:
        if event.get(key):
            words.append(str(event[key]))
    return ", ".join(words)


def _time_ticks(longest: float) -> list[tuple[float, str]]:
    """(percent of the width, words) along an axis of so many seconds."""
    if longest <= 0:
        return []
    unit, seconds = time_unit(longest)
    ticks = charts.Scale(0.0, longest / seconds, 0, 100)
    return [(ticks(tick), f"{charts.shown(tick)} {unit}") for tick in ticks.ticks(6)]


def timeline(runs: Sequence[Facts]) -> ReportSection:
    """Show when each run waited, ran, saved and was interrupted: a lane a run, and what happened in words."""
    lanes = []
    for facts in runs:
        lane = _Lane(facts)
        if lane.events:
            lanes.append(lane)
    longest = max((lane.seconds for lane in lanes), default=0.0)
    pictures: list[Picture | None] = []
    tables: list[Part] = []
    for lane in lanes[:_MOST_LANES]:
        label = lane.facts.label
        title = ""
        if len(runs) > 1:
            title = f"{label}: "
        pictures.append(lane.picture(longest, title))
        caption = "What happened"
        if len(lanes) > 1:
            caption = label
        table = Table(("after", "event", ""), lane.happened(), caption=caption)
        if table:
            tables.append(table)
    if len(tables) > 3:
        tables = [Fold("What happened, run by run", tables)]
    note = "From the first submission. Bars: training, orange where it failed; dotted: waiting; ticks: checkpoints."
    whole = Charts("timeline", pictures, "when it waited, ran and saved", wide=True)
    return ReportSection("timeline", "Time line", [whole, *tables], note)


def attempts(facts: Facts) -> list[Part]:
    """When each attempt ran, on what, and how it ended."""
    rows = []
    for span in facts.spans[-2 * _MOST_ROWS :]:
        began = datetime.fromtimestamp(span.began).astimezone()
        hosts = fold(span.hosts) or NONE
        how = terminal.one_line(span.how, 200) or "killed without a word, or goes on"
        steps = f"{span.from_step} to {span.to_step}"
        where = (hosts, text(span.ranks), steps)
        rows.append((str(span.number), f"{began:%Y-%m-%d %H:%M:%S}", *where, duration(span.seconds), how))
    return [Table(("attempt", "began", "on", "ranks", "steps", "time", "ended"), rows)]


# Parts of an update: computing is blue, waiting is not.
_PARTS = {
    "data": 4, "copy": 5, "forward": 0, "backward": 6, "exposed": 1, "optimizer": 2, "checkpoint": 3,
    "evaluation": GREY,
}  # fmt: skip
_MEANING = {
    "start": "until the ranks have met and the data is there", "data": "waiting for data",
    "copy": "preparing a batch", "exposed": "communication that computing does not hide",
    "checkpoint": "waiting for a checkpoint", "other": "records and the loop itself",
}  # fmt: skip


def spent(runs: Sequence[Facts]) -> ReportSection:
    """Show where the time of rank 0 went."""
    known = [facts for facts in runs if facts.spent]
    if not known:
        return ReportSection("time", "Where the time went", ())
    is_one = len(known) == 1
    header = ["part"]
    rows: dict[str, list[str]] = {}
    last_row = ["all"]
    bars = []
    for facts in known:
        total = sum(facts.spent.values())
        title = ""
        column = "seconds"
        if not is_one:
            title = f"{facts.label}, {duration(total)}"
            column = f"{facts.label}, s"
        header += [column, "of all"]
        last_row += [number(total, ",.1f"), "100 %"]
        bars.append(_stacked(title, facts, total))
        for name in facts.spent:
            rows.setdefault(name, [f"{name}: {_MEANING.get(name, '')}".removesuffix(": ")])
    legend = []
    for name, row in rows.items():
        legend.append((name, _PARTS.get(name, GREY)))
        for facts in known:
            seconds = facts.spent.get(name)
            row += [number(seconds, ",.1f"), number(seconds and 100 * seconds / sum(facts.spent.values()), ".1f", " %")]
    whole = Charts("time", bars, "where the time of rank 0 went", legend, wide=True)
    note = "Time of rank 0 over all attempts; at any moment it is spent on exactly one thing."
    table = Table(tuple(header), list(map(tuple, [*rows.values(), last_row])), 1)
    return ReportSection("time", "Where the time went", [whole, table], note)


def _stacked(title: str, facts: Facts, total: float) -> Picture:
    before = 0.0
    pieces = []
    words = []
    for name, seconds in facts.spent.items():
        share = 100 * seconds / total
        words.append(f"{name} {share:.0f} %")
        pieces.append((before, share, _PARTS.get(name, GREY), words[-1]))
        before += share
    return Picture(title, "", svg_of("stack", parts=pieces), f"{facts.label}: {', '.join(words)}", 26)


def hardware(facts: Facts) -> list[Part]:
    """A row for every GPU and for every host's CPUs, and curves of each node."""
    header = ("device", "utilisation, mean", "highest", "memory, highest", "power, mean", "temperature, highest")
    rows: list[ReportRow] = []
    pictures: list[Picture | None] = []
    for place, host in enumerate(facts.hosts):
        for gpu in (*host.gpus(), None):
            rows.append(_device_row(host, gpu))
        if place < _MOST_HOSTS:
            pictures += _host(host, facts.label)
    parts: list[Part] = [Table(header, rows, 1), Charts("hardware", pictures, "use of the hardware over time")]
    if len(facts.hosts) > _MOST_HOSTS:
        parts.append(Text([f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes."]))
    for file in sorted(facts.run_dir.path.glob("nvidia-smi-*.txt"))[:_MOST_HOSTS]:  # from when GPUs held most memory
        with suppress(OSError):
            output = terminal.lines(fileio.read_end(file, _SHOWN_BYTES)).rstrip()
            name = terminal.one_line(file.stem.removeprefix("nvidia-smi-"))
            parts.append(Fold(f"GPUs of {name}, as nvidia-smi has them", [Block(output)]))
    return parts


def _device_row(host: HostSamples, gpu: int | None) -> ReportRow:
    """A row of a GPU; None: of the host's CPUs."""
    if gpu is None:
        device = "CPUs"
        use = host.usage("cpu_percent")
        power = heat = None
    else:
        device = f"GPU {gpu}"
        use = host.usage("util_percent", gpu)
        power = host.usage("power_w", gpu)
        heat = host.usage("temperature_c", gpu)
    used = host.usage("memory_used_mb", gpu)
    total = host.usage("memory_total_mb", gpu)
    held = memory(used and used.highest)
    if used and total:
        held += f" of {memory(total.highest)}"
    return (
        f"{device} of {host.host}",
        number(use and use.mean, ".0f", " %"),
        number(use and use.highest, ".0f", " %"),
        held,
        number(power and power.mean, ".0f", " W"),
        number(heat and heat.highest, ".0f", " °C"),
    )


class _HostCurves:
    """Curves of one host over the time that it was sampled, in ``unit``s of so many ``scale`` seconds."""

    def __init__(self, host: HostSamples) -> None:
        self.host = host
        times = numbers_of(host.samples, "time")
        self.began = min(times)
        self.seconds = max(times) - self.began
        self.unit, self.scale = time_unit(self.seconds)

    def points(self, key: str, gpu: int | None = None, by: float = 1.0) -> list[Point]:
        """Readings divided by ``by``."""
        found = []
        for time, value in self.host.curve(key, gpu):
            found.append(((time - self.began) / self.scale, value / by))
        return sorted(found)

    def line(self, name: str, points: list[Point], colour: int, spec: str) -> Series:
        """A line with its last value in its label."""
        label = ""
        if points:
            label = f"{name} {points[-1][1]:{spec}}"
        return Series(name, points, colour % COLOURS, label=label, pauses=_pauses(points))

    def gpus(self, key: str, spec: str = ".0f", by: float = 1.0) -> list[Series]:
        """A line a GPU; of many GPUs faint ones, and their mean behind them."""
        lines = []
        faint = []
        values = defaultdict[float, list[float]](list)
        for at, index in enumerate(self.host.gpus()):
            points = self.points(key, index, by)
            lines.append(self.line(f"GPU {index}", points, at, spec))
            faint.append(lines[-1]._replace(colour=0, faint=True))
            for x, y in points:
                values[x].append(y)
        if len(lines) <= _MOST_LABELS:
            return lines
        mean = [(x, fmean(values[x])) for x in sorted(values)]
        return [*faint, self.line("GPU mean", mean, 0, spec)]


def _host(host: HostSamples, run: str) -> list[Picture | None]:
    """Charts of use, memory and power of a host."""
    found = _HostCurves(host)
    if found.seconds <= 0:
        return []
    use = [*found.gpus("util_percent"), found.line("CPUs", found.points("cpu_percent"), 7, ".0f")]
    used = found.gpus("memory_used_mb", ".1f", 1024.0)
    used.append(found.line("node", found.points("memory_used_mb", by=1024.0), 7, ".1f"))
    used.append(found.line("job", found.points("process_memory_mb", by=1024.0), 5, ".1f"))
    x_to = found.seconds / found.scale
    pictures = []
    for title, measure, lines in (("use", "%", use), ("memory", "GB", used), ("power", "W", found.gpus("power_w"))):
        axes = Axes(f"{host.host} · {title}", measure, found.unit, f"{run} {host.host}", from_zero=True, x_to=x_to)
        pictures.append(line_chart(axes, lines))
    return pictures


def _pauses(points: Sequence[Point]) -> list[float]:
    """Places where samples are missing, between two attempts."""
    if len(points) < 3:
        return []
    usual = median(after[0] - before[0] for before, after in pairwise(points))
    found = []
    for before, after in pairwise(points):
        if after[0] - before[0] > 3 * usual > 0:
            found.append((before[0] + after[0]) / 2)
    return found

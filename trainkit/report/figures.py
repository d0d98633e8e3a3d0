"""Sections with charts over time: curves, time line, where the time went, hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from trainkit import fileio, terminal
from trainkit.ranks.env import fold
from trainkit.report.charts import (
    COLOURS,
    GREY,
    Axes,
    Picture,
    Point,
    Series,
    join,
    line_chart,
    linear_ticks,
    shown,
    tag,
    time_unit,
)
from trainkit.report.document import (
    NONE,
    Block,
    Charts,
    Fold,
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
from trainkit.report.facts import Facts, HostSamples, Span, Usage, spans

MOST = COLOURS
"""Runs that are overlaid: nobody tells more colours apart."""
_FEW_EPOCHS = 2.0
"""An axis of so few epochs would have two numbers: steps are drawn."""
_MOST_LANES, _MOST_ROWS, _MOST_MARKS, _MOST_HOSTS, _MOST_LABELS = 40, 100, 300, 8, 4


def curves(runs: Sequence[Facts]) -> Section:
    """Of one run train and val in two colours; of several each in its own."""
    known = [facts for facts in runs if facts.train or facts.val]
    drawn = known if len(known) <= MOST else sorted(known, key=lambda facts: facts.rank)[:MOST]
    longest = max((r["epoch"] for f in drawn for r in (*f.train, *f.val) if "epoch" in r), default=0.0)
    by = "epoch" if longest > _FEW_EPOCHS else "step"
    one = len(drawn) == 1
    marks = [(x, GREY if one else colour) for colour, facts in enumerate(drawn) for x in facts.restarts(by)]
    x_to = max((r[by] for f in drawn for r in (*f.train, *f.val) if by in r), default=1.0)
    described = {name: each for facts in drawn for name, each in facts.described.metrics.items()}
    charts = []
    for key in [*described, "lr", "images_per_sec"]:
        metric = described.get(key)
        of_train = [_series(f.drawn, by, key, f, "train", colour, one) for colour, f in enumerate(drawn)]
        of_val = [_series(f.val, by, key, f, "val", colour, one) for colour, f in enumerate(drawn)] if metric else []
        series = [*of_train, *of_val]
        if not any(item.label for item in series):  # of runs that were never validated
            series = [replace(item, faint=False, label=_end_value(key, item.points, facts))
                      for item, facts in zip(of_train, drawn, strict=True)]  # fmt: skip
        title = metric.label if metric else "Learning rate" if key == "lr" else "Throughput"
        unit = (metric.unit if metric else "images/s" if key == "images_per_sec" else "") if key != "loss" else ""
        lost = "not finite" if key == "loss" else ""
        axes = Axes(title, unit, by, "curves", low=None if metric else 0.0, may_be_log=key == "loss", lost=lost)
        charts.append(line_chart(axes, series, x_from=0.0, x_to=x_to, marks=marks))
    notes = ["Dotted lines: a later attempt went on."] if marks else []
    if one and any(facts.best is not None for facts in drawn):
        notes.insert(0, "Ring: the best checkpoint.")
    if not one and any(facts.val for facts in drawn):
        notes.insert(0, "Thick: validation. Thin: training.")
    if every := max((facts.metrics.every for facts in drawn if facts.metrics.every > 1), default=0):
        notes.append(
            f"Of the train records one in {every} is in the curves, medians and estimates here; in the curves also"
            " those with the largest and the smallest loss of each stretch, and the first that is no number."
        )
    if len(known) > MOST:
        notes.append(f"The best {MOST} of {len(known)} runs, by validation.")
    legend = [] if one else [(facts.label, colour) for colour, facts in enumerate(drawn)]
    whole = Charts("curves", charts, "loss, metrics, learning rate and throughput", legend)
    return Section("curves", "Curves", [whole] if whole else [], " ".join(notes))


def _series(
    records: Sequence[dict[str, Any]], by: str, key: str, facts: Facts, split: str, colour: int, one: bool
) -> Series:
    metric = facts.described.find(key)
    placed = [record for record in records if fileio.is_number(record.get(by))]
    points = [(float(record[by]), float(record[key])) for record in placed if fileio.is_number(record.get(key))]
    lost = [float(record[by]) for record in placed if key in record and record[key] is None]
    end = _end_value(key, points, facts)
    name = split if metric else "images/s" if key == "images_per_sec" else key
    ring = None
    if one and split == "val" and key == facts.described.headline and facts.best is not None:
        ring = next(((x, y) for x, y in points if x == (facts.best_val or {}).get(by)), None)
    return Series(
        name=name if one else f"{facts.label} {split}" if metric else facts.label,
        points=points,
        colour=colour if not one else 0 if split == "train" else 1,
        faint=not one and metric is not None and split == "train",
        label=end if not metric else f"{split} {end}" if one and end else end if split == "val" else "",
        lost=lost if len(lost) < len(placed) else [],
        ring=ring,
    )


def _end_value(key: str, points: Sequence[Point], facts: Facts) -> str:
    if not points:
        return ""
    if key == "lr":
        return f"peak {max(y for _, y in points):.3g}"
    if key == "images_per_sec":
        return f"median {rate(median(y for _, y in points))}"
    metric = facts.described.find(key)
    return f"{points[-1][1]:{'.1f' if metric and metric.unit == '%' else '.3g'}}"


# kind of event -> its mark, its colour, and what it means; the shapes differ, for colours may not be seen
_GLYPHS = {
    "handed_back": ("▲", 4, "told to stop, saved"),
    "requeued": ("↻", 0, "put back into the queue"),
    "failed": ("✕", 1, "failed"),
    "cancelled": ("■", 1, "cancelled"),
    "excluded": ("⊘", 3, "a node is left out"),
    "nonfinite": ("!", 1, "not finite"),
    "rolled_back": ("↶", 3, "went back to a checkpoint"),
}
_WORDS = {
    "submitted": "queued", "refused": "refused", "started": "training begins", "ended": "ended",
    "swarm_lost": "has lost the swarm", "swarm_back": "is back in the swarm", "save_failed": "a save failed",
    "upload_failed": "the copy elsewhere failed",
} | {kind: words for kind, (_, _, words) in _GLYPHS.items()}  # fmt: skip


@dataclass
class _Lane:
    """A run's time, from its first submission."""

    facts: Facts
    began: float
    ended: float
    attempts: list[Span]

    def events(self, kinds: Iterable[str]) -> list[dict[str, Any]]:
        return [e for e in self.facts.events if e["event"] in kinds and fileio.is_time(e.get("time"))]

    def in_words(self) -> str:
        facts, whole = self.facts, self.ended - self.began
        if not facts.begun:
            return f"It has not begun, {duration(whole)} after it was queued." if whole > 0 else "It has not begun."
        running = sum(span.seconds for span in self.attempts)
        words = [plural(facts.attempts, "attempt"), f"{duration(running)} of training"]
        if whole - running > 0.02 * running:
            words.append(f"{duration(whole - running)} waiting and starting")
        return ", ".join(words + [plural(facts.requeues, "requeue")] * (facts.requeues > 0)) + "."


def timeline(runs: Sequence[Facts]) -> Section:
    """When each run waited, ran, saved and was interrupted: a lane a run, and its events in words."""
    lanes = [lane for facts in runs if (lane := _lane(facts))]
    longest = max((lane.ended - lane.began for lane in lanes), default=0.0)
    drawn = lanes[:_MOST_LANES]
    pictures = [
        _picture(lane, longest, f"{lane.facts.label}: {lane.in_words()}" if len(runs) > 1 else lane.in_words())
        for lane in drawn
    ]
    marked = {event["event"] for lane in drawn for event in _apart(lane.events(_GLYPHS), longest)}
    note = "From the first submission. Bars: training; dotted: waiting; ticks: checkpoints. " + " ".join(
        f"{glyph} {words}." for kind, (glyph, _, words) in _GLYPHS.items() if kind in marked
    )
    tables: list[Part] = [
        Table(("after", "event", ""), rows, caption=lane.facts.label if len(lanes) > 1 else "What happened")
        for lane in drawn
        if (rows := _happened(lane))
    ]
    if len(tables) > 3:
        tables = [Fold("What happened, run by run", tables)]
    charts = Charts("timeline", pictures, "when it waited, ran and saved", wide=True)
    return Section("timeline", "Time line", [charts, *tables] if lanes else [], note)


def _lane(facts: Facts) -> _Lane | None:
    events = [event for event in facts.events if fileio.is_time(event.get("time"))]
    told = [record["time"] for record in (*facts.train[-1:], *facts.val[-1:]) if fileio.is_time(record.get("time"))]
    starts = [event["time"] for event in events if event["event"] in ("submitted", "started")]
    if not starts:
        return None
    return _Lane(facts, min(starts), max([*told, *(event["time"] for event in events)]), spans(facts))


def _picture(lane: _Lane, longest: float, title: str) -> Picture:
    def at(time: float) -> str:
        return f"{100 * min(1.0, max(0.0, (time - lane.began) / (longest or 1.0))):.2f}%"

    marks = _apart(lane.events(_GLYPHS), longest)
    top = 16 if marks else 2
    middle, foot = top + 11, top + 22
    found = []
    ends = [lane.began, *(span.ended for span in lane.attempts)]
    begins = [*(span.began for span in lane.attempts), lane.ended]
    for before, after in list(zip(ends, begins, strict=True))[:_MOST_MARKS]:
        if after > before:
            found.append(tag("line", x1=at(before), x2=at(after), y1=middle, y2=middle, class_="waiting c7"))
    for span in lane.attempts[:_MOST_MARKS]:
        width = f"{max(0.15, 100 * span.seconds / (longest or 1.0)):.2f}%"
        goes_on = span is lane.attempts[-1] and not span.how
        style = "attempt c0" if span.went_well or goes_on else "attempt c1"
        found.append(tag("rect", x=at(span.began), y=top, width=width, height=22, rx=2, class_=style))
    saved = [event["time"] for event in lane.events(("saved",))]
    for time in saved[:: max(1, len(saved) // _MOST_MARKS)]:
        found.append(tag("line", x1=at(time), x2=at(time), y1=foot - 6, y2=foot, class_="saved c0"))
    for event in marks:
        glyph, colour, words = _GLYPHS[event["event"]]
        said = tag("title", f"{words}, after {duration(event['time'] - lane.began)}")
        found.append(tag("text", glyph, said, x=at(event["time"]), y=12, class_=f"glyph c{colour}"))
    unit, seconds = time_unit(longest)
    for tick in linear_ticks(0.0, longest / seconds, 6) if longest > 0 else ():
        share = 100 * tick * seconds / longest
        anchor = "" if share < 3 else " end" if share > 96 else " middle"
        found.append(tag("text", f"{shown(tick)} {unit}", x=f"{share:.2f}%", y=foot + 13, class_="tick" + anchor))
    return Picture(title, "", join(found), f"Time line of {lane.facts.label}: {lane.in_words()}", foot + 18)


def _apart(events: Sequence[dict[str, Any]], longest: float) -> list[dict[str, Any]]:
    """Those that are shown, no two marks on each other: of several in one place a failure, else the first."""
    kept: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: float(event["time"])):
        if kept and event["time"] - kept[-1]["time"] < 0.015 * longest:
            if event["event"] == "failed":
                kept[-1] = event
            continue
        kept.append(event)
    return kept[:_MOST_MARKS]


def _happened(lane: _Lane) -> list[Row]:
    told: list[dict[str, Any]] = []
    for event in lane.events(_WORDS):
        is_end = event["event"] == "ended"  # which the ranks and the command that looks after them may both write
        if not (is_end and told and told[-1]["event"] == "ended" and told[-1].get("state") == event.get("state")):
            told.append(event)
    left_out = max(0, len(told) - _MOST_ROWS)
    listed = told[: _MOST_ROWS // 2] + told[-_MOST_ROWS // 2 :] if left_out else told
    rows: list[Row] = [
        (duration(max(0.0, event["time"] - lane.began)), _WORDS[event["event"]], _details(event)) for event in listed
    ]
    if left_out:
        rows.insert(_MOST_ROWS // 2, ("", f"{left_out} more", ""))
    if rows:
        when = datetime.fromtimestamp(lane.began).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        rows[0] = (*rows[0][:2], ", ".join(part for part in (rows[0][2], when) if part))
    return rows


def _details(event: Mapping[str, Any]) -> str:
    words = []
    if event["event"] == "submitted":
        words.append(f"job {event.get('job_id', NONE)}, {event.get('executor', NONE)}")
    elif "attempt" in event:
        words.append(f"attempt {event['attempt']}")
    if event["event"] == "started" and isinstance(event.get("world_size"), int):
        words.append(f"{plural(event['world_size'], 'rank')} on {', '.join(event.get('hosts') or ['?'])}")
    if event.get("step"):
        words.append(f"step {event['step']}")
    if event.get("signals"):
        words.append(", ".join(map(str, event["signals"])))
    if event.get("rank") is not None:
        words.append(f"rank {event['rank']}")
    words += [str(event[key]) for key in ("host", "node", "state", "why", "error") if event.get(key)]
    return ", ".join(words)


def attempts(facts: Facts) -> list[Part]:
    """When each attempt ran, on what, and how it ended."""
    rows = [
        (
            str(span.number),
            f"{datetime.fromtimestamp(span.began).astimezone():%Y-%m-%d %H:%M:%S}",
            fold(span.hosts) if span.hosts else NONE,
            text(span.ranks),
            f"{span.from_step} to {span.to_step}",
            duration(span.seconds),
            terminal.one_line(span.how, 200) or "killed without a word, or goes on",
        )
        for span in spans(facts)[-2 * _MOST_ROWS :]
    ]
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


def spent(runs: Sequence[Facts]) -> Section:
    """Where the time of rank 0 went."""
    told = [(facts, parts) for facts in runs if (parts := facts.spent)]
    names = list(dict.fromkeys(name for _, parts in told for name in parts))
    bars = [
        _stacked(f"{facts.label}, {duration(sum(parts.values()))}" if len(told) > 1 else "", parts, facts.label)
        for facts, parts in told
    ]
    rows: list[Row] = []
    for name in names:
        cells = []
        for _, parts in told:
            share = 100 * parts.get(name, 0.0) / sum(parts.values())
            cells += [number(parts.get(name), ",.1f"), number(share if name in parts else None, ".1f", " %")]
        rows.append((name + (f": {_MEANING[name]}" if name in _MEANING else ""), *cells))
    sums = [cell for _, parts in told for cell in (number(sum(parts.values()), ",.1f"), "100 %")]
    rows += [("all", *sums)] * bool(rows)
    heads = [head for facts, _ in told for head in (f"{facts.label}, s" if len(told) > 1 else "seconds", "of all")]
    note = "Time of rank 0 over all attempts; at any moment it is spent on exactly one thing."
    legend = [(name, _PARTS.get(name, GREY)) for name in names]
    charts = Charts("time", bars, "where the time of rank 0 went", legend, wide=True)
    return Section("time", "Where the time went", [charts, Table(("part", *heads), rows, 1)] if told else [], note)


def _stacked(title: str, parts: Mapping[str, float], run: str) -> Picture:
    total, before = sum(parts.values()), 0.0
    found = []
    for name, seconds in parts.items():
        share = 100 * seconds / total
        quiet = name not in _PARTS
        said = tag("title", f"{name} {seconds:,.1f} s, {share:.1f} %")
        style = f"part c{_PARTS.get(name, GREY)}" + " quiet" * quiet
        found.append(tag("rect", said, x=f"{before:.3f}%", y=0, width=f"{share:.3f}%", height=26, class_=style))
        if share > 8.5:
            style = "inside middle" + " on-quiet" * quiet + " if-wide" * (share < 24)
            found.append(tag("text", f"{name} {share:.0f} %", x=f"{before + share / 2:.3f}%", y=17, class_=style))
        before += share
    words = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in parts.items())
    return Picture(title, "", join(found), f"{run}: {words}", 26)


HARDWARE = ("device", "utilisation, mean", "highest", "memory, highest", "power, mean", "temperature, highest")


def hardware(facts: Facts) -> list[Part]:
    """All devices, and curves of each node."""
    charts = [chart for host in facts.hosts[:_MOST_HOSTS] for chart in _host(host, facts.label)]
    parts: list[Part] = [
        Table(HARDWARE, hardware_rows(facts), 1),
        Charts("hardware", charts, "use of the hardware over time"),
    ]
    if len(facts.hosts) > _MOST_HOSTS:
        parts.append(Text([f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes."]))
    parts += [
        Fold(f"GPUs of {host}, as nvidia-smi has them", [Block(shown)])
        for host, shown in facts.gpus_shown[:_MOST_HOSTS]
    ]
    if facts.started("device") == "cpu":
        parts.append(Text(["No GPU took part: there is nothing for nvidia-smi to show."]))
    return parts


def hardware_rows(facts: Facts) -> list[Row]:
    """A row for every GPU and for every host's CPUs; the columns are those of `HARDWARE`."""
    rows = []
    for host in facts.hosts:
        for index in host.gpu_indices():
            util, used, total = (host.gpu(index, key) for key in ("util_percent", "memory_used_mb", "memory_total_mb"))
            power, heat = host.gpu(index, "power_w"), host.gpu(index, "temperature_c")
            watts, celsius = number(power and power.mean, ".0f", " W"), number(heat and heat.highest, ".0f", " °C")
            rows.append(_use(f"GPU {index} of {host.host}", util, used, total, watts, celsius))
        util, used, total = (host.machine(key) for key in ("cpu_percent", "memory_used_mb", "memory_total_mb"))
        rows.append(_use(f"CPUs of {host.host}", util, used, total, NONE, NONE))
    return rows


def _use(device: str, util: Usage | None, used: Usage | None, total: Usage | None, *more: str) -> Row:
    mean, highest = (number(util and value, ".0f", " %") for value in (util and util.mean, util and util.highest))
    held = memory(used and used.highest) + (f" of {memory(total.highest)}" if used and total else "")
    return (device, mean, highest, held, *more)


def _host(host: HostSamples, run: str) -> list[Picture | None]:
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
        lines = [line(f"GPU {index}", key, at, index, by) for at, index in enumerate(host.gpu_indices())]
        if len(lines) <= _MOST_LABELS:
            return lines
        values: dict[float, list[float]] = {}
        for x, y in (point for item in lines for point in item.points):
            values.setdefault(x, []).append(y)
        mean = [(x, fmean(values[x])) for x in sorted(values)]
        label = f"GPUs {mean[-1][1]:{'.1f' if by > 1 else '.0f'}}" if mean else ""
        faint = [replace(item, colour=0, faint=True, label="") for item in lines]
        return [*faint, Series("GPUs, mean", mean, 0, label=label, lost=_pauses(mean))]

    machine = [line("node", "memory_used_mb", 7, None, 1024.0), line("job", "process_memory_mb", 5, None, 1024.0)]
    kinds = (
        ("use", "%", [*of_gpus("util_percent"), line("CPUs", "cpu_percent", 7)], 100.0),
        ("memory", "GB", [*of_gpus("memory_used_mb", 1024.0), *machine], None),
        ("power", "W", of_gpus("power_w"), None),
    )
    return [
        line_chart(
            Axes(f"{host.host} · {what}", of, unit, f"{run} {host.host}", low=0.0, high=high), lines,
            x_from=0.0, x_to=seconds / scale,
        )
        for what, of, lines, high in kinds
    ]  # fmt: skip


def _pauses(points: Sequence[Point]) -> list[float]:
    """Places where samples are missing, between two attempts."""
    if len(points) < 3:
        return []
    usual = median(after[0] - before[0] for before, after in pairwise(points))
    return [(a[0] + b[0]) / 2 for a, b in pairwise(points) if b[0] - a[0] > 3 * usual > 0]

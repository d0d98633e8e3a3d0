"""Sections with charts: curves, time line, where the time went, hardware; and of tasks with classes which is taken for
which, and the images that were told wrong most confidently."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from trainkit import fileio, terminal
from trainkit.ranks import fold
from trainkit.report import document as doc
from trainkit.report.document import (
    COLOURS,
    GREY,
    NONE,
    Axes,
    Bar,
    Picture,
    Point,
    Series,
    duration,
    line_chart,
    memory,
    number,
    plural,
    tag,
    text,
)  # fmt: skip
from trainkit.report.facts import Facts, HostSamples, list_of

_FEW_EPOCHS = 2.0
"""An axis of so few epochs would have two numbers: steps are drawn."""
_MOST_LANES, _MOST_ROWS, _MOST_MARKS, _MOST_HOSTS, _MOST_LABELS = 40, 100, 300, 8, 4
_MOST_RUNS, _MOST_DRAWN, _MOST_NAMED, _MOST_BARS, _MOST_PAIRS = 4, 100, 30, 20, 10
_MOST_IMAGES, _MOST_OF_ONE, _LARGEST_IMAGE = 48, 8, 1 << 18


def curves(runs: Sequence[Facts]) -> doc.Section:
    """Of one run train and val in two colours; of several, at most as many as there are colours, each in its own."""
    known = [facts for facts in runs if facts.train or facts.val]
    drawn = known if len(known) <= COLOURS else sorted(known, key=lambda facts: facts.rank)[:COLOURS]
    records = [record for facts in drawn for record in (*facts.train, *facts.val)]
    by = "epoch" if max((r["epoch"] for r in records if "epoch" in r), default=0.0) > _FEW_EPOCHS else "step"
    x_to, one = max((r[by] for r in records if by in r), default=1.0), len(drawn) == 1
    marks = [(x, GREY if one else colour) for colour, facts in enumerate(drawn) for x in facts.restarts(by)]
    metrics = {name: each for facts in drawn for name, each in facts.described.metrics.items()}
    pictures = []
    for key in [*metrics, "lr", "images_per_sec"]:
        metric = metrics.get(key)
        title, unit = ("Learning rate", "") if key == "lr" else ("Throughput", "images/s")
        if metric:
            title, unit = metric.label, metric.unit if key != "loss" else ""
        series = [_series(facts, key, by, "train", colour, one) for colour, facts in enumerate(drawn)]
        val = [_series(facts, key, by, "val", colour, one) for colour, facts in enumerate(drawn) if metric]
        if not any(item.label for item in (*series, *val)):  # of runs that were never validated
            ends = [_end_value(key, item.points, facts) for item, facts in zip(series, drawn, strict=True)]
            series = [replace(item, faint=False, label=end) for item, end in zip(series, ends, strict=True)]
        is_loss = key == "loss"
        axes = Axes(
            title, unit, by, "curves", low=None if metric else 0.0, may_be_log=is_loss, lost="not finite" * is_loss
        )
        pictures.append(line_chart(axes, [*series, *val], x_from=0.0, x_to=x_to, marks=marks))
    every = max((facts.metrics.every for facts in drawn), default=1)
    notes = {
        "Thick: validation. Thin: training.": not one and any(facts.val for facts in drawn),
        "Ring: the best checkpoint.": one and drawn[0].best is not None,
        "Dotted lines: a later attempt went on.": bool(marks),
        f"Of the train records one in {every} is in the curves, medians and estimates here; in the curves also those"
        " with the largest and the smallest loss of each stretch, and the first that is no number.": every > 1,
        f"The best {COLOURS} of {len(known)} runs, by validation.": len(known) > COLOURS,
    }
    legend = [] if one else [(facts.label, colour) for colour, facts in enumerate(drawn)]
    whole = doc.Charts("curves", pictures, "loss, metrics, learning rate and throughput", legend)
    return doc.Section("curves", "Curves", [whole] if whole else [], " ".join(note for note in notes if notes[note]))


def _series(facts: Facts, key: str, by: str, split: str, colour: int, one: bool) -> Series:
    metric, is_val = facts.described.find(key), split == "val"
    placed = [r for r in (facts.val if is_val else facts.drawn) if fileio.is_number(r.get(by))]
    points = [(float(r[by]), float(r[key])) for r in placed if fileio.is_number(r.get(key))]
    lost = [float(r[by]) for r in placed if key in r and r[key] is None]
    end, ring = _end_value(key, points, facts), None
    if one and is_val and key == facts.described.headline and facts.best is not None:
        ring = next(((x, y) for x, y in points if x == (facts.best_val or {}).get(by)), None)
    what = {
        "name": f"{facts.label} {split}" if metric else facts.label, "colour": colour,
        "faint": metric is not None and not is_val, "label": end if is_val or not metric else "",
    }  # fmt: skip
    if one:
        name = split if metric else "images/s" if key == "images_per_sec" else key
        what = {"name": name, "colour": int(is_val), "label": f"{split} {end}" if metric and end else end}
    return Series(points=points, lost=lost if len(lost) < len(placed) else [], ring=ring, **what)  # type: ignore[arg-type]


def _end_value(key: str, points: Sequence[Point], facts: Facts) -> str:
    if not points:
        return ""
    values = [y for _, y in points]
    if key == "images_per_sec":
        return f"median {doc.rate(median(values))}"
    metric = facts.described.find(key)
    return (
        f"peak {max(values):.3g}"
        if key == "lr"
        else f"{values[-1]:{'.1f' if metric and metric.unit == '%' else '.3g'}}"
    )


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


class _Lane:
    """A run's time, from its first submission; without events where nothing of it has a time."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        events = [event for event in facts.events if fileio.is_time(event.get("time"))]
        starts = [event["time"] for event in events if event["event"] in ("submitted", "started")]
        self.events, self.began = events if starts else [], min(starts, default=0.0)
        times = [record.get("time") for record in (*facts.train[-1:], *facts.val[-1:], *events)]
        self.ended = max((time for time in times if fileio.is_time(time)), default=0.0)

    def marks(self, longest: float) -> list[dict[str, Any]]:
        """Events that are shown, no two on each other: of several in one place a failure, else the first."""
        kept: list[dict[str, Any]] = []
        for event in sorted(
            (event for event in self.events if event["event"] in _GLYPHS), key=lambda e: float(e["time"])
        ):
            if not kept or event["time"] - kept[-1]["time"] >= 0.015 * longest:
                kept.append(event)
            elif event["event"] == "failed":
                kept[-1] = event
        return kept[:_MOST_MARKS]

    def in_words(self) -> str:
        facts, whole = self.facts, self.ended - self.began
        if not facts.begun:
            return f"It has not begun, {duration(whole)} after it was queued." if whole > 0 else "It has not begun."
        running = sum(span.seconds for span in facts.spans)
        waiting = f", {duration(whole - running)} waiting and starting" * (whole - running > 0.02 * running)
        requeues = f", {plural(facts.requeues, 'requeue')}" * (facts.requeues > 0)
        return f"{plural(facts.attempts, 'attempt')}, {duration(running)} of training{waiting}{requeues}."


def timeline(runs: Sequence[Facts]) -> doc.Section:
    """When each run waited, ran, saved and was interrupted: a lane a run, and its events in words."""
    lanes = [lane for facts in runs if (lane := _Lane(facts)).events]
    longest, drawn = max((lane.ended - lane.began for lane in lanes), default=0.0), lanes[:_MOST_LANES]
    pictures = [_drawn(lane, longest, f"{lane.facts.label}: " * (len(runs) > 1)) for lane in drawn]
    marked = {event["event"] for lane in drawn for event in lane.marks(longest)}
    note = "From the first submission. Bars: training; dotted: waiting; ticks: checkpoints. " + " ".join(
        f"{glyph} {words}." for kind, (glyph, _, words) in _GLYPHS.items() if kind in marked
    )
    captions = [lane.facts.label if len(lanes) > 1 else "What happened" for lane in drawn]
    tables: list[doc.Part] = [
        doc.Table(("after", "event", ""), rows, caption=caption)
        for lane, caption in zip(drawn, captions, strict=True)
        if (rows := _happened(lane))
    ]
    if len(tables) > 3:
        tables = [doc.Fold("What happened, run by run", tables)]
    whole = doc.Charts("timeline", pictures, "when it waited, ran and saved", wide=True)
    return doc.Section("timeline", "Time line", [whole, *tables] if lanes else [], note)


def _drawn(lane: _Lane, longest: float, label: str) -> Picture:
    def at(time: float) -> str:
        return f"{100 * min(1.0, max(0.0, (time - lane.began) / (longest or 1.0))):.2f}%"

    def line(begins: float, ends: float, y1: int, y2: int, style: str) -> Markup:
        return tag("line", x1=at(begins), x2=at(ends), y1=y1, y2=y2, class_=style)

    marks, spans = lane.marks(longest), lane.facts.spans
    top = 16 if marks else 2
    foot = top + 22
    ends, begins = [lane.began, *(span.ended for span in spans)], [*(span.began for span in spans), lane.ended]
    waits = list(zip(ends, begins, strict=True))[:_MOST_MARKS]
    found = [line(before, after, top + 11, top + 11, "waiting c7") for before, after in waits if after > before]
    for span in spans[:_MOST_MARKS]:
        width = f"{max(0.15, 100 * span.seconds / (longest or 1.0)):.2f}%"
        goes_on = span is spans[-1] and not span.how
        style = "attempt c0" if span.went_well or goes_on else "attempt c1"
        found.append(tag("rect", x=at(span.began), y=top, width=width, height=22, rx=2, class_=style))
    saved = [event["time"] for event in lane.events if event["event"] == "saved"]
    found += [line(time, time, foot - 6, foot, "saved c0") for time in saved[:: max(1, len(saved) // _MOST_MARKS)]]
    for event in marks:
        glyph, colour, words = _GLYPHS[event["event"]]
        said = tag("title", f"{words}, after {duration(event['time'] - lane.began)}")
        found.append(tag("text", glyph, said, x=at(event["time"]), y=12, class_=f"glyph c{colour}"))
    unit, seconds = doc.time_unit(longest)
    for tick in doc.Scale(0.0, longest / seconds, 0, 1).ticks(6) if longest > 0 else ():
        share = 100 * tick * seconds / longest
        style = "tick" + ("" if share < 3 else " end" if share > 96 else " middle")
        found.append(tag("text", f"{doc.shown(tick)} {unit}", x=f"{share:.2f}%", y=foot + 13, class_=style))
    told = lane.in_words()
    return Picture(label + told, "", doc.joined(found), f"Time line of {lane.facts.label}: {told}", foot + 18)


def _happened(lane: _Lane) -> list[doc.Row]:
    told: list[dict[str, Any]] = []
    for event in (event for event in lane.events if event["event"] in _WORDS):
        # The ranks and the command that looks after them may both write that it has ended.
        if not (
            told and event["event"] == told[-1]["event"] == "ended" and told[-1].get("state") == event.get("state")
        ):
            told.append(event)
    half, left_out = _MOST_ROWS // 2, max(0, len(told) - _MOST_ROWS)
    rows: list[doc.Row] = [
        (duration(max(0.0, event["time"] - lane.began)), _WORDS[event["event"]], _details(event)) for event in told
    ]
    if left_out:
        rows = [*rows[:half], ("", f"{left_out} more", ""), *rows[-half:]]
    if rows:
        when = datetime.fromtimestamp(lane.began).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        rows[0] = (*rows[0][:2], ", ".join(filter(None, (rows[0][2], when))))
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


def attempts(facts: Facts) -> list[doc.Part]:
    """When each attempt ran, on what, and how it ended."""
    rows = [
        (
            str(span.number), f"{datetime.fromtimestamp(span.began).astimezone():%Y-%m-%d %H:%M:%S}",
            fold(span.hosts) if span.hosts else NONE, text(span.ranks), f"{span.from_step} to {span.to_step}",
            duration(span.seconds), terminal.one_line(span.how, 200) or "killed without a word, or goes on",
        )
        for span in facts.spans[-2 * _MOST_ROWS :]
    ]  # fmt: skip
    return [doc.Table(("attempt", "began", "on", "ranks", "steps", "time", "ended"), rows)]


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


def spent(runs: Sequence[Facts]) -> doc.Section:
    """Where the time of rank 0 went."""
    known = [(facts.label, facts.spent, sum(facts.spent.values())) for facts in runs if facts.spent]
    names = list(dict.fromkeys(name for _, parts, _ in known for name in parts))
    several = len(known) > 1
    bars = [_stacked(f"{label}, {duration(total)}" * several, parts, label, total) for label, parts, total in known]
    rows: list[doc.Row] = []
    for name in names:
        shares = [(parts.get(name), 100 * parts[name] / total if name in parts else None) for _, parts, total in known]
        cells = [cell for own, share in shares for cell in (number(own, ",.1f"), number(share, ".1f", " %"))]
        rows.append((name + (f": {_MEANING[name]}" if name in _MEANING else ""), *cells))
    rows.append(("all", *(cell for *_, total in known for cell in (number(total, ",.1f"), "100 %"))))
    heads = [head for label, *_ in known for head in (f"{label}, s" if several else "seconds", "of all")]
    note = "Time of rank 0 over all attempts; at any moment it is spent on exactly one thing."
    legend = [(name, _PARTS.get(name, GREY)) for name in names]
    whole = doc.Charts("time", bars, "where the time of rank 0 went", legend, wide=True)
    table = doc.Table(("part", *heads), rows, 1)
    return doc.Section("time", "Where the time went", [whole, table] if known else [], note)


def _stacked(title: str, parts: Mapping[str, float], run: str, total: float) -> Picture:
    before, found = 0.0, []
    for name, seconds in parts.items():
        share, quiet = 100 * seconds / total, name not in _PARTS
        said = tag("title", f"{name} {seconds:,.1f} s, {share:.1f} %")
        style = f"part c{_PARTS.get(name, GREY)}" + " quiet" * quiet
        found.append(tag("rect", said, x=f"{before:.3f}%", y=0, width=f"{share:.3f}%", height=26, class_=style))
        if share > 8.5:
            style = "inside middle" + " on-quiet" * quiet + " if-wide" * (share < 24)
            found.append(tag("text", f"{name} {share:.0f} %", x=f"{before + share / 2:.3f}%", y=17, class_=style))
        before += share
    words = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in parts.items())
    return Picture(title, "", doc.joined(found), f"{run}: {words}", 26)


def hardware(facts: Facts) -> list[doc.Part]:
    """A row for every GPU and for every host's CPUs, and curves of each node."""
    header = ("device", "utilisation, mean", "highest", "memory, highest", "power, mean", "temperature, highest")
    rows: list[doc.Row] = []
    for host in facts.hosts:
        for gpu in [*host.gpus(), None]:
            use = host.usage("cpu_percent" if gpu is None else "util_percent", gpu)
            used, total = (host.usage(f"memory_{key}_mb", gpu) for key in ("used", "total"))
            power, heat = ((gpu is not None and host.usage(key, gpu)) or None for key in ("power_w", "temperature_c"))
            held = memory(used and used.highest) + (f" of {memory(total.highest)}" if used and total else "")
            mean, highest = (number(value, ".0f", " %") for value in use or (None, None))
            watts, celsius = number(power and power.mean, ".0f", " W"), number(heat and heat.highest, ".0f", " °C")
            device = "CPUs" if gpu is None else f"GPU {gpu}"
            rows.append((f"{device} of {host.host}", mean, highest, held, watts, celsius))
    pictures = [picture for host in facts.hosts[:_MOST_HOSTS] for picture in _host(host, facts.label)]
    parts: list[doc.Part] = [doc.Table(header, rows, 1)]
    parts.append(doc.Charts("hardware", pictures, "use of the hardware over time"))
    if len(facts.hosts) > _MOST_HOSTS:
        parts.append(doc.Text([f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes."]))
    for name, shown in facts.gpus_shown[:_MOST_HOSTS]:
        parts.append(doc.Fold(f"GPUs of {name}, as nvidia-smi has them", [doc.Block(shown)]))
    if facts.started("device") == "cpu":
        parts.append(doc.Text(["No GPU took part: there is nothing for nvidia-smi to show."]))
    return parts


def _host(host: HostSamples, run: str) -> list[Picture | None]:
    times = [float(sample["time"]) for sample in host.samples]
    began, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return []
    unit, scale = doc.time_unit(seconds)

    def drawn(name: str, points: list[Point], colour: int, by: float, called: str = "") -> Series:
        label = f"{called or name} {points[-1][1]:{'.1f' if by > 1 else '.0f'}}" if points else ""
        return Series(name, points, colour % COLOURS, label=label, lost=_pauses(points))

    def line(name: str, key: str, colour: int, gpu: int | None = None, by: float = 1.0) -> Series:
        points = sorted(((time - began) / scale, value / by) for time, value in host.curve(key, gpu))
        return drawn(name, points, colour, by)

    def of_gpus(key: str, by: float = 1.0) -> list[Series]:
        lines = [line(f"GPU {index}", key, at, index, by) for at, index in enumerate(host.gpus())]
        if len(lines) <= _MOST_LABELS:
            return lines
        points = sorted(point for item in lines for point in item.points)
        mean = [(x, fmean(y for _, y in group)) for x, group in groupby(points, lambda point: point[0])]
        faint = [replace(item, colour=0, faint=True, label="") for item in lines]
        return [*faint, drawn("GPUs, mean", mean, 0, by, "GPUs")]

    machine = [line("node", "memory_used_mb", 7, None, 1024.0), line("job", "process_memory_mb", 5, None, 1024.0)]
    kinds = (
        ("use", "%", [*of_gpus("util_percent"), line("CPUs", "cpu_percent", 7)], 100.0),
        ("memory", "GB", [*of_gpus("memory_used_mb", 1024.0), *machine], None),
        ("power", "W", of_gpus("power_w"), None),
    )
    group, x_to = f"{run} {host.host}", seconds / scale
    return [
        line_chart(Axes(f"{host.host} · {what}", of, unit, group, low=0.0, high=high), lines, x_from=0.0, x_to=x_to)
        for what, of, lines, high in kinds
    ]


def _pauses(points: Sequence[Point]) -> list[float]:
    """Places where samples are missing, between two attempts."""
    steps = [(a[0], b[0]) for a, b in pairwise(points)]
    usual = median(b - a for a, b in steps) if len(steps) > 1 else 0.0
    return [(a + b) / 2 for a, b in steps if b - a > 3 * usual > 0]


class _Counts:
    """``confusion.json``, as far as it can be true."""

    def __init__(self, facts: Facts) -> None:
        read = fileio.read_object(facts.run_dir.confusion)
        self.names = [terminal.one_line(name, 60) for name in list_of(read.get("classes"))[:4000]]
        self.where = terminal.one_line(read.get("split", "?"), 20) + _at_step(read)
        self.pairs: dict[tuple[int, int], int] = {}
        """(class, what it was taken for) -> how often."""
        self.totals, self.right = [0] * len(self.names), [0] * len(self.names)
        for item in list_of(read.get("raw")) or list_of(read.get("ema")):
            if not (isinstance(item, list) and len(item) == 3 and all(map(fileio.is_whole, item))):
                continue
            label, told, count = item
            if label < len(self.names) and told < len(self.names) and count:
                self.pairs[label, told] = self.pairs.get((label, told), 0) + count
                self.totals[label] += count
                self.right[label] += count if label == told else 0


def classes(runs: Sequence[Facts]) -> doc.Section:
    """Which class is taken for which, and how often each is told right."""
    told = [(facts, counts) for facts in runs[:_MOST_RUNS] if (counts := _Counts(facts)).pairs]
    parts: list[doc.Part] = []
    for facts, counts in told:
        parts += [doc.Heading(f"{facts.label}, {counts.where}")] * (len(runs) > 1)
        wrong = sorted((pair for pair in counts.pairs if pair[0] != pair[1]), key=lambda pair: -counts.pairs[pair])
        rows = [
            (counts.names[label], counts.names[other], f"{times:,}", f"{100 * times / counts.totals[label]:.1f} %")
            for label, other in wrong[:_MOST_PAIRS]
            for times in [counts.pairs[label, other]]
        ]
        known = zip(counts.names, counts.totals, counts.right, strict=True)
        found = sorted((right / total, name, total) for name, total, right in known if total)
        worst = found if len(found) <= _MOST_NAMED else found[:_MOST_BARS]
        title = "Accuracy by class" if len(worst) == len(found) else f"The {len(worst)} worst of {len(found)} classes"
        bars = [Bar(name, 100 * share, f"{100 * share:.1f} % of {total:,}") for share, name, total in worst]
        pictures = [_matrix(counts), doc.bar_chart(title, "worst first", bars, high=100)]
        parts.append(doc.Charts("classes", pictures, "classes"))
        parts.append(doc.Table(("class", "taken for", "times", "of the class"), rows, 2, "Most often confused"))
        parts += [doc.Text(["None was told wrong."])] * (not rows)
        if len(worst) < len(found):
            every = [(name, f"{total:,}", f"{100 * share:.1f} %") for share, name, total in found]
            table = doc.Table(("class", "images", "told right"), every, 1)
            parts.append(doc.Fold(f"All {len(found)} classes", [table]))
    note = f"Of the best weights, on {told[0][1].where}." if len(runs) == 1 and told else "Of the best weights."
    note += f" The first {_MOST_RUNS} runs." * (len(runs) > _MOST_RUNS)
    return doc.Section("classes", "Classes", parts, note)


def _at_step(read: Mapping[str, Any]) -> str:
    return f", step {read['step']}" if fileio.is_whole(read.get("step")) else ""


def _matrix(counts: _Counts) -> Picture | None:
    many = len(counts.names)
    if many > _MOST_DRAWN:
        return None
    named, longest = many <= _MOST_NAMED, max(map(len, counts.names))
    margin = min(6.5 * min(longest, 14) + 10, 100) if named else 6
    size, edge = (400 - margin) / many, margin - 5
    found: list[Markup] = []
    for at, name in enumerate(counts.names if named else ()):
        short, middle = name if len(name) <= 14 else name[:13] + "…", margin + (at + 0.5) * size
        found.append(tag("text", short, x=edge, y=middle, dy="0.35em", class_="tick end"))
        turned = {"class_": "tick", "dy": "0.3em", "transform": f"rotate(-90 {middle:.1f} {edge:.1f})"}
        found.append(tag("text", short, x=middle, y=edge, **turned if longest > 2 else {"class_": "tick middle"}))
    for (label, told), count in sorted(counts.pairs.items()):
        share, right = count / counts.totals[label], label == told
        opacity = 0.12 + 0.88 * share if right else 0.3 + 0.7 * share
        taken = "told right" if right else f"taken for {counts.names[told]}"
        said = tag("title", f"{counts.names[label]} {taken}: {count:,} of {counts.totals[label]:,}") if named else None
        x, y, style = margin + told * size, margin + label * size, "cell c0" if right else "cell c1"
        found.append(tag("rect", said, x=x, y=y, width=size, height=size, fill_opacity=opacity, class_=style))
        if size >= 22 and count < 10 ** int(size / 7):
            style = "count over" if opacity > 0.6 else "count"
            found.append(tag("text", count, x=x + size / 2, y=y + size / 2, dy="0.35em", class_=style))
    found.append(tag("rect", x=margin, y=margin, width=400 - margin, height=400 - margin, class_="frame"))
    total = sum(counts.totals)
    words = f"Confusion matrix of {many} classes: {total - sum(counts.right)} of {total} told wrong"
    return Picture("Confusion matrix", "rows: the class; columns: taken for", doc.joined(found), words, 400, 400)


def mistakes(runs: Sequence[Facts]) -> doc.Section:
    """The images that were told wrong most confidently."""
    parts: list[doc.Part] = []
    for facts in runs[:_MOST_RUNS]:
        for split in ("val", "test"):
            read = fileio.read_object(facts.run_dir.mistakes(split))
            most = _MOST_IMAGES if len(runs) == 1 else _MOST_OF_ONE
            photos = [photo for item in list_of(read.get("images"))[:most] if (photo := _photo(item))]
            if photos or read.get("images") == []:
                parts.append(doc.Heading(f"{facts.label}, " * (len(runs) > 1) + split + _at_step(read)))
                parts.append(doc.Gallery(photos) if photos else doc.Text(["None was told wrong."]))
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return doc.Section("mistakes", "Most confidently wrong", parts, note)


def _photo(item: Any) -> doc.Photo | None:
    """One image with what it is and what it was taken for; None for what is no small PNG."""
    if not isinstance(item, dict) or not isinstance(png := item.get("png"), str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except (binascii.Error, ValueError):
        return None
    known = content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) >= 33
    if not known or not fileio.is_number(item.get("confidence")):
        return None
    label, told = (terminal.one_line(item.get(key, "?"), 60) for key in ("label", "told"))
    return doc.Photo(png, label, told, f"{100 * item['confidence']:.1f} %", int.from_bytes(content[16:20], "big") > 40)

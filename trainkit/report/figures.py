"""Sections with charts: curves, time line, where the time went, hardware; and of tasks with classes which is taken for
which, and the images that were told wrong most confidently."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain, groupby, pairwise, product
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from trainkit import fileio, terminal
from trainkit.ranks import fold
from trainkit.report import document as doc
from trainkit.report.document import COLOURS, GREY, NONE, Axes, Bar, Picture, Point, Series, line_chart, number, tag
from trainkit.report.facts import Facts, HostSamples, list_of

_TITLES = {"lr": ("Learning rate", ""), "images_per_sec": ("Throughput", "images/s")}
"""Curves that are of no metric: title and unit."""
_FEW_EPOCHS = 2.0
"""An axis of so few epochs would have two numbers: steps are drawn."""
_MOST_LANES, _MOST_ROWS, _MOST_MARKS, _MOST_HOSTS, _MOST_LABELS = 40, 100, 300, 8, 4
_MOST_RUNS, _MOST_DRAWN, _MOST_NAMED, _MOST_BARS, _MOST_PAIRS = 4, 100, 30, 20, 10
_MOST_IMAGES, _MOST_OF_ONE, _LARGEST_IMAGE = 48, 8, 1 << 18


def curves(runs: Sequence[Facts]) -> doc.Section:
    """Of one run train and val in two colours; of several, at most as many as there are colours, each in its own."""
    known = [facts for facts in runs if facts.train or facts.val]
    drawn = known if len(known) <= COLOURS else sorted(known, key=lambda facts: facts.rank)[:COLOURS]
    records, one = [record for facts in drawn for record in (*facts.train, *facts.val)], len(drawn) == 1
    by = "epoch" if max((r["epoch"] for r in records if "epoch" in r), default=0.0) > _FEW_EPOCHS else "step"
    x_to = max((r[by] for r in records if by in r), default=1.0)
    restarts = [(x, GREY if one else colour) for colour, facts in enumerate(drawn) for x in facts.restarts(by)]
    metrics = {name: metric for facts in drawn for name, metric in facts.described.metrics.items()}
    pictures = []
    for key, metric in metrics.items():
        lost = "not finite" if key == "loss" else ""
        axes = Axes(metric.label, metric.unit, by, "curves", None, None, x_to, bool(lost), lost=lost, restarts=restarts)
        val = [_metric_curve(facts, key, by, "val", colour, one=one) for colour, facts in enumerate(drawn)]
        faint = not one and any(item.points for item in val)
        train = [_metric_curve(facts, key, by, "train", colour, one=one) for colour, facts in enumerate(drawn)]
        pictures.append(line_chart(axes, [*(item._replace(faint=faint) for item in train), *val]))
    for key, (title, unit) in _TITLES.items():
        axes = Axes(title, unit, by, "curves", 0.0, x_to=x_to, restarts=restarts)
        own = [_course(facts, key, by, colour, one=one) for colour, facts in enumerate(drawn)]
        pictures.append(line_chart(axes, own))
    whole = doc.Charts(
        "curves",
        pictures,
        "loss, metrics, learning rate and throughput",
        [] if one else [(facts.label, colour) for colour, facts in enumerate(drawn)],
    )
    notes = []
    if not one and any(facts.val for facts in drawn):
        notes.append("Thick: validation. Thin: training.")
    if one and drawn[0].best is not None:
        notes.append("Ring: the best checkpoint.")
    if restarts:
        notes.append("Dotted lines: a later attempt went on.")
    if (every := max((facts.metrics.every for facts in drawn), default=1)) > 1:
        notes.append(
            f"Of the train records one in {every} is in the curves, medians and estimates here; in the curves also"
            " those with the largest and the smallest loss of each stretch, and the first that is no number."
        )
    if len(known) > COLOURS:
        notes.append(f"The best {COLOURS} of {len(known)} runs, by validation.")
    return doc.Section("curves", "Curves", [whole] if whole else [], " ".join(notes))


def _points(facts: Facts, key: str, by: str, split: str) -> tuple[list[Point], list[float]]:
    """What a run has recorded of a key, and the places where that was no number; not those of a key that never is."""
    records = facts.val if split == "val" else facts.drawn
    placed = [record for record in records if fileio.is_number(record.get(by))]
    points = [(float(record[by]), float(record[key])) for record in placed if fileio.is_number(record.get(key))]
    lost = [float(record[by]) for record in placed if key in record and record[key] is None]
    return points, lost if len(lost) < len(placed) else []


def _metric_curve(facts: Facts, key: str, by: str, split: str, colour: int, *, one: bool) -> Series:
    """A metric of the task; of one run the best checkpoint has a ring."""
    points, lost = _points(facts, key, by, split)
    metric, label, ring = facts.described.find(key), "", None
    if points:
        label = f"{points[-1][1]:{'.1f' if metric and metric.unit == '%' else '.3g'}}"
    if not one:
        return Series(f"{facts.label} {split}", points, colour, label=label, lost=lost)
    if split == "val" and key == facts.described.headline and facts.best_val is not None and facts.best is not None:
        ring = next((point for point in points if point[0] == facts.best_val.get(by)), None)
    colour = 1 if split == "val" else 0
    return Series(split, points, colour, label=f"{split} {label}" if label else "", lost=lost, ring=ring)


def _course(facts: Facts, key: str, by: str, colour: int, *, one: bool) -> Series:
    """The learning rate or the throughput."""
    points, lost = _points(facts, key, by, "train")
    values, name, label = [y for _, y in points], "lr" if key == "lr" else "images/s", ""
    if values:
        label = f"peak {max(values):.3g}" if key == "lr" else f"median {doc.rate(median(values))}"
    return Series(name if one else facts.label, points, 0 if one else colour, label=label, lost=lost)


_WORDS = {
    "refused": "refused",
    "failed": "failed",
    "cancelled": "cancelled",
    "excluded": "a node is left out",
    "nonfinite": "not finite",
    "rolled_back": "went back to a checkpoint",
    "swarm_lost": "has lost the swarm",
    "swarm_back": "is back in the swarm",
    "save_failed": "a save failed",
    "upload_failed": "the copy elsewhere failed",
}
"""Events that are told in words: those of which the table of attempts has not all."""


class _Lane:
    """A run's time, from its first submission; without events where nothing of it has a time."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.label = facts, facts.label
        events = [event for event in facts.events if fileio.is_time(event.get("time"))]
        starts = [event["time"] for event in events if event["event"] in ("submitted", "started")]
        self.events, self.began = events if starts else [], min(starts, default=0.0)
        times = [record.get("time") for record in (*facts.train[-1:], *facts.val[-1:], *events)]
        self.seconds = max((time for time in times if fileio.is_time(time)), default=0.0) - self.began

    def in_words(self) -> str:
        facts = self.facts
        if not facts.begun:
            after = f", {doc.duration(self.seconds)} after it was queued" if self.seconds > 0 else ""
            return f"It has not begun{after}."
        running = sum(span.seconds for span in facts.spans)
        words = [doc.plural(facts.attempts, "attempt"), f"{doc.duration(running)} of training"]
        if (waiting := self.seconds - running) > 0.02 * running:
            words.append(f"{doc.duration(waiting)} waiting and starting")
        if facts.requeues:
            words.append(doc.plural(facts.requeues, "requeue"))
        return f"{', '.join(words)}."

    def picture(self, longest: float, name: str) -> Picture:
        """The lane of ``longest`` seconds, and its title, which begins with ``name``."""

        def at(time: float) -> str:
            return f"{100 * min(1.0, max(0.0, (time - self.began) / (longest or 1.0))):.2f}%"

        def line(begins: float, ends: float, y1: int, y2: int, style: str) -> Markup:
            return tag("line", x1=at(begins), x2=at(ends), y1=y1, y2=y2, class_=style)

        spans, words, top, foot = self.facts.spans, self.in_words(), 2, 24
        until = [*(span.began for span in spans), self.began + self.seconds]
        waits = list(zip([self.began, *(span.ended for span in spans)], until, strict=True))[:_MOST_MARKS]
        parts = [line(before, after, top + 11, top + 11, "waiting c7") for before, after in waits if after > before]
        for span in spans[:_MOST_MARKS]:
            width = f"{max(0.15, 100 * span.seconds / (longest or 1.0)):.2f}%"
            is_well = span.went_well or (span is spans[-1] and not span.how)  # it goes on
            style = "attempt c0" if is_well else "attempt c1"
            parts.append(tag("rect", x=at(span.began), y=top, width=width, height=22, rx=2, class_=style))
        saved = [event["time"] for event in self.events if event["event"] == "saved"]
        parts += [line(time, time, foot - 6, foot, "saved c0") for time in saved[:: max(1, len(saved) // _MOST_MARKS)]]
        unit, seconds = doc.time_unit(longest)
        for tick in doc.Scale(0.0, longest / seconds, 0, 1).ticks(6) if longest > 0 else ():
            share = 100 * tick * seconds / longest
            side = "" if share < 3 else " end" if share > 96 else " middle"
            parts.append(tag("text", f"{doc.shown(tick)} {unit}", x=f"{share:.2f}%", y=foot + 13, class_=f"tick{side}"))
        return Picture(name + words, "", doc.joined(parts), f"Time line of {self.label}: {words}", foot + 18)

    def happened(self) -> list[doc.Row]:
        """Its events in words, of many the first and the last."""
        rows: list[doc.Row] = []
        for event in self.events:
            if event["event"] in _WORDS:
                keys = ("attempt", "step", "rank", "host", "node", "why", "error")
                details = [f"{key} {event[key]}" for key in keys[:3] if event.get(key) is not None]
                details += [str(event[key]) for key in keys[3:] if event.get(key)]
                after = doc.duration(max(0.0, event["time"] - self.began))
                rows.append((after, _WORDS[event["event"]], ", ".join(details)))
        half, more = _MOST_ROWS // 2, len(rows) - _MOST_ROWS
        return [*rows[:half], ("", f"{more} more", ""), *rows[-half:]] if more > 0 else rows


def timeline(runs: Sequence[Facts]) -> doc.Section:
    """When each run waited, ran, saved and was interrupted: a lane a run, and what happened in words."""
    lanes = [lane for facts in runs if (lane := _Lane(facts)).events]
    longest, drawn = max((lane.seconds for lane in lanes), default=0.0), lanes[:_MOST_LANES]
    pictures = [lane.picture(longest, f"{lane.label}: " if len(runs) > 1 else "") for lane in drawn]
    note = "From the first submission. Bars: training, orange where it failed; dotted: waiting; ticks: checkpoints."
    tables: list[doc.Part] = [
        doc.Table(("after", "event", ""), rows, caption=lane.label if len(lanes) > 1 else "What happened")
        for lane in drawn
        if (rows := lane.happened())
    ]
    if len(tables) > 3:
        tables = [doc.Fold("What happened, run by run", tables)]
    whole = doc.Charts("timeline", pictures, "when it waited, ran and saved", wide=True)
    return doc.Section("timeline", "Time line", [whole, *tables] if lanes else [], note)


def attempts(facts: Facts) -> list[doc.Part]:
    """When each attempt ran, on what, and how it ended."""
    rows = [
        (
            str(span.number), f"{datetime.fromtimestamp(span.began).astimezone():%Y-%m-%d %H:%M:%S}",
            fold(span.hosts) if span.hosts else NONE, doc.text(span.ranks), f"{span.from_step} to {span.to_step}",
            doc.duration(span.seconds), terminal.one_line(span.how, 200) or "killed without a word, or goes on",
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
    names, several = list(dict.fromkeys(name for _, parts, _ in known for name in parts)), len(known) > 1
    bars, heads, rows = [], ["part"], list[doc.Row]()
    for label, parts, total in known:
        bars.append(_stacked(f"{label}, {doc.duration(total)}" if several else "", parts, label, total))
        heads += [f"{label}, s" if several else "seconds", "of all"]
    for name in names:
        row = [f"{name}: {_MEANING[name]}" if name in _MEANING else name]
        for _, parts, total in known:
            own = parts.get(name)
            row += [number(own, ",.1f"), NONE if own is None else f"{100 * own / total:.1f} %"]
        rows.append(tuple(row))
    rows.append(("all", *chain(*((number(total, ",.1f"), "100 %") for *_, total in known))))
    legend = [(name, _PARTS.get(name, GREY)) for name in names]
    whole = doc.Charts("time", bars, "where the time of rank 0 went", legend, wide=True)
    note = "Time of rank 0 over all attempts; at any moment it is spent on exactly one thing."
    return doc.Section("time", "Where the time went", [whole, doc.Table(tuple(heads), rows, 1)] if known else [], note)


def _stacked(title: str, parts: Mapping[str, float], run: str, total: float) -> Picture:
    before, body, words = 0.0, list[Markup](), []
    for name, seconds in parts.items():
        share, colour = 100 * seconds / total, f"c{_PARTS.get(name, GREY)}"
        quiet = "" if name in _PARTS else " quiet"
        hint = tag("title", f"{name} {seconds:,.1f} s, {share:.1f} %")
        place = {"x": f"{before:.3f}%", "y": 0, "width": f"{share:.3f}%", "height": 26}
        body.append(tag("rect", hint, **place, class_=f"part {colour}{quiet}"))
        if share > 8.5:
            style = "inside middle" + (" on-quiet" if quiet else "") + (" if-wide" if share < 24 else "")
            body.append(tag("text", f"{name} {share:.0f} %", x=f"{before + share / 2:.3f}%", y=17, class_=style))
        before += share
        words.append(f"{name} {share:.0f} %")
    return Picture(title, "", doc.joined(body), f"{run}: {', '.join(words)}", 26)


def hardware(facts: Facts) -> list[doc.Part]:
    """A row for every GPU and for every host's CPUs, and curves of each node."""
    header = ("device", "utilisation, mean", "highest", "memory, highest", "power, mean", "temperature, highest")
    rows: list[doc.Row] = []
    for host, gpu in [(each, gpu) for each in facts.hosts for gpu in (*each.gpus(), None)]:
        use = host.usage("cpu_percent" if gpu is None else "util_percent", gpu)
        used, total = (host.usage(f"memory_{key}_mb", gpu) for key in ("used", "total"))
        power, heat = (None if gpu is None else host.usage(key, gpu) for key in ("power_w", "temperature_c"))
        held = doc.memory(used and used.highest) + (f" of {doc.memory(total.highest)}" if used and total else "")
        mean, highest = (number(value, ".0f", " %") for value in use or (None, None))
        watts, celsius = number(power and power.mean, ".0f", " W"), number(heat and heat.highest, ".0f", " °C")
        device = "CPUs" if gpu is None else f"GPU {gpu}"
        rows.append((f"{device} of {host.host}", mean, highest, held, watts, celsius))
    pictures = [picture for host in facts.hosts[:_MOST_HOSTS] for picture in _host(host, facts.label)]
    parts: list[doc.Part] = [doc.Table(header, rows, 1)]
    parts.append(doc.Charts("hardware", pictures, "use of the hardware over time"))
    if len(facts.hosts) > _MOST_HOSTS:
        parts.append(doc.Text([f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes."]))
    for name, output in facts.gpus_shown[:_MOST_HOSTS]:
        parts.append(doc.Fold(f"GPUs of {name}, as nvidia-smi has them", [doc.Block(output)]))
    if facts.started("device") == "cpu":
        parts.append(doc.Text(["No GPU took part: there is nothing for nvidia-smi to show."]))
    return parts


def _host(host: HostSamples, run: str) -> list[Picture | None]:
    times = [float(sample["time"]) for sample in host.samples]
    began, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return []
    unit, scale = doc.time_unit(seconds)

    def line(name: str, points: list[Point], colour: int, spec: str) -> Series:
        label = f"{name} {points[-1][1]:{spec}}" if points else ""
        return Series(name, points, colour % COLOURS, label=label, lost=_pauses(points))

    def of(key: str, gpu: int | None = None, by: float = 1.0) -> list[Point]:
        return sorted(((time - began) / scale, value / by) for time, value in host.curve(key, gpu))

    def of_gpus(key: str, spec: str = ".0f", by: float = 1.0) -> list[Series]:
        """A line a GPU; of many their mean before them."""
        lines = [line(f"GPU {index}", of(key, index, by), at, spec) for at, index in enumerate(host.gpus())]
        if len(lines) <= _MOST_LABELS:
            return lines
        groups = groupby(sorted(point for item in lines for point in item.points), lambda point: point[0])
        mean = [(x, fmean(y for _, y in group)) for x, group in groups]
        return [*(item._replace(colour=0, faint=True) for item in lines), line("GPU mean", mean, 0, spec)]

    memory = of_gpus("memory_used_mb", ".1f", 1024.0)
    memory.append(line("node", of("memory_used_mb", None, 1024.0), 7, ".1f"))
    memory.append(line("job", of("process_memory_mb", None, 1024.0), 5, ".1f"))
    use = [*of_gpus("util_percent"), line("CPUs", of("cpu_percent"), 7, ".0f")]
    group = f"{run} {host.host}"
    return [
        line_chart(Axes(f"{host.host} · use", "%", unit, group, 0.0, 100.0, seconds / scale), use),
        line_chart(Axes(f"{host.host} · memory", "GB", unit, group, 0.0, None, seconds / scale), memory),
        line_chart(Axes(f"{host.host} · power", "W", unit, group, 0.0, None, seconds / scale), of_gpus("power_w")),
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
        self.pairs = Counter[tuple[int, int]]()
        """(class, what it was taken for) -> how often."""
        many = len(self.names)
        for item in list_of(read.get("raw")) or list_of(read.get("ema")):
            if isinstance(item, list) and len(item) == 3 and all(map(fileio.is_whole, item)):
                label, told, count = item
                if label < many and told < many and count:
                    self.pairs[label, told] += count
        self.totals, self.right = [0] * many, [self.pairs[label, label] for label in range(many)]
        for (label, _), count in self.pairs.items():
            self.totals[label] += count


def _best(runs: Sequence[Facts]) -> Sequence[Facts]:
    """Those whose classes and mistakes are shown: of many the best by validation."""
    return runs if len(runs) <= _MOST_RUNS else sorted(runs, key=lambda facts: facts.rank)[:_MOST_RUNS]


def classes(runs: Sequence[Facts]) -> doc.Section:
    """Which class is taken for which, and how often each is told right."""
    known = [(facts, counts) for facts in _best(runs) if (counts := _Counts(facts)).pairs]
    parts: list[doc.Part] = []
    for facts, counts in known:
        if len(runs) > 1:
            parts.append(doc.Heading(f"{facts.label}, {counts.where}"))
        parts += _classes_of(counts)
    note = f"Of the best weights, on {known[0][1].where}." if len(runs) == 1 and known else "Of the best weights."
    if len(runs) > _MOST_RUNS:
        note += f" The best {_MOST_RUNS} of {len(runs)} runs, by validation."
    return doc.Section("classes", "Classes", parts, note)


def _classes_of(counts: _Counts) -> list[doc.Part]:
    names, totals = counts.names, counts.totals
    wrong = [(pair, times) for pair, times in counts.pairs.most_common() if pair[0] != pair[1]]
    rows = [
        (names[label], names[other], f"{times:,}", f"{100 * times / totals[label]:.1f} %")
        for (label, other), times in wrong[:_MOST_PAIRS]
    ]
    each = zip(names, totals, counts.right, strict=True)
    every = sorted((100 * right / total, name, total) for name, total, right in each if total)
    worst = every if len(every) <= _MOST_NAMED else every[:_MOST_BARS]
    title = "Accuracy by class" if len(worst) == len(every) else f"The {len(worst)} worst of {len(every)} classes"
    bars = [Bar(name, share, f"{share:.1f} % of {total:,}") for share, name, total in worst]
    pictures = [_matrix(counts), doc.bar_chart(title, "worst first", bars, high=100)]
    confused = doc.Table(("class", "taken for", "times", "of the class"), rows, 2, "Most often confused")
    parts: list[doc.Part] = [doc.Charts("classes", pictures, "classes")]
    parts.append(confused if rows else doc.Text(["None was told wrong."]))
    if len(worst) < len(every):
        all_rows = [(name, f"{total:,}", f"{share:.1f} %") for share, name, total in every]
        table = doc.Table(("class", "images", "told right"), all_rows, 1)
        parts.append(doc.Fold(f"All {len(every)} classes", [table]))
    return parts


def _at_step(read: Mapping[str, Any]) -> str:
    return f", step {read['step']}" if fileio.is_whole(read.get("step")) else ""


def _matrix(counts: _Counts) -> Picture | None:
    many = len(counts.names)
    if many > _MOST_DRAWN:
        return None
    named, longest, body = many <= _MOST_NAMED, max(map(len, counts.names)), list[Markup]()
    margin = min(6.5 * min(longest, 14) + 10, 100) if named else 6
    size, edge = (400 - margin) / many, margin - 5
    for at, name in enumerate(counts.names if named else ()):
        short, middle = name if len(name) <= 14 else name[:13] + "…", margin + (at + 0.5) * size
        body.append(tag("text", short, x=edge, y=middle, dy="0.35em", class_="tick end"))
        turned = {"class_": "tick", "dy": "0.3em", "transform": f"rotate(-90 {middle:.1f} {edge:.1f})"}
        body.append(tag("text", short, x=middle, y=edge, **turned if longest > 2 else {"class_": "tick middle"}))
    for (label, told), count in sorted(counts.pairs.items()):
        share, right = count / counts.totals[label], label == told
        opacity = 0.12 + 0.88 * share if right else 0.3 + 0.7 * share
        taken = "told right" if right else f"taken for {counts.names[told]}"
        hint = tag("title", f"{counts.names[label]} {taken}: {count:,} of {counts.totals[label]:,}") if named else None
        place = {"x": margin + told * size, "y": margin + label * size, "width": size, "height": size}
        body.append(tag("rect", hint, **place, fill_opacity=opacity, class_="cell c0" if right else "cell c1"))
        if size >= 22 and count < 10 ** int(size / 7):
            middles = {"x": margin + (told + 0.5) * size, "y": margin + (label + 0.5) * size, "dy": "0.35em"}
            body.append(tag("text", count, **middles, class_="count over" if opacity > 0.6 else "count"))
    body.append(tag("rect", x=margin, y=margin, width=400 - margin, height=400 - margin, class_="frame"))
    total = sum(counts.totals)
    words = f"Confusion matrix of {many} classes: {total - sum(counts.right)} of {total} told wrong"
    return Picture("Confusion matrix", "rows: the class; columns: taken for", doc.joined(body), words, 400, 400)


def mistakes(runs: Sequence[Facts]) -> doc.Section:
    """The images that were told wrong most confidently."""
    parts: list[doc.Part] = []
    most = _MOST_IMAGES if len(runs) == 1 else _MOST_OF_ONE
    for facts, split in product(_best(runs), ("val", "test")):
        read = fileio.read_object(facts.run_dir.mistakes(split))
        photos = [photo for item in list_of(read.get("images"))[:most] if (photo := _photo(item))]
        if photos or read.get("images") == []:
            parts.append(doc.Heading((f"{facts.label}, " if len(runs) > 1 else "") + split + _at_step(read)))
            parts.append(doc.Gallery(photos) if photos else doc.Text(["None was told wrong."]))
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return doc.Section("mistakes", "Most confidently wrong", parts, note)


def _photo(item: Any) -> doc.Photo | None:
    """One image with what it is and what it was taken for; None for what is no small PNG."""
    if not isinstance(item, dict) or not isinstance(png := item.get("png"), str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except ValueError:
        return None
    known = content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) >= 33
    if not known or not fileio.is_number(item.get("confidence")):
        return None
    label, told = (terminal.one_line(item.get(key, "?"), 60) for key in ("label", "told"))
    return doc.Photo(png, label, told, f"{100 * item['confidence']:.1f} %", int.from_bytes(content[16:20], "big") > 40)

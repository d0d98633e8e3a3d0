"""Sections with charts: curves, time line, where the time went, hardware; and of tasks with classes which is taken for
which, and the images that were told wrong most confidently."""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain, groupby, pairwise, product
from statistics import fmean, median
from typing import Any

from trainkit import fileio, terminal
from trainkit.ranks import fold
from trainkit.report import document as doc
from trainkit.report.document import COLOURS, GREY, NONE, Axes, Bar, Picture, Point, Series, line_chart, number
from trainkit.report.facts import Facts, HostSamples, best_of, list_of
from trainkit.run.metrics import Metric, TakenFor, confusion_of, evaluation_of
from trainkit.terminal import plural

_PACE = {"lr": Metric("", label="Learning rate"), "images_per_sec": Metric("images/s", label="Throughput")}
"""Curves of train records that are of no metric."""
_FEW_EPOCHS = 2.0
"""An axis of so few epochs would have two numbers: steps are drawn."""
_MOST_LANES, _MOST_ROWS, _MOST_MARKS, _MOST_HOSTS, _MOST_LABELS = 40, 100, 300, 8, 4
_MOST_RUNS, _MOST_NAMED, _MOST_BARS, _MOST_PAIRS = 4, 30, 20, 10
_MOST_IMAGES, _MOST_OF_ONE, _LARGEST_IMAGE = 48, 8, 1 << 18


def curves(runs: Sequence[Facts]) -> doc.Section:
    """Of one run train and val in two colours; of several, at most as many as there are colours, each in its own."""
    known = [facts for facts in runs if facts.train or facts.val]
    drawn = best_of(known, COLOURS)
    records, one = [record for facts in drawn for record in (*facts.train, *facts.val)], len(drawn) == 1
    by = "epoch" if max((r["epoch"] for r in records if "epoch" in r), default=0.0) > _FEW_EPOCHS else "step"
    x_to = max((r[by] for r in records if by in r), default=1.0)
    restarts = [(x, GREY if one else colour) for colour, facts in enumerate(drawn) for x in facts.restarts(by)]
    metrics = {name: metric for facts in drawn for name, metric in facts.described.metrics.items()}
    pictures = []
    for key, metric in (metrics | _PACE).items():
        axes = Axes(metric.label, metric.unit, by, "curves", key in _PACE, x_to, key == "loss", restarts=restarts)
        pictures.append(line_chart(axes, _series(drawn, key, metric, by)))
    legend = [] if one else [(facts.label, colour) for colour, facts in enumerate(drawn)]
    whole = doc.Charts("curves", pictures, "loss, metrics, learning rate and throughput", legend)
    notes = []
    if not one and any(facts.val for facts in drawn):
        notes.append("Thick: validation. Thin: training.")
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


def _series(drawn: Sequence[Facts], key: str, metric: Metric, by: str) -> list[Series]:
    """Of one run train and val in two colours; of several each in its own, and train faintly beside val."""
    has_val = key not in _PACE and any(key in record for facts in drawn for record in facts.val)
    found = []
    for split, (colour, facts) in product(("train", "val") if has_val else ("train",), enumerate(drawn)):
        points, lost = facts.curve(key, by, split)
        last = f"{points[-1][1]:{'.1f' if metric.unit == '%' else '.3g'}}" if points and key not in _PACE else ""
        if len(drawn) == 1:
            label = f"{split} {last}" if last else ""
            found.append(Series(split, points, int(split == "val"), label=label, lost=lost))
        else:
            is_faint = has_val and split == "train"
            found.append(Series(f"{facts.label} {split}", points, colour, is_faint, label=last, lost=lost))
    return found


_TOLD = (
    "refused", "failed", "cancelled", "excluded", "nonfinite", "rolled_back", "swarm_lost", "swarm_back",
    "average_refused", "peer_banned", "save_failed", "upload_failed",
)  # fmt: skip
"""Events that the table of attempts has not all."""


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
        words = [plural(facts.attempts, "attempt"), f"{doc.duration(running)} of training"]
        if (waiting := self.seconds - running) > 0.02 * running:
            words.append(f"{doc.duration(waiting)} waiting and starting")
        if facts.requeues:
            words.append(plural(facts.requeues, "requeue"))
        return f"{', '.join(words)}."

    def picture(self, longest: float, name: str) -> Picture:
        """The lane of ``longest`` seconds, and its title, which begins with ``name``."""

        def at(time: float) -> float:
            return 100 * min(1.0, max(0.0, (time - self.began) / (longest or 1.0)))

        spans, words = self.facts.spans[:_MOST_MARKS], self.in_words()
        until = [*(span.began for span in spans), self.began + self.seconds]
        waits = zip([self.began, *(span.ended for span in spans)], until, strict=True)
        runs = []
        for span in spans:
            is_well = span.went_well or (span is self.facts.spans[-1] and not span.how)  # it goes on
            runs.append((at(span.began), max(0.15, at(span.ended) - at(span.began)), 0 if is_well else 1))
        saved = [at(event["time"]) for event in self.events if event["event"] == "saved"]
        unit, seconds = doc.time_unit(longest)
        ticks = doc.Scale(0.0, longest / seconds, 0, 100)
        body = doc.drawn(
            "lane", waits=[(at(start), at(end)) for start, end in waits if end > start], spans=runs,
            saved=saved[:: max(1, len(saved) // _MOST_MARKS)],
            ticks=[(ticks(tick), f"{doc.shown(tick)} {unit}") for tick in ticks.ticks(6) if longest > 0],
        )  # fmt: skip
        return Picture(name + words, "", body, f"Time line of {self.label}: {words}", 42)

    def happened(self) -> list[doc.Row]:
        """Its events in words, of many the first and the last."""
        rows: list[doc.Row] = []
        for event in self.events:
            if event["event"] in _TOLD:
                keys = ("attempt", "step", "rank", "round", "host", "node", "name", "why", "error")
                details = [f"{key} {event[key]}" for key in keys[:4] if event.get(key) is not None]
                details += [str(event[key]) for key in keys[4:] if event.get(key)]
                after = doc.duration(max(0.0, event["time"] - self.began))
                rows.append((after, event["event"].replace("_", " "), ", ".join(details)))
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
    before, drawn, words = 0.0, [], []
    for name, seconds in parts.items():
        share = 100 * seconds / total
        words.append(f"{name} {share:.0f} %")
        drawn.append((before, share, _PARTS.get(name, GREY), words[-1]))
        before += share
    return Picture(title, "", doc.drawn("stack", parts=drawn), f"{run}: {', '.join(words)}", 26)


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
    charts = doc.Charts("hardware", pictures, "use of the hardware over time")
    parts: list[doc.Part] = [doc.Table(header, rows, 1), charts]
    if len(facts.hosts) > _MOST_HOSTS:
        parts.append(doc.Text([f"Curves of {_MOST_HOSTS} of {len(facts.hosts)} nodes."]))
    for name, output in facts.gpus_shown[:_MOST_HOSTS]:
        parts.append(doc.Fold(f"GPUs of {name}, as nvidia-smi has them", [doc.Block(output)]))
    return parts


def _host(host: HostSamples, run: str) -> list[Picture | None]:
    times = [float(sample["time"]) for sample in host.samples]
    began, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return []
    unit, scale = doc.time_unit(seconds)

    def line(name: str, points: list[Point], colour: int, spec: str) -> Series:
        label = f"{name} {points[-1][1]:{spec}}" if points else ""
        return Series(name, points, colour % COLOURS, label=label, pauses=_pauses(points))

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
    return [
        line_chart(Axes(f"{host.host} · {title}", measure, unit, f"{run} {host.host}", True, seconds / scale), lines)
        for title, measure, lines in (("use", "%", use), ("memory", "GB", memory), ("power", "W", of_gpus("power_w")))
    ]


def _pauses(points: Sequence[Point]) -> list[float]:
    """Places where samples are missing, between two attempts."""
    steps = [(a[0], b[0]) for a, b in pairwise(points)]
    usual = median(b - a for a, b in steps) if len(steps) > 1 else 0.0
    return [(a + b) / 2 for a, b in steps if b - a > 3 * usual > 0]


class _Counts:
    """`TakenFor` with what its rows come to."""

    def __init__(self, read: TakenFor) -> None:
        self.names, self.pairs = [terminal.one_line(name, 60) for name in read.classes], read.counts
        self.right = [self.pairs[label, label] for label in range(len(self.names))]
        self.totals = [0] * len(self.names)
        for (label, _), count in self.pairs.items():
            self.totals[label] += count


def classes(runs: Sequence[Facts]) -> doc.Section:
    """Which class is taken for which, and how often each is told right."""
    parts: list[doc.Part] = []
    for facts in best_of(runs, _MOST_RUNS):
        if (read := confusion_of(facts.run_dir)).counts:
            parts.append(doc.Heading((f"{facts.label}, " if len(runs) > 1 else "") + read.evaluation))
            parts += _classes_of(_Counts(read))
    note = "Of the best weights."
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
    whole = doc.Charts("classes", pictures, "classes")
    parts: list[doc.Part] = [whole, confused or doc.Text(["None was told wrong."])]
    if len(worst) < len(every):
        all_rows = [(name, f"{total:,}", f"{share:.1f} %") for share, name, total in every]
        table = doc.Table(("class", "images", "told right"), all_rows, 1)
        parts.append(doc.Fold(f"All {len(every)} classes", [table]))
    return parts


def _matrix(counts: _Counts) -> Picture | None:
    names, width, total = counts.names, 400, sum(counts.totals)
    if len(names) > _MOST_NAMED:
        return None
    margin = min(6.5 * max(map(len, names)) + 10, 100)
    cells = []
    for (label, told), count in sorted(counts.pairs.items()):
        taken = "told right" if label == told else f"taken for {names[told]}"
        words = f"{names[label]} {taken}: {count:,} of {counts.totals[label]:,}"
        cells.append((label, told, count, count / counts.totals[label], words))
    body = doc.drawn("matrix", names=names, margin=margin, size=(width - margin) / len(names), cells=cells, width=width)
    words = f"Confusion matrix of {len(names)} classes: {total - sum(counts.right)} of {total} told wrong"
    return Picture("Confusion matrix", "rows: the class; columns: taken for", body, words, width, width)


def mistakes(runs: Sequence[Facts]) -> doc.Section:
    """The images that were told wrong most confidently."""
    parts: list[doc.Part] = []
    most = _MOST_IMAGES if len(runs) == 1 else _MOST_OF_ONE
    for facts, split in product(best_of(runs, _MOST_RUNS), ("val", "test")):
        read = fileio.read_object(facts.run_dir.mistakes(split))
        photos = [photo for item in list_of(read.get("images"))[:most] if (photo := _photo(item))]
        if photos or read.get("images") == []:
            evaluation = evaluation_of({**read, "split": split})
            parts.append(doc.Heading((f"{facts.label}, " if len(runs) > 1 else "") + evaluation))
            pngs, rows = [png for png, _ in photos], [row for _, row in photos]
            table = doc.Table(("class", "taken for", "sure"), rows, 2)
            parts.append(doc.Gallery(pngs, table) if photos else doc.Text(["None was told wrong."]))
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return doc.Section("mistakes", "Most confidently wrong", parts, note)


def _photo(item: Any) -> tuple[str, doc.Row] | None:
    """One image, and its row; None for what is no small PNG."""
    if not isinstance(item, dict) or not isinstance(png := item.get("png"), str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except ValueError:
        return None
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or not fileio.is_number(item.get("confidence")):
        return None
    label, told = (terminal.one_line(item.get(key, "?"), 60) for key in ("label", "told"))
    return png, (label, told, f"{100 * item['confidence']:.1f} %")

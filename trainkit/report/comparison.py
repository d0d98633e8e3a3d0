"""The section that compares runs: what sets them apart, and speed-up and efficiency where they compare."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from trainkit.common.terminal import plural
from trainkit.config.layers import flatten
from trainkit.report.charts import GREY, Axes, Picture, Point, Series, line_chart
from trainkit.report.document import Charts, Heading, Items, Part, ReportRow, ReportSection, Table, Text
from trainkit.report.facts import Facts
from trainkit.report.values import NONE, TIMES, duration, memory, number, rate, text, with_unit

_WORK = ("model.", "data.name", "data.image_size", "data.pack")
"""Settings that change how much work an image is."""
_NO_WORK = ("model.pretrained", "model.checkpoint")
"""Settings that begin like these and do not."""
_FOR_SPEED = (
    *("strategy.", "launch.", "model.", "data.", "augment.", "optim.name", "train.precision", "train.compile"),
    *("train.global_batch_size", "train.micro_batch_size", "train.channels_last", "train.activation_checkpointing"),
    *("train.ema_decay", "train.deterministic", "checkpoint.asynchronous"),
)
"""Settings that change how fast a run is, or how much memory it takes."""
_NOT_COMPARED = ("launch.", "monitor.", "collaborative.", "data.root", "data.workers")
_NODES = ("launch.nodes", "launch.ntasks_per_node", "launch.gpus_per_node")
_MOST_EFFICIENT = 1.05
"""The efficiency beyond which the slower run must have been held up."""
_FEWEST = 3
"""Speeds in a median: the first updates are slow."""
_MOST_COLUMNS = 8
"""Runs beside each other in a table; more are rows of it."""
_MOST_SENTENCES = 40


def is_about_speed(key: str) -> bool:
    """True if a difference in this setting is a reason to compare speeds, as one in a learning rate is not."""
    return key.startswith(_FOR_SPEED)


def _ratio(value: float | None, other: float | None) -> float | None:
    if not value or not other:
        return None
    return value / other


class _Pair:
    """A run beside the first: their ratios, and why they have none; each reason is empty where they compare."""

    def __init__(self, facts: Facts, first: Facts) -> None:
        self.facts = facts
        self.first = first
        self.both = (first, facts)
        self.differ = _differing(facts, first)
        work = []
        for key, words in self.differ.items():
            if key.startswith(_WORK) and key not in _NO_WORK:
                work.append(words)
        self.other_work = ", ".join(work)
        self.more = _ratio(facts.processors, first.processors)
        self.speed_up = _ratio(facts.images_per_sec, first.images_per_sec)
        self.no_speed_up = self.other_work or self._hindered()
        if self.no_speed_up:
            self.speed_up = None

    def _hindered(self) -> str:
        for facts in self.both:
            if facts.hindered_by:
                return f"of {facts.label} {facts.hindered_by}"
            if 0 < len(facts.speeds) < _FEWEST:
                return f"{facts.label} has {plural(len(facts.speeds), 'train record')}, and the first updates are slow"
        if not self.speed_up or not self.more or self.more <= 1 or self.speed_up <= self.more * _MOST_EFFICIENT:
            return ""
        came = f"it came to {self.speed_up:.2f}{TIMES} the speed with {self.more:g}{TIMES} the processors"
        return f"{came}, so something held {self.first.label} up"

    @cached_property
    def other_length(self) -> str:
        """Why the times of the two are not compared."""
        unfinished = []
        paused = []
        for facts in self.both:
            if not facts.finished:
                unfinished.append(facts.label)
            if facts.still_seconds:
                paused.append(f"{facts.label} stood still for {duration(facts.still_seconds)} of its training")
        if unfinished:
            return f"{' and '.join(unfinished)} did not come to the end"
        if paused:
            return ", ".join(paused)
        own = self.facts.steps * self.facts.count("train.global_batch_size")
        theirs = self.first.steps * self.first.count("train.global_batch_size")
        if own == theirs:
            return ""
        return f"it saw {own:,} images and not {theirs:,}"

    @cached_property
    def other_pass(self) -> str:
        """Why the memory of the two is not compared."""
        own = self.facts.started("micro_batch_size")
        theirs = self.first.started("micro_batch_size")
        device = self.facts.started("device")
        their_device = self.first.started("device")
        if None in (device, their_device) or (own is None) != (theirs is None):
            return "one of the two has not told its device or the images of a pass"
        reasons = []
        if own != theirs:
            reasons.append(f"a rank takes {own} images in one pass and not {theirs}")
        if device != their_device:
            reasons.append(f"it ran on {device} and not {their_device}")
        # On a CPU the memory is that of the process, which tried larger batches first.
        probed = []
        for facts in self.both:
            if facts.last_event("probed"):
                probed.append(facts.label)
        if device == "cpu" and probed:
            reasons.append(f"train.micro_batch_size=auto has tried sizes in the process of {' and '.join(probed)}")
        return ", ".join(reasons)

    def _also_differs(self) -> str:
        """Other settings than strategy and ranks that change the speed."""
        known = ("strategy.", "launch.", "data.root")
        also = []
        for key, words in self.differ.items():
            if is_about_speed(key) and not key.startswith(known):
                also.append(words)
        for key in ("precision", "device"):
            own = self.facts.started(key)
            theirs = self.first.started(key)
            if own and theirs and own != theirs and f"train.{key}" not in self.differ:
                also.append(f"{key} {own} and not {theirs}")
        return ", ".join(also)

    def sentences(self) -> list[str]:
        """Say what does not compare, and why."""
        label = self.facts.label
        if not (self.facts.begun and self.first.begun):
            return []
        if self.other_work:
            return [f"{label} is not compared in speed, time and memory: {self.other_work}."]
        told = []
        also = self._also_differs()
        if self.no_speed_up:
            told.append(f"{label} has no speed-up: {self.no_speed_up}.")
        elif also:
            told.append(f"The speed-up of {label} is also that of other settings: {also}.")
        if self.other_length:
            told.append(f"{label} has no time ratio: {self.other_length}.")
        if self.other_pass:
            told.append(f"{label} has no memory saved: {self.other_pass}.")
        return told

    def cells(self) -> dict[str, str]:
        """Row of `comparison_table`."""
        facts = self.facts
        headline = self.first.task_metrics.headline
        times = None
        if not self.no_speed_up and not self.other_length:
            times = _ratio(self.first.train_seconds, facts.train_seconds)
        used = max(facts.memory_of_ranks, default=None)
        saved = None
        if facts is not self.first and not self.other_work and not self.other_pass:
            share = _ratio(used, max(self.first.memory_of_ranks, default=None))
            saved = share and round(100 * (1 - share))
        efficiency = _ratio(self.speed_up, self.more)
        return {
            "run": facts.label,
            "strategy": text(facts.setting("strategy.name")),
            "processors": text(facts.processors),
            "steps": str(facts.steps) if facts.begun else NONE,
            f"val {headline}": with_unit(facts.best, facts.headline),
            f"test {headline}": with_unit(facts.tested, facts.headline),
            "training time": duration(facts.train_seconds),
            "images/s": rate(facts.images_per_sec),
            "speed-up": number(self.speed_up, ".2f", TIMES),
            "efficiency": number(efficiency and 100 * efficiency, ".0f", " %"),
            "time ratio": number(times, ".2f", TIMES),
            "peak memory of a rank": memory(used),
            "memory saved": number(saved, "+", " %"),
        }


def _differing(facts: Facts, first: Facts) -> dict[str, str]:
    """Settings that differ from those of the first run -> how, in words."""
    own = dict(flatten(facts.config))
    theirs = dict(flatten(first.config))
    differ = {}
    for key in {**own, **theirs}:
        if own.get(key) != theirs.get(key):
            differ[key] = f"{key} {text(own.get(key))} and not {text(theirs.get(key))}"
    return differ


def comparison(runs: Sequence[Facts]) -> ReportSection:
    """Set every run against the first."""
    first = runs[0].label
    if len(runs) < 2:
        return ReportSection("comparison", "Comparison", ())
    parts: list[Part] = [comparison_table(runs), Items([[sentence] for sentence in not_comparable(runs)])]
    simulated = []
    for facts in runs:
        if facts.is_simulated:
            simulated.append(facts.label)
    if simulated:
        nodes = f"The nodes of {', '.join(simulated)} were simulated on one machine, whose processors their ranks share"
        parts.append(Text([f"{nodes}: speed-up and efficiency say nothing of real nodes."]))
    parts.append(Charts("scaling", _scaling(runs), "speed-up and efficiency by processors"))
    different = differences(runs)
    if different:
        parts += [Heading("Settings that differ"), different]
    note = (
        f"Speed-up: images/s relative to {first}. Efficiency: speed-up divided by how many times more processors there"
        " are (ranks, or GPUs under DataParallel). Time ratio: training time of"
        f" {first} divided by that of the run, where both saw the same number of images to the end. Memory saved: of"
        f" the rank that needs most, relative to {first}, where a rank takes as many images in one pass."
    )
    return ReportSection("comparison", "Comparison", parts, note)


def comparison_table(runs: Sequence[Facts]) -> Table:
    """One row a run, set against the first."""
    cells: dict[str, str] = {}
    rows = []
    for facts in runs:
        cells = _Pair(facts, runs[0]).cells()
        rows.append(tuple(cells.values()))
    return Table(tuple(cells), rows, 2)


def not_comparable(runs: Sequence[Facts]) -> list[str]:
    """Sentences on runs that were not set against the first, and why; of many the first ones."""
    sentences = []
    for facts in runs:
        if not facts.begun:
            sentences.append(f"{facts.label} has not begun.")
    for facts in runs[1:]:
        sentences += _Pair(facts, runs[0]).sentences()
    more = len(sentences) - _MOST_SENTENCES
    if more > 0:
        sentences[_MOST_SENTENCES:] = [f"And {more} more like these."]
    return sentences


def differences(runs: Sequence[Facts]) -> Table:
    """Settings that are not the same in all runs: a column a run, of many runs a row each."""
    labels = []
    configs = []
    keys: dict[str, Any] = {}
    for facts in runs:
        labels.append(facts.label)
        configs.append(dict(flatten(facts.config)))
        keys |= configs[-1]
    columns: list[ReportRow] = [("setting", *labels)]
    compared = [key for key in keys if not key.startswith(_NOT_COMPARED)]
    for key in [*compared, *_NODES]:
        values = [config.get(key) for config in configs]
        if len(set(map(repr, values))) > 1:
            columns.append((key, *map(text, values)))
    if len(columns) > 1 and len(runs) > _MOST_COLUMNS:
        columns = list(zip(*columns, strict=True))
        columns[0] = ("run", *columns[0][1:])
    return Table(columns[0], columns[1:])


def _scaling(runs: Sequence[Facts]) -> list[Picture | None]:
    """Speed-up and efficiency by processors, where not all runs have as many; of several with as many the median."""
    first = runs[0].processors
    found = defaultdict[int, list[float]](list)
    for facts in runs:
        speed_up = _Pair(facts, runs[0]).speed_up
        if speed_up and facts.processors:
            found[facts.processors].append(speed_up)
    if len(found) < 2 or not first:
        return []
    points: list[Point] = []
    shares: list[Point] = []
    for many in sorted(found):
        speed_up = statistics.median(found[many])
        points.append((many, speed_up))
        shares.append((many, 100 * speed_up * first / many))
    ideal = [(min(found), min(found) / first), (max(found), max(found) / first)]
    linear = Series("linear", ideal, GREY, label="linear", dashed=True)
    measured = Series("measured", points, label=f"{points[-1][1]:.2f}{TIMES}")
    efficiency = Series("efficiency", shares, label=f"{shares[-1][1]:.0f} %")
    return [
        line_chart(Axes("Speed-up", TIMES, "processors", "scaling", from_zero=True), [linear, measured]),
        line_chart(Axes("Efficiency", "%", "processors", "scaling", from_zero=True), [efficiency]),
    ]

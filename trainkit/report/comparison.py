"""Sections on several runs: what sets them apart, speed-up and efficiency where they compare, results of a sweep."""

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property

from trainkit import fileio
from trainkit.config.loading import flatten
from trainkit.report import document as doc
from trainkit.report.document import COLOURS, GREY, NONE, TIMES, Axes, Picture, Series, line_chart, number, text
from trainkit.report.facts import Facts, name_of
from trainkit.terminal import plural

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
_NOT_COMPARED = ("launch.", "monitor.", "collaborative.", "data.root", "data.workers")
_NODES = ("launch.nodes", "launch.ntasks_per_node", "launch.gpus_per_node")
_MOST_EFFICIENT = 1.05
"""The efficiency beyond which the slower run must have been held up."""
_FEWEST = 3
"""Speeds in a median: the first updates are slow."""
_MOST_COLUMNS = 8
"""Runs beside each other in a table; more are rows of it."""
_FEWEST_FOR_IMPORTANCE, _MOST_CURVES = 8, 200
_IMPORTANCE = "Of what sets the best validations of {runs} runs apart, by a forest of regression trees."
_MOST_SENTENCES, _MOST_ROWS = 40, 20


def is_about_speed(keys: Iterable[str]) -> bool:
    """Whether settings that differ are a reason to compare speeds, as a learning rate or a seed is not."""
    return any(key.startswith(_FOR_SPEED) for key in keys)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


class _Pair:
    """A run beside the first: their ratios, and why they have none; each reason is empty where they compare."""

    def __init__(self, facts: Facts, first: Facts) -> None:
        self.facts, self.first, self.both = facts, first, (first, facts)
        own, theirs = dict(flatten(facts.config)), dict(flatten(first.config))
        self.differ = {
            key: f"{key} {text(own.get(key))} and not {text(theirs.get(key))}"
            for key in {**own, **theirs}
            if own.get(key) != theirs.get(key)
        }
        work = [words for key, words in self.differ.items() if key.startswith(_WORK) and key not in _NO_WORK]
        self.other_work = ", ".join(work)
        self.more = _ratio(facts.processors, first.processors)
        ratio = _ratio(facts.images_per_sec, first.images_per_sec)
        self.no_speed_up = self.other_work or self._hindered(ratio)
        self.speed_up = None if self.no_speed_up else ratio

    def _hindered(self, ratio: float | None) -> str:
        for item in self.both:
            if item.hindered_by:
                return f"of {item.label} {item.hindered_by}"
            if 0 < len(item.speeds) < _FEWEST:
                records = plural(len(item.speeds), "train record")
                return f"{item.label} has {records}, and the first updates are slow"
        if not (ratio and self.more and self.more > 1 and ratio > self.more * _MOST_EFFICIENT):
            return ""
        came = f"it came to {ratio:.2f}{TIMES} the speed with {self.more:g}{TIMES} the processors"
        return f"{came}, so something held {self.first.label} up"

    @cached_property
    def other_length(self) -> str:
        """Why the times of the two are not compared."""
        if unfinished := [item.label for item in self.both if not item.finished]:
            return f"{' and '.join(unfinished)} did not come to the end"
        if paused := [(item.label, doc.duration(item.still_seconds)) for item in self.both if item.still_seconds]:
            return ", ".join(f"{label} stood still for {still} of its training" for label, still in paused)
        theirs, own = (item.steps * item.count("train.global_batch_size") for item in self.both)
        return "" if own == theirs else f"it saw {own:,} images and not {theirs:,}"

    @cached_property
    def other_pass(self) -> str:
        """Why the memory of the two is not compared."""
        theirs, own = (item.started("micro_batch_size") for item in self.both)
        their_kind, kind = (item.started("device") for item in self.both)
        if None in (kind, their_kind) or (own is None) != (theirs is None):
            return "one of the two has not told its device or the images of a pass"
        reasons = []
        if own != theirs:
            reasons.append(f"a rank takes {own} images in one pass and not {theirs}")
        if kind != their_kind:
            reasons.append(f"it ran on {kind} and not {their_kind}")
        # On a CPU the memory is that of the process, which tried larger batches first.
        if probed := [item.label for item in self.both if kind == "cpu" and item.last_event("probed")]:
            reasons.append(f"train.micro_batch_size=auto has tried sizes in the process of {' and '.join(probed)}")
        return ", ".join(reasons)

    def _also_differs(self) -> str:
        """Other settings than strategy and ranks that change the speed."""
        known = ("strategy.", "launch.", "data.root")
        also = {key: words for key, words in self.differ.items() if is_about_speed([key]) and not key.startswith(known)}
        for key in ("precision", "device"):
            theirs, own = (item.started(key) for item in self.both)
            if own and theirs and own != theirs and f"train.{key}" not in also:
                also[key] = f"{key} {own} and not {theirs}"
        return ", ".join(also.values())

    def sentences(self) -> list[str]:
        """What does not compare, and why."""
        label, told = self.facts.label, []
        if not (self.facts.begun and self.first.begun):
            return []
        if self.other_work:
            return [f"{label} is not compared in speed, time and memory: {self.other_work}."]
        if self.no_speed_up:
            told.append(f"{label} has no speed-up: {self.no_speed_up}.")
        elif also := self._also_differs():
            told.append(f"The speed-up of {label} is also that of other settings: {also}.")
        if self.other_length:
            told.append(f"{label} has no time ratio: {self.other_length}.")
        if self.other_pass:
            told.append(f"{label} has no memory saved: {self.other_pass}.")
        return told

    def cells(self, name: str) -> dict[str, str]:
        """The row of `comparison_table`; ``name``: of the headline."""
        facts, first, metric = self.facts, self.first, self.facts.headline
        first_used, used = (max(item.memory_of_ranks, default=None) for item in self.both)
        times, share = _ratio(first.train_seconds, facts.train_seconds), _ratio(used, first_used)
        if facts is first or self.other_work or self.other_pass:
            share = None
        efficiency = _ratio(self.speed_up, self.more)
        return {
            "run": facts.label,
            "strategy": text(facts.setting("strategy.name")),
            "processors": text(facts.processors),
            "steps": str(facts.steps) if facts.begun else NONE,
            f"val {name}": doc.measured(facts.best, metric),
            f"test {name}": doc.measured(facts.tested, metric),
            "training time": doc.duration(facts.train_seconds),
            "images/s": doc.rate(facts.images_per_sec),
            "speed-up": number(self.speed_up, ".2f", TIMES),
            "efficiency": number(efficiency and 100 * efficiency, ".0f", " %"),
            "time ratio": number(None if self.no_speed_up or self.other_length else times, ".2f", TIMES),
            "peak memory of a rank": doc.memory(used),
            "memory saved": number(share and round(100 * (1 - share)), "+", " %"),
        }


def comparison(runs: Sequence[Facts]) -> doc.Section:
    """Every run against the first."""
    first = runs[0].label
    parts: list[doc.Part] = [comparison_table(runs), doc.Items([[sentence] for sentence in not_comparable(runs)])]
    if simulated := ", ".join(facts.label for facts in runs if facts.is_simulated):
        nodes = f"The nodes of {simulated} were simulated on one machine, whose processors their ranks share"
        parts.append(doc.Text([f"{nodes}: speed-up and efficiency say nothing of real nodes."]))
    parts.append(doc.Charts("scaling", _scaling(runs), "speed-up and efficiency by processors"))
    if different := differences(runs):
        parts += [doc.Heading("Settings that differ"), different]
    note = (
        f"Speed-up: images/s relative to {first}. Efficiency: speed-up divided by how many times more processors there"
        " are (ranks, or GPUs under DataParallel). Time ratio: training time of"
        f" {first} divided by that of the run, where both saw the same number of images to the end. Memory saved: of"
        f" the rank that needs most, relative to {first}, where a rank takes as many images in one pass."
    )
    return doc.Section("comparison", "Comparison", parts if len(runs) > 1 else (), note)


def comparison_table(runs: Sequence[Facts]) -> doc.Table:
    """One row a run, set against the first."""
    rows = [_Pair(facts, runs[0]).cells(runs[0].described.headline) for facts in runs]
    return doc.Table(tuple(rows[0]), [tuple(row.values()) for row in rows], 2)


def not_comparable(runs: Sequence[Facts]) -> list[str]:
    """Which runs were not set against the first, and why, in sentences; of many the first ones."""
    sentences = [f"{facts.label} has not begun." for facts in runs if not facts.begun]
    sentences += [sentence for facts in runs[1:] for sentence in _Pair(facts, runs[0]).sentences()]
    more = len(sentences) - _MOST_SENTENCES
    return [*sentences[:_MOST_SENTENCES], f"And {more} more like these."] if more > 0 else sentences


def differences(runs: Sequence[Facts]) -> doc.Table:
    """The settings that are not the same in all runs: a column a run, of many runs a row each."""
    flat = [dict(flatten(facts.config)) for facts in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if not key.startswith(_NOT_COMPARED))
    rows = [
        (key, *(text(settings.get(key)) for settings in flat))
        for key in [*keys, *_NODES]
        if len({repr(settings.get(key)) for settings in flat}) > 1
    ]
    labels = [facts.label for facts in runs]
    if not rows or len(runs) <= _MOST_COLUMNS:
        return doc.Table(("setting", *labels), rows)
    header, *turned = zip(("run", *labels), *rows, strict=True)
    return doc.Table(header, turned)


def _scaling(runs: Sequence[Facts]) -> list[Picture | None]:
    """Speed-up and efficiency by processors, where not all runs have as many; of several with as many the median."""
    found, first = dict[int, list[float]](), runs[0].processors
    for facts in runs:
        speed_up = _Pair(facts, runs[0]).speed_up
        if speed_up and facts.processors:
            found.setdefault(facts.processors, []).append(speed_up)
    if len(found) < 2 or not first:
        return []
    points = [(float(many), statistics.median(found[many])) for many in sorted(found)]
    ideal = [(many, many / first) for many, _ in (points[0], points[-1])]
    linear = Series("linear", ideal, GREY, label="linear", dashed=True)
    measured = Series("measured", points, label=f"{points[-1][1]:.2f}{TIMES}")
    shares = [(many, 100 * speed_up * first / many) for many, speed_up in points]
    efficiency = Series("efficiency", shares, label=f"{shares[-1][1]:.0f} %")
    return [
        line_chart(Axes("Speed-up", TIMES, "processors", "scaling", from_zero=True), [linear, measured]),
        line_chart(Axes("Efficiency", "%", "processors", "scaling", from_zero=True), [efficiency]),
    ]


def outcome(runs: Sequence[Facts]) -> list[str]:
    """How far a sweep came, and its best run, in sentences; ``runs`` has the best first."""
    first, name, metric = runs[0], runs[0].described.headline, runs[0].headline
    pruned = sum(facts.pruned for facts in runs)
    were = f", {pruned} {'was' if pruned == 1 else 'were'} pruned" if pruned else ""
    lines = [f"{sum(facts.finished for facts in runs)} of {len(runs)} runs have finished{were}."]
    if first.best is not None and set(first.point) == {"seed"}:
        unit = "In percent, over" if metric.unit == "%" else "Over"
        test = spread([facts.tested for facts in runs])
        tested = f", test {name} {test}" if test != NONE else ""
        lines.append(f"{unit} the seeds: val {name} {spread([facts.best for facts in runs])}{tested}.")
    elif first.best is not None:
        equal = sum(facts.best == first.best for facts in runs) - 1
        others = f" and {plural(equal, 'other')}" if equal else ""
        tested = f", test {name} {metric.text(first.tested)}" if first.tested is not None else ""
        unfinished = "" if first.finished else " It has not finished."
        best = f"{first.label}{others}, val {name} {metric.text(first.best)}{tested}"
        lines.append(f"Best by validation: {best}.{unfinished}")
    elif any(facts.begun for facts in runs):
        lines.append("No validation was reached.")
    if diverged := [facts.label for facts in runs if facts.setbacks.diverged]:
        lines.append(f"Diverged: {', '.join(diverged)}.")
    return lines


def swept(runs: Sequence[Facts]) -> doc.Section:
    """The results of a sweep; ``runs`` has the best first."""
    every, *means = sweep_tables(runs)
    charts = doc.Charts(
        "results",
        [_against(key, runs) for key in runs[0].point if key != "seed"],
        "results against what was swept",
    )
    parts: list[doc.Part] = [*means, charts]
    if len(runs) > _MOST_ROWS and (means or charts):  # they would push what they come to off the screen
        parts.append(doc.Fold(f"All {len(runs)} runs", [every]))
    else:
        parts.insert(0, every)
    rows = [(key, f"{100 * share:.0f} %") for key, share in importance(runs)]
    parts.append(doc.Table(("setting", "importance"), rows, 1, _IMPORTANCE.format(runs=len(runs))))
    if any(facts.pruned for facts in runs):
        parts.append(doc.Charts("trials", [_cut(runs)], "all runs; those that end early were pruned"))
    note = "The best by validation first." if runs[0].best is not None else ""
    if charts:
        note += " Dots: single runs; lines: their means."
    return doc.Section("results", "Results", parts, note)


def importance(runs: Sequence[Facts]) -> list[tuple[str, float]]:
    """How much of what sets the results apart goes by each setting that was swept, the most first; empty where few runs
    say little.

    It is the mean decrease of variance in a forest of regression trees (Breiman, 2001, as scikit-learn computes it), to
    which the scale of a setting does not matter.
    """
    known = [facts for facts in runs if facts.best is not None]
    keys = list(dict.fromkeys(key for facts in known for key in facts.point))
    if len(keys) < 2 or len(known) < _FEWEST_FOR_IMPORTANCE:
        return []
    columns = []
    for key in keys:
        words = [facts.point.get(key, "") for facts in known]
        # For a tree: where one is no number, their places among them.
        columns.append(_numbers(words) or [float(sorted(set(words)).index(word)) for word in words])
    from sklearn.ensemble import RandomForestRegressor  # a second, for sweeps alone

    forest = RandomForestRegressor(200, random_state=0)
    forest.fit(list(zip(*columns, strict=True)), [facts.best for facts in known])
    shares = map(float, forest.feature_importances_)
    return sorted(zip(keys, shares, strict=True), key=lambda item: -item[1])


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Values of one setting; None where one is no number."""
    with suppress(ValueError):
        numbers = [float(value) for value in values]
        return numbers if all(map(fileio.is_number, numbers)) else None
    return None


def _cut(runs: Sequence[Facts]) -> Picture | None:
    """The headline of each run by epoch, the best ones coloured; a pruned one ends where it was stopped."""
    name, metric = runs[0].described.headline, runs[0].headline
    series = []
    for place, facts in enumerate(runs[:_MOST_CURVES]):
        points, _ = facts.curve(name, "epoch", "val")
        is_faint = facts.pruned or place >= COLOURS
        label = "" if is_faint else facts.run_dir.path.name
        series.append(Series(facts.label, points, place if place < COLOURS else GREY, is_faint, label=label))
    return line_chart(Axes(f"{metric.label}, validation", metric.unit, "epoch", "trials"), series)


def sweep_tables(runs: Sequence[Facts]) -> list[doc.Table]:
    """All runs; and, where seeds were swept, the means over them, the best first."""
    keys = list(dict.fromkeys(key for facts in runs for key in facts.point))
    others = [key for key in keys if key != "seed"]
    name, metric = runs[0].described.headline, runs[0].headline
    is_chosen = any(facts.last_event("sampled") for facts in runs)
    rows: list[doc.Row] = []
    groups: dict[doc.Row, list[Facts]] = {}
    for facts in runs:
        best = (number(facts.best, metric.spec), number((facts.best_val or {}).get("epoch"), ".1f"))
        by = [str(facts.last_event("sampled").get("by", NONE))] * is_chosen
        rest = (number(facts.tested, metric.spec), doc.duration(facts.train_seconds), *by, _remark(facts))
        rows.append((facts.run_dir.path.name, *(facts.point.get(key, NONE) for key in keys), *best, *rest))
        groups.setdefault(tuple(facts.point.get(key, NONE) for key in others), []).append(facts)
    last = ("training time", *["chosen by"] * is_chosen, "")
    tables = [doc.Table(("folder", *keys, f"val {name}", "epoch", f"test {name}", *last), rows, 1)]

    def mean(group: Sequence[Facts]) -> float:
        """For sorting: the lowest is the best."""
        known = [facts.best for facts in group if facts.best is not None]
        return statistics.fmean(known) * (-1 if metric.higher_is_better else 1) if known else float("inf")

    if "seed" in keys:
        means: list[doc.Row] = []
        for values, group in sorted(groups.items(), key=lambda item: mean(item[1])):
            val, test = (spread(each, metric.spec) for each in ([f.best for f in group], [f.tested for f in group]))
            means.append((*values, str(len(group)), val, test))
        tables.append(doc.Table((*others, "seeds", f"val {name}, mean ± sd", f"test {name}, mean ± sd"), means, 1))
    return tables


def _remark(facts: Facts) -> str:
    if facts.finished:
        return "diverged" if facts.setbacks.diverged else ""
    if facts.pruned:
        return f"pruned after {plural(facts.steps, 'step')}"
    last = facts.last_event("failed", "ended")
    if last.get("event") == "failed" or last.get("state") not in (None, "COMPLETED"):
        return str(last.get("state", "FAILED"))
    return f"{facts.steps} steps so far" if facts.begun else "not begun"


def spread(values: Sequence[float | None], spec: str = ".2f") -> str:
    """``91.00 ± 1.41``: mean and standard deviation of those that are known, and of how many where not of all."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    deviation = f" ± {statistics.stdev(known):{spec}}" if len(known) > 1 else ""
    of = f" (of {len(known)})" if len(known) < len(values) else ""
    return f"{statistics.fmean(known):{spec}}{deviation}{of}"


def _against(key: str, runs: Sequence[Facts]) -> Picture | None:
    """The headline against one swept setting, a line for each choice of the others; seeds are averaged."""
    choices: dict[str, dict[float, list[float]]] = {}
    if (values := _numbers([facts.point.get(key, "") for facts in runs])) is None:
        return None
    for facts, value in zip(runs, values, strict=True):
        if facts.best is not None:
            others = {k: v for k, v in facts.point.items() if k not in (key, "seed")}
            choices.setdefault(name_of(others), {}).setdefault(value, []).append(facts.best)
    if len({value for own in choices.values() for value in own}) < 2:
        return None
    series, name, metric = list[Series](), runs[0].described.headline, runs[0].headline
    if all(len(own) == 1 for own in choices.values()):  # drawn: no two runs differ in this setting alone
        drawn = list(choices.items())[:_MOST_CURVES]
        series += [Series(choice, [(at, statistics.fmean(own[at])) for at in own]) for choice, own in drawn]
        choices = {}
    for colour, (choice, own) in enumerate(list(choices.items())[:COLOURS]):
        means = [(at, statistics.fmean(own[at])) for at in sorted(own)]
        series.append(Series(choice or f"val {name}", means, colour, label=choice or f"{means[-1][1]:.3g}"))
        single = [(at, y) for at, _ in means for y in own[at] if len(own[at]) > 1]
        series += [Series(f"{choice} single run".strip(), [point], colour, faint=True) for point in single]
    axes = Axes(f"{metric.label}, validation", metric.unit, key, f"swept {key}", x_may_be_log=True)
    return line_chart(axes, series)

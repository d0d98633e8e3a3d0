"""Several runs set against the first: speed-up, efficiency, time and memory, and only where they compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainkit.config.loading import flatten
from trainkit.report.facts import Facts
from trainkit.report.tables import NONE, TIMES, Row, duration, memory, number, speed_spec

COMPARISON = (
    "run", "strategy", "processors", "steps", "val acc1", "test acc1", "training time", "images/s", "speed-up",
    "efficiency", "time ratio", "peak memory of a rank", "memory saved",
)  # fmt: skip

_WORK = ("model.", "data.name", "data.image_size", "data.pack")
"""Settings by which an image is as much work in one run as in another."""
_OF_NO_WEIGHT = ("model.pretrained", "model.checkpoint")
"""Which weights a model begins with is no matter of speed."""
_FOR_SPEED = (
    *("strategy.", "launch.", "model.", "data.", "augment.", "optim.name", "train.precision", "train.compile"),
    *("train.global_batch_size", "train.micro_batch_size", "train.channels_last", "train.activation_checkpointing"),
    *("train.ema_decay", "train.deterministic", "checkpoint.asynchronous"),
)
"""Settings that change how fast a run is, or how much memory it takes."""


_MOST_EFFICIENT = 1.05
"""More than so much of what its processors can bring no run reaches: then the other one was held up."""


_FEWEST = 3
"""Records of a speed, so that the median is not that of the first updates."""
_MOST_COLUMNS = 8
"""Runs beside each other in a table; more are rows of it."""
_MOST_SENTENCES = 40


def is_about_speed(keys: Iterable[str]) -> bool:
    """Whether settings that differ are a reason to compare speeds: a learning rate or a seed is none."""
    return any(key.startswith(_FOR_SPEED) for key in keys)


def comparison_rows(runs: Sequence[Facts]) -> list[Row]:
    """One row a run, set against the first; the columns are those of `COMPARISON`."""
    return [_compared(facts, runs[0]) for facts in runs]


def not_comparable(runs: Sequence[Facts]) -> list[str]:
    """In sentences, what of which run was not set against the first, and what differs; of many the first."""
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
    """Why the speeds of two runs are not compared, or empty: for every ratio of speeds or times that is shown."""
    if work := other_work(facts, first):
        return ", ".join(work)
    for item in (first, facts):
        if hindered := item.hindered_by:
            return f"of {item.label} {hindered}"
        if 0 < len(item.speeds) < _FEWEST:
            few = f"{len(item.speeds)} train record{'s' * (len(item.speeds) != 1)}"
            return f"{item.label} has {few}, and the first updates are slow"
    speed, reference = facts.images_per_sec, first.images_per_sec
    more = facts.processors / first.processors if facts.processors and first.processors else None
    if speed and reference and more and more > 1 and speed / reference > more * _MOST_EFFICIENT:
        return (
            f"it came to {speed / reference:.2f}{TIMES} the speed with {more:g}{TIMES} the processors, so something"
            f" held {first.label} up"
        )
    return ""


def _also_differs(facts: Facts, first: Facts) -> list[str]:
    """What makes a run faster or slower beside its strategy and the number of its ranks."""
    own, theirs = dict(flatten(facts.config)), dict(flatten(first.config))
    keys = [key for key in _keys(own, theirs) if is_about_speed([key]) and not key.startswith(("strategy.", "launch."))]
    found = [f"{key} {_text(own.get(key))} and not {_text(theirs.get(key))}" for key in keys if key != "data.root"]
    for key in ("precision", "device"):
        mine, other = facts.started(key), first.started(key)
        if mine and other and mine != other and not any(name.endswith(f".{key}") for name in keys):
            found.append(f"{key} {mine} and not {other}")
    return found


def differences(runs: Sequence[Facts]) -> tuple[Row, list[Row]]:
    """Settings of the training, and nodes and ranks, that are not the same in all runs: header, and rows of a key and
    its value in each run; of many runs a row for each."""
    ignored = ("launch.", "monitor.", "collaborative.", "data.root", "data.workers")
    flat = [dict(flatten(facts.config)) for facts in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if not key.startswith(ignored))
    nodes = ["launch.nodes", "launch.ntasks_per_node", "launch.gpus_per_node"]
    rows = [
        (key, *(_text(settings.get(key)) for settings in flat))
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
    best, test = facts.best_val or {}, facts.test or {}
    return (
        facts.label,
        _text(facts.setting("strategy.name")),
        _text(facts.processors),
        str(facts.steps) if facts.begun else NONE,
        number(best.get("acc1"), ".2f", " %"),
        number(test.get("acc1"), ".2f", " %"),
        duration(seconds) if seconds is not None else NONE,
        number(speed, speed_spec(speed or 0.0)),
        number(speed_up, ".2f", TIMES),
        number(speed_up / more * 100 if speed_up and more else None, ".0f", " %"),
        number(ratio, ".2f", TIMES),
        memory(used),
        number(saved if saved is None else round(saved), "+", " %"),
    )


def other_work(facts: Facts, first: Facts) -> list[str]:
    """What makes an image another amount of work."""
    own, theirs = _work(facts), _work(first)
    return [f"{key} {_text(own.get(key))} and not {_text(theirs.get(key))}" for key in _keys(own, theirs)]


def _other_length(facts: Facts, first: Facts) -> list[str]:
    """The times of runs of unequal length say nothing about speed."""
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
    """Memory goes by the images of one pass of a rank."""
    own, theirs = (item.started("micro_batch_size") for item in (facts, first))
    kinds = [item.started("device") for item in (facts, first)]
    if None in kinds or (own is None) != (theirs is None):
        return ["one of the two has not told its device or the images of a pass"]
    different = [] if own == theirs else [f"a rank takes {own} images in one pass and not {theirs}"]
    if kinds[0] != kinds[1]:
        different.append(f"it ran on {kinds[0]} and not {kinds[1]}")
    # On a CPU the memory is that of a whole process, which has tried larger batches before it began.
    tried = [item.label for item in (facts, first) if any(e.get("event") == "probed" for e in item.events)]
    if kinds[0] == "cpu" and tried:
        different.append(f"train.micro_batch_size=auto has tried sizes in the process of {' and '.join(tried)}")
    return different


def _images(facts: Facts) -> int:
    return facts.steps * facts.count("train.global_batch_size")


def _work(facts: Facts) -> dict[str, Any]:
    flat = dict(flatten(facts.config))
    return {key: value for key, value in flat.items() if key.startswith(_WORK) and key not in _OF_NO_WEIGHT}


def _keys(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys([*own, *theirs]) if own.get(key) != theirs.get(key)]


def _text(value: Any) -> str:
    return NONE if value is None else str(value)

"""Progress of a run, from the end of its metrics, and the forecast of its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainkit.common import fileio, jsonl, terminal
from trainkit.config.task_metrics import TaskMetrics
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import MOST_BYTES, read_thinned, task_metrics, typed_record

TAIL_BYTES = 8192
"""The end of the file, from which the pace is taken."""
LONGEST = 1 << 26
"""Most bytes of the end that are searched for the newest records."""
FORECAST_EVENTS = ("started", "handed_back")
_LOOKED_AT = 1 << 16
"""Bytes of the end that are read at first; more if no validation is among them."""


@dataclass(frozen=True)
class RunProgress:
    """The newest records of a run. After a restart these may be of earlier steps than those before them."""

    last: Mapping[str, Any] = field(default_factory=dict)
    """Newest record of training or validation; empty if there is none. A test tells nothing of a run's progress."""
    val: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    """Recent pace, validation and saving included; None where too little is known."""
    longest_pause: float | None = None
    """Most seconds between two records of late; None where too little is known."""

    @property
    def step(self) -> int | None:
        return self.last.get("step")

    def seconds_to(self, total_steps: object) -> float | None:
        """From the last record to the end of the training, without pauses in the queue; None if that is unknown."""
        if self.seconds_per_step is None or self.step is None or not jsonl.is_whole(total_steps):
            return None
        return max(total_steps - self.step, 0) * self.seconds_per_step


def progress_of(run: RunDir, *, pace_since: float | None = None) -> RunProgress:
    """Read the end of a run's metrics: few lines, for a list of a thousand runs.

    Args:
        pace_since: when the newest attempt started, in seconds since 1970: pace and pause are taken from its records
            only. None: nobody asks for them.

    Raises:
        UserError: there is a file that cannot be read.
    """
    metrics = task_metrics(run)
    try:
        with fileio.open_regular(run.metrics) as file:
            size = fileio.require_size(file, MOST_BYTES)
            for looked_at in (_LOOKED_AT, LONGEST):
                end = fileio.end_of(file, looked_at)
                newest = _newest(end, metrics)
                if len(newest) == 2 or looked_at >= size:
                    break
            if not newest and size > LONGEST:
                raise OSError(None, f"There is no record in its last {LONGEST:,} bytes")
    except FileNotFoundError:
        return RunProgress()
    except OSError as error:
        raise fileio.unreadable(run.metrics, error) from None
    last = next(iter(newest.values()), {})
    pace = None
    pauses: list[float] = []
    recent: list[tuple[float, int]] = []
    if pace_since is not None:
        recent = _recent(end, pace_since)
        pauses = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(recent)]
    if pauses:
        steps = recent[-1][1] - recent[0][1]
        if steps > 0 and sum(pauses) > 0:
            pace = sum(pauses) / steps
    return RunProgress(last, newest.get("val", {}), newest.get("train", {}), pace, max(pauses, default=None))


def _newest(content: bytes, metrics: TaskMetrics) -> dict[str, dict[str, Any]]:
    """The last whole record of training and that of validation, the newer one first."""
    wanted = {"train": b'"split": "train"', "val": b'"split": "val"'}
    newest: dict[str, dict[str, Any]] = {}
    for line in reversed(content.split(b"\n")[:-1]):  # a line without its end is still being written
        if any(mark in line for mark in wanted.values()):
            record = _record(line, metrics)
            if record is not None and wanted.pop(record["split"], b""):
                newest[record["split"]] = record
    return newest


def _record(line: bytes, metrics: TaskMetrics) -> dict[str, Any] | None:
    if len(line) >= fileio.LONGEST_LINE:
        return None
    return typed_record(fileio.parse_object(line) or {}, metrics)


def _recent(content: bytes, since: float) -> list[tuple[float, int]]:
    """Time and step of the records near the end that were written since then."""
    found: list[tuple[float, int]] = []
    for line in content[-TAIL_BYTES:].split(b"\n"):
        record = _record(line, TaskMetrics("", {}))
        if record is not None and record.get("time", -1.0) >= since:
            found.append((record["time"], record["step"]))
    return found


class Forecast(NamedTuple):
    """When a run will end that may need more attempts: time limits end some, and each start costs."""

    seconds: float
    """From now to the end of the training."""
    restarts: int
    """Among them; each is taken to cost what those before have cost."""
    restart_seconds: float | None
    """From the end of one attempt to the first update of the next, waits in the queue included; None: not known yet."""


def forecast(
    events: Sequence[Mapping[str, Any]], training_seconds: float, *, now: float, attempt_seconds: float, runs: bool
) -> Forecast:
    """Predict a run's end from its past.

    Args:
        events: of `FORECAST_EVENTS`, oldest first.
        training_seconds: what it still has to train, at its present pace.
        now: seconds since 1970.
        attempt_seconds: what its time limit allows an attempt, from its first update on; infinite without one.
        runs: an attempt runs now; else it waits for the next.
    """
    gaps = list[float]()
    lasted = list[float]()
    begun: float | None = None
    ended: float | None = None
    for event in events:
        when = event.get("time")
        if not isinstance(when, float | int):
            continue
        if event["event"] == "started":
            if ended is not None:
                gaps.append(when - ended)
            begun = when
            ended = None
        elif begun is not None and ended is None:
            ended = when
            if "SIGUSR2" in event.get("signals", ()):  # sent by the time limit, and by few preemptions
                lasted.append(ended - begun)
    if math.isinf(attempt_seconds) and len(lasted) > 1:  # of a template nobody knows the limit but by what has been
        attempt_seconds = max(lasted)
    gap = sum(gaps) / len(gaps) if gaps else None
    usual = gap or 0.0
    first = usual  # the wait for the next attempt
    left = 0.0  # what this attempt may still train
    if runs and begun is not None:
        left = max(attempt_seconds - (now - begun), 0.0)
    elif runs:
        left = attempt_seconds
    elif ended is not None:
        first = max(usual - (now - ended), 0.0)
    beyond = training_seconds - left
    if runs and beyond <= 0:
        return Forecast(training_seconds, 0, gap)
    restarts = max(math.ceil(beyond / attempt_seconds), 1)
    return Forecast(training_seconds + first + (restarts - 1) * usual, restarts, gap)


SETBACK_EVENTS = ("started", "skipped", "nonfinite", "rolled_back")
_DIVERGED_SHARE = 0.5
"""The share of lost updates that nobody calls bad luck."""


class Divergence(NamedTuple):
    """Losses of a run to gradients and losses that were not finite."""

    nan_from: int | None
    """Step of the train record from which on the loss is no number, to the newest one; None if the newest is one."""
    lost: int
    """Updates that came to nothing: fp16 skipped them, or a gradient was infinite or not a number."""
    updates: int
    """All that were tried, these among them."""
    rollbacks: int

    @property
    def diverged(self) -> bool:
        """True if what was trained is not worth its numbers."""
        return self.nan_from is not None or (self.lost > 2 and self.lost >= _DIVERGED_SHARE * self.updates)

    def in_words(self) -> str:
        """``loss nan from step 10, 38 of 40 updates skipped``; empty if all went well."""
        words = []
        if self.nan_from is not None:
            words.append(f"loss nan from step {self.nan_from}")
        if self.lost > 0:
            words.append(f"{self.lost} of {self.updates} updates skipped")
        if self.rollbacks > 0:
            words.append(f"rolled back {terminal.plural(self.rollbacks, 'time')}")
        return ", ".join(words)


def setbacks_of(events: Iterable[Mapping[str, Any]], train: Sequence[Mapping[str, Any]], steps: int) -> Divergence:
    """The setbacks in a run's events (of `SETBACK_EVENTS`) and its train records, in order of step.

    What was lost and then done again, after a restart, counts once.

    Args:
        steps: updates that were done.
    """
    lost: list[tuple[int, str]] = []
    rollbacks = 0
    undone = 0
    for event in events:
        kind = event["event"]
        step = event.get("step")
        if kind not in SETBACK_EVENTS or not isinstance(step, int):
            continue
        if kind == "started":
            # fp16's skips carry the step before them, which the checkpoint has; others their own.
            lost = [item for item in lost if item[0] <= step]
        elif kind == "rolled_back":
            rollbacks += 1
            before = event.get("from_step")
            if isinstance(before, int):
                undone += max(before - step, 0)
        elif kind == "skipped" or lost[-1:] != [(step, "skipped")]:
            # The last skip of too many in a row has a second event, nonfinite, with its loss.
            lost.append((step, kind))
    nan_from: int | None = None
    for record in reversed(train):
        if record.get("loss", 0.0) is not None:
            break
        nan_from = record["step"]
    skipped = [kind for _, kind in lost].count("skipped")  # by fp16, which does not count them as steps
    return Divergence(nan_from, len(lost), steps + skipped + undone, rollbacks)


def steps_done(events: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> int:
    """Optimizer updates of a run, by its records and by what it has saved: the last ones may be in no record yet."""
    steps = [record["step"] for record in records]
    for event in events:
        if event["event"] == "saved":
            steps.append(event.get("step") or 0)
    return max(steps, default=0)


def divergence_of(run: RunDir) -> str:
    """Say in words how a run has diverged; empty if it has not. Reads all of its records."""
    train = [record for record in read_thinned(run).records if record["split"] == "train"]
    events = read_events(run, (*SETBACK_EVENTS, "saved"))
    setbacks = setbacks_of(events, train, steps_done(events, train))
    return setbacks.in_words() if setbacks.diverged else ""

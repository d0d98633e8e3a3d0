"""Activity of a running job, by its own records: at which step it is, and what looks wrong. Asks no scheduler."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.cluster.signals import STARTING_SECONDS
from trainkit.common import jsonl, terminal
from trainkit.diagnosis.evidence import Quote, listed
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import RunHistory, history_of
from trainkit.run.run_progress import RunProgress, progress_of

QUIET_SECONDS = 60.0
"""A shorter silence of the records is not reported."""
SILENT_SECONDS = 180.0
"""A node samples its hardware every few seconds; clocks differ, and shared folders show new lines late."""
IDLE_PERCENT = 5.0
"""A GPU that is used less does nothing."""
IDLE_SAMPLES = 6
"""Samples, one after the other, in which an idle GPU does nothing."""


@dataclass(frozen=True)
class Activity:
    """A running job's doing, in a sentence, and what looks wrong."""

    does: str
    smells: tuple[Quote, ...]
    command: str
    """Shows more of it."""

    def __str__(self) -> str:
        if not self.smells:
            return self.does
        return f"{self.does}\n  why: {listed(self.smells)}\n  fix: See what its ranks do: `{self.command}`"


def activity_of(run: RunDir, now: float | None = None, *, ends: str = "") -> Activity:
    """Activity of the newest attempt at a time in seconds since 1970 (now if None).

    Args:
        ends: a sentence on when it will have ended.
    """
    if now is None:
        now = time.time()
    command = terminal.command("logs", run.path, "--rank", "all")
    life = history_of(run)
    attempt = life.started.get("attempt", 0)
    since = life.started.get("time")
    if not jsonl.is_time(since) or attempt != (run.attempts() or [0])[-1]:
        return Activity("Its ranks start, and have not met yet.", (), command)
    progress = progress_of(run, pace_since=float(since))
    smells = [*_silence(progress, since, now), *_hardware(run, life, since, now), *_stragglers(run, attempt)]
    if progress.last.get("time", 0.0) < since:
        does = f"Attempt {attempt} began {terminal.age(now - since)} ago; no step of it is recorded yet."
    else:
        does = _training(progress, attempt, life.started.get("total_steps"), now)
    return Activity(f"{does} {ends}".strip(), tuple(smells), command)


def _training(progress: RunProgress, attempt: int, total_steps: object, now: float) -> str:
    """Step, pace and age of the last record, in a sentence."""
    words = f"It trains: step {'?' if progress.step is None else progress.step}"
    if jsonl.is_whole(total_steps):
        words += f" of {total_steps}"
    if "epoch" in progress.last:
        words += f" (epoch {progress.last['epoch']:.1f})"
    words += f", attempt {attempt}"
    if progress.seconds_per_step is not None:
        words += f", {progress.seconds_per_step:.3g} s a step"
    return f"{words}, the last record {terminal.age(now - progress.last['time'])} ago."


def _silence(progress: RunProgress, since: float, now: float) -> Iterator[Quote]:
    """An attempt that has recorded nothing for longer than it should."""
    last = progress.last.get("time", 0.0)
    pause = progress.longest_pause
    if last < since:
        patience = STARTING_SECONDS
        words = f"no step in the {terminal.age(now - since)} since the attempt began"
    elif pause is None:
        patience = STARTING_SECONDS
        words = f"nothing for {terminal.age(now - last)}"
    else:
        patience = max(5 * pause, QUIET_SECONDS)
        words = f"nothing for {terminal.age(now - last)}; of late {pause:.3g} s passed between two records at most"
    if now - max(last, since) > patience:
        yield Quote("metrics.jsonl", words)


def _stragglers(run: RunDir, attempt: int) -> Iterator[Quote]:
    """Ranks for which all others wait, as the ranks of this attempt have recorded."""
    newest: dict[Any, dict[str, Any]] = {}
    for event in read_events(run, "straggler"):
        if event.get("attempt", 0) == attempt and jsonl.is_number(event.get("times")):
            newest[event.get("rank")] = event
    for rank, event in newest.items():
        where = f"rank {rank} on {event.get('host', '?')}"
        yield Quote("events.jsonl", f"{where} needs {event['times']:.1f} times as long as the others, who wait for it")


def _hardware(run: RunDir, life: RunHistory, since: float, now: float) -> Iterator[Quote]:
    """Nodes that have stopped to sample their hardware, and idle GPUs of the others."""
    for host in life.started.get("hosts") or ():
        file = run.hardware(terminal.one_line(host).replace("/", "_"))
        records = jsonl.last_records(file)
        samples = [item for item in records if jsonl.is_time(item.get("time")) and item["time"] >= since]
        if not samples:
            continue  # it is not sampled, or has just begun
        age = now - samples[-1]["time"]
        if age > SILENT_SECONDS:
            yield Quote(file.name, f"nothing from {host} for {terminal.age(age)}: the node or its file system hangs")
            continue
        last = samples[-IDLE_SAMPLES:]
        idle = _idle_gpus(last)
        if idle:
            seconds = terminal.age(last[-1]["time"] - last[0]["time"])
            which = f"{terminal.plural(len(idle), 'GPU').partition(' ')[2]} {', '.join(map(str, idle))} of {host}"
            yield Quote(file.name, f"{which} idle for {seconds}: the ranks wait, for data or for others")


def _idle_gpus(samples: list[dict[str, Any]]) -> list[int]:
    """Indices of the GPUs that did nothing in each of enough samples; anybody may have written these."""
    idle: dict[int, int] = {}
    for sample in samples:
        for gpu in sample.get("gpus") or ():
            if not isinstance(gpu, dict) or not jsonl.is_whole(gpu.get("index")):
                continue
            used = gpu.get("util_percent")
            if jsonl.is_number(used) and used < IDLE_PERCENT:
                idle[gpu["index"]] = idle.get(gpu["index"], 0) + 1
    return sorted(index for index, count in idle.items() if count == IDLE_SAMPLES)

"""What a running job does, and what looks wrong about it: from its own records, without a question to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit import fileio, terminal
from trainkit.diagnosis.evidence import Quote
from trainkit.run.events import RunHistory, history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import RunProgress, longest_pause, progress_of

QUIET_SECONDS = 60.0
"""A shorter silence of the records is not reported."""
STARTING_SECONDS = 600.0
"""Seconds that code and data may take to load before the first step."""
SILENT_SECONDS = 180.0
"""A node samples its hardware every few seconds; clocks differ, and shared folders show new lines late."""
IDLE_PERCENT, IDLE_SAMPLES = 5.0, 6
_TAIL_BYTES = 32768


@dataclass(frozen=True)
class Course:
    """What a running job does, in a sentence, and what looks wrong."""

    does: str
    smells: tuple[Quote, ...]
    command: str
    """Shows more of it."""

    def __str__(self) -> str:
        if not self.smells:
            return self.does
        width = max(len(quote.where) for quote in self.smells)
        shown = "\n       ".join(f"{quote.where:{width}}  {quote.text}" for quote in self.smells)
        return f"{self.does}\n  why: {shown}\n  fix: See what its ranks do: `{self.command}`"


def course_of(run: RunDir, now: float | None = None, *, ends: str = "") -> Course:
    """What the newest attempt does at a time in seconds since 1970 (now if None).

    Args:
        ends: a sentence on when it will have ended.
    """
    now = time.time() if now is None else now
    life, attempts = history_of(run), run.attempts()
    began = fileio.is_time(when := life.started.get("time")) and life.started.get("attempt", 0) == (attempts or [0])[-1]
    since = float(when) if began and when is not None else None
    standing = progress_of(run, pace_since=since)
    command = terminal.command("logs", run.path, "--rank", "all")
    if since is None:
        return Course("Its ranks start, and have not met yet.", (), command)
    last = standing.last.get("time", 0.0)
    quiet = _quiet(run, last if last >= since else None, since, now)
    smells = [*quiet, *_hardware(run, life, since, now), *_stragglers(run, life)]
    does = _does(standing, life, last if last >= since else None, since, now)
    return Course(f"{does} {ends}".strip(), tuple(smells), command)


def _does(standing: RunProgress, life: RunHistory, last: float | None, since: float, now: float) -> str:
    attempt, total = life.started.get("attempt", 0), life.started.get("total_steps")
    if last is None:
        return f"Attempt {attempt} began {terminal.age(now - since)} ago; no step of it is recorded yet."
    of = f" of {total}" if fileio.is_whole(total) else ""
    epoch = f" (epoch {standing.last['epoch']:.1f})" if "epoch" in standing.last else ""
    step = "?" if standing.step is None else standing.step
    words = f"It trains: step {step}{of}{epoch}, attempt {attempt}"
    if standing.seconds_per_step is not None:
        words += f", {standing.seconds_per_step:.3g} s a step"
    return f"{words}, the last record {terminal.age(now - last)} ago."


def _quiet(run: RunDir, last: float | None, since: float, now: float) -> Iterator[Quote]:
    if last is None:
        if now - since > STARTING_SECONDS:
            yield Quote("metrics.jsonl", f"no step in the {terminal.age(now - since)} since the attempt began")
        return
    pause, silence = longest_pause(run, since), now - last
    if silence > (STARTING_SECONDS if pause is None else max(5 * pause, QUIET_SECONDS)):
        before = "" if pause is None else f"; of late {pause:.3g} s passed between two records at most"
        yield Quote("metrics.jsonl", f"nothing for {terminal.age(silence)}{before}")


def _stragglers(run: RunDir, life: RunHistory) -> Iterator[Quote]:
    """Ranks for which all others wait, as the ranks of this attempt have recorded."""
    newest = {
        event.get("rank"): event
        for event in read_events(run, "straggler")
        if event.get("attempt", 0) == life.started.get("attempt", 0) and fileio.is_number(event.get("times"))
    }
    for rank, event in newest.items():
        where = f"rank {rank} on {event.get('host', '?')}"
        yield Quote("events.jsonl", f"{where} needs {event['times']:.1f} times as long as the others, who wait for it")


def _hardware(run: RunDir, life: RunHistory, since: float, now: float) -> Iterator[Quote]:
    """Nodes that have stopped to sample their hardware, and idle GPUs of the others."""
    for host in life.started.get("hosts") or ():
        file = run.hardware(terminal.one_line(host).replace("/", "_"))
        samples = [item for item in _samples(run, file.name) if item["time"] >= since]
        if not samples:
            continue  # it is not sampled, or has just begun
        age = now - samples[-1]["time"]
        if age > SILENT_SECONDS:
            yield Quote(file.name, f"nothing from {host} for {terminal.age(age)}: the node or its file system hangs")
            continue
        seen: dict[int, list[float]] = {}
        for sample in samples[-IDLE_SAMPLES:]:
            for gpu in sample.get("gpus") or ():
                if isinstance(gpu, dict) and fileio.is_whole(gpu.get("index")):
                    seen.setdefault(gpu["index"], []).append(gpu.get("util_percent", 100.0))
        idle = [
            str(index)
            for index, used in sorted(seen.items())
            if len(used) == IDLE_SAMPLES and all(fileio.is_number(item) and item < IDLE_PERCENT for item in used)
        ]
        if idle:
            seconds = samples[-1]["time"] - samples[-IDLE_SAMPLES]["time"]
            which = f"GPU{'s' * (len(idle) > 1)} {', '.join(idle)} of {host}"
            yield Quote(file.name, f"{which} idle for {terminal.age(seconds)}: the ranks wait, for data or for others")


def _samples(run: RunDir, name: str) -> list[dict[str, Any]]:
    try:
        text = fileio.read_end(run.path / name, _TAIL_BYTES)
    except OSError:
        return []
    found = [fileio.parse_object(line) for line in text.splitlines()]
    return [item for item in found if item is not None and fileio.is_time(item.get("time"))]

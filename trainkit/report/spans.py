"""The attempts of a run as spans of time, from what its events and records say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.report.facts import Facts


@dataclass
class Span:
    """One attempt, from the meeting of its ranks to its last word."""

    number: int
    began: float
    ended: float
    from_step: int
    to_step: int
    ranks: int | None
    hosts: list[str]
    how: str = ""

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)


def spans(facts: Facts) -> list[Span]:
    """The attempts of a run that began to train, in order."""
    found: list[Span] = []
    for event in facts.events:
        kind, time, attempt = event.get("event"), event.get("time"), event.get("attempt")
        step = event["step"] if isinstance(event.get("step"), int) else None
        if kind == "started" and time is not None:
            hosts = [host for host in event.get("hosts") or () if isinstance(host, str)]
            number = attempt if isinstance(attempt, int) else len(found)
            found.append(Span(number, time, time, step or 0, step or 0, event.get("world_size"), hosts))
            continue
        span = next((span for span in reversed(found) if span.number == attempt), None)
        if span is None:
            continue
        span.ended = max(span.ended, time or 0.0)
        span.to_step = max(span.to_step, step or 0)
        span.how = _how(span.how, kind, event)
    ends = [*(span.began for span in found[1:]), float("inf")]
    for before, until in zip(found, ends, strict=False):
        # After the last event of an attempt that was killed, or goes on, there are still its records.
        late = [] if before.how else [r for r in facts.metrics.records if before.ended < r.get("time", 0.0) < until]
        for record in late:
            before.ended, before.to_step = max(before.ended, record["time"]), max(before.to_step, record["step"])
    return found


def _how(before: str, kind: Any, event: Mapping[str, Any]) -> str:
    if kind == "handed_back":
        signals = ", ".join(dict.fromkeys(event.get("signals") or ()))
        return before or f"told to stop{f' ({signals})' if signals else ''}, saved"
    if kind == "requeued":
        return f"{before}, requeued" if before else "requeued"
    if kind == "failed" and not before.startswith("failed"):
        return f"failed on rank {event.get('rank', '?')}: {event.get('error', 'unknown')}"
    if kind == "ended" and not before:
        state = event.get("state")
        return "finished" if state == "COMPLETED" else str(state or "ended")
    return before


def processor_hours(facts: Facts) -> float | None:
    """Hours of all processors for which the run held them: of every attempt, from the start of its processes."""
    found, now = spans(facts), facts.processors
    if not found or not now:
        return None
    one_process = facts.started("world_size") == 1  # which drives all GPUs under DataParallel
    seconds = sum(span.seconds * (now if one_process else span.ranks or now) for span in found)
    return (seconds + facts.spent.get("start", 0.0) * now) / 3600

"""Spans of a run: each of its attempts, from the meeting of its ranks to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Span:
    """One attempt, from the meeting of its ranks to its last event or record."""

    number: int
    began: float
    ended: float
    from_step: int
    to_step: int
    ranks: int | None
    hosts: list[str]
    how: str = ""
    """Its end in words; empty for one that was killed, or goes on."""

    @classmethod
    def begun_by(cls, event: Mapping[str, Any], *, default_number: int) -> Span:
        """An attempt that begins with this ``started`` event."""
        number = event.get("attempt")
        if number is None:
            number = default_number
        time = event["time"]
        step = event.get("step") or 0
        return cls(number, time, time, step, step, event.get("world_size"), event.get("hosts") or [])

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)

    @property
    def went_well(self) -> bool:
        return self.how.startswith(("finished", "told to stop", "requeued", "PREEMPTED"))

    def reach(self, record: Mapping[str, Any]) -> None:
        """Extend it to the time and step of an event or record."""
        self.ended = max(self.ended, record.get("time") or 0.0)
        self.to_step = max(self.to_step, record.get("step") or 0)

    def take_in(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the attempt."""
        self.reach(event)
        kind = event["event"]
        if kind == "handed_back":
            signals = ", ".join(dict.fromkeys(event.get("signals") or ()))
            told = f"told to stop ({signals})" if signals else "told to stop"
            self.how = self.how or f"{told}, saved"
        elif kind == "requeued":
            what = "started again in place" if event.get("in_place") else "requeued"
            self.how = f"{self.how}, {what}".removeprefix(", ")
        elif kind == "failed" and not self.how.startswith("failed"):
            self.how = f"failed on rank {event.get('rank', '?')}: {event.get('error', 'unknown')}"
        elif kind == "ended" and not self.how:
            state = event.get("state")
            self.how = "finished" if state == "COMPLETED" else str(state or "ended")

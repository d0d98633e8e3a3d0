"""``events.jsonl``: what happened to a run, one line each: history, and never what a job does now.

`trainkit.records.attempts` alone writes them, `trainkit.records.history` gives them types.
"""

from __future__ import annotations

import time
from typing import Any

from trainkit.records import jsonl
from trainkit.records.rundir import RunDir


def append_event(run_dir: RunDir, kind: str, **fields: Any) -> None:
    """Write one event with the present time (seconds since 1970)."""
    jsonl.append(run_dir.events, {"time": round(time.time(), 3), "event": kind, **fields})


def read_events(run_dir: RunDir, kind: str | None = None) -> list[dict[str, Any]]:
    """Events in the order they happened, of one kind or of all."""
    return [record for record in jsonl.read(run_dir.events) if kind in (None, record.get("event"))]


def last_event(run_dir: RunDir, kind: str) -> dict[str, Any] | None:
    """The newest event of a kind."""
    events = read_events(run_dir, kind)
    return events[-1] if events else None

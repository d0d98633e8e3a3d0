"""``events.jsonl``: what happened to a run, one line each: history, and never what a job does now.

`trainkit.records.attempts` alone writes them, `trainkit.records.history` gives them types.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from trainkit import reading, terminal
from trainkit.records import jsonl
from trainkit.records.rundir import RunDir

_LONGEST = 20_000
"""Characters of one text: whatever went wrong, the record of a run stays one that can be read."""


def append_event(run_dir: RunDir, kind: str, **fields: Any) -> None:
    """Write one event with the present time (seconds since 1970)."""
    short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
    jsonl.append(run_dir.events, {"time": round(time.time(), 3), "event": kind, **short})


LIFE = (
    *("submitting", "unanswered", "refused", "submitted", "started", "handed_back", "requeued", "failed", "cancelled"),
    *("ended",),
)
"""The kinds that say what became of jobs and attempts; a long run has few of them among many others."""


def read_events(run_dir: RunDir, kind: str | tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Events in the order they happened, of one kind, of some or of all."""
    kinds = (kind,) if isinstance(kind, str) else kind
    wanted = [f'"{name}"'.encode() for name in kinds or ()]
    records = jsonl.read(run_dir.events, wanted)
    return [event for raw in records if (kinds is None or raw.get("event") in kinds) and (event := typed(raw))]


def typed(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event as others may rely on it; None without its kind. Fields of another type than theirs are left out, and
    text is one line: it is shown on terminals."""
    if not isinstance(raw.get("event"), str):
        return None
    event: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "time":
            fits = reading.is_time(value)
        elif key == "job_id":  # becomes an argument of scancel: `--me` is none
            value = str(value) if reading.is_whole(value) else value
            fits = isinstance(value, str) and re.fullmatch(r"\w[\w.+-]{0,63}", value) is not None
        elif key in _COUNTS:
            fits = reading.is_whole(value) or value is None
        elif key in _TEXTS:
            fits = isinstance(value, str)
            value = str(value).strip().partition("\n")[0]  # an error's first line says what it is
        elif key in _LISTS:
            fits = isinstance(value, list) and all(isinstance(item, _LISTS[key]) for item in value)
        else:
            fits = value is None or reading.plain(value) is not None
        if fits:
            event[terminal.one_line(key)] = reading.plain(value)
    return event


_COUNTS = frozenset(
    ("attempt", "rank", "node_rank", "step", "total_steps", "steps_per_epoch", "world_size", "params", "pid")
)
_TEXTS = frozenset(("event", "executor", "host", "state", "error", "device", "precision", "process_started"))
_LISTS = {"hosts": str, "signals": str, "exit_codes": int}

"""How far a run is, from the end of its metrics: a list of a thousand runs must not read all that they hold."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit import reading
from trainkit.records import jsonl
from trainkit.records.metrics import typed
from trainkit.records.rundir import RunDir

TAIL_BYTES = 8192
_LOOKED_AT = 1 << 16
"""Bytes of the end that are read at first; more where no validation is among them."""
LONGEST = 1 << 26
_MOST_TRIES = 10_000


@dataclass(frozen=True)
class Standing:
    """The newest records of a run. After a restart these may be of earlier steps than those before them."""

    last: Mapping[str, Any] = field(default_factory=dict)
    """Of training or validation; empty if there is none. Tests tell of the best weights, not how far it is."""
    val: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    """Of late, validation and saving included; None where too little is known."""

    @property
    def is_partial(self) -> bool:
        """Whether there may be more to know before the records that were looked at."""
        return not (self.last and self.val and self.train)

    @property
    def step(self) -> int | None:
        return self.last.get("step")

    def seconds_to(self, total_steps: object) -> float | None:
        """From the last record to the end of the training, without pauses in the queue; None if that is unknown."""
        if self.seconds_per_step is None or self.step is None or not reading.is_whole(total_steps):
            return None
        return max(total_steps - self.step, 0) * self.seconds_per_step


def standing_of(run: RunDir, *, pace_since: float | None = None) -> Standing:
    """Read it: few lines, for a list of a thousand runs.

    Args:
        pace_since: when the newest attempt started, in seconds since 1970: the pace is taken from its records only.
            None: nobody asks for the pace.

    Raises:
        UserError: there is a file that cannot be read.
    """
    try:
        with reading.open_regular(run.metrics) as file:
            reading.require_size(file, jsonl.LONGEST_THINNED)
            size, looked_at = os.fstat(file.fileno()).st_size, _LOOKED_AT
            found = _standing(reading.end_of(file, looked_at), pace_since)
            while found.is_partial and looked_at < min(size, LONGEST):
                looked_at = min(16 * looked_at, LONGEST)
                found = _standing(reading.end_of(file, looked_at), pace_since)
            if not found.last and size > LONGEST:
                raise OSError(None, f"There is no record in its last {LONGEST:,} bytes")
    except FileNotFoundError:
        return Standing()
    except OSError as error:
        raise reading.unreadable(run.metrics, error) from None
    return found


def _standing(content: bytes, pace_since: float | None) -> Standing:
    last = _newest(content, b"\n", ("train", "val"))
    val = last if last.get("split") == "val" else _newest(content, b'"split": "val"', ("val",))
    train = last if last.get("split") == "train" else _newest(content, b'"split": "train"', ("train",))
    pace = _pace(content, pace_since) if pace_since is not None else None
    return Standing(last, val, train, pace)


def _newest(content: bytes, holding: bytes, splits: Sequence[str]) -> dict[str, Any]:
    """The last whole record of one of the splits, on a line that holds this; empty if there is none."""
    end = content.rfind(b"\n") + 1  # a line without its end is still being written
    for _ in range(_MOST_TRIES):
        if (found := content.rfind(holding, 0, end)) < 0:
            break
        begin = content.rfind(b"\n", 0, found) + 1
        record = _record(content[begin : content.find(b"\n", found)])
        if record is not None and record["split"] in splits:
            return record
        end = begin
    return {}


def _record(line: bytes) -> dict[str, Any] | None:
    raw = reading.parse_object(line) if len(line) < jsonl.LONGEST_LINE else None
    return typed(raw) if raw is not None else None


def longest_pause(run: RunDir, since: float) -> float | None:
    """Seconds between two records of late, of those that were written since; None where too little is known."""
    try:
        text = reading.read_end(run.metrics, TAIL_BYTES)
    except OSError:
        return None
    found = [item[0] for line in text.encode().split(b"\n") if (item := _timed(line)) is not None]
    timed = [when for when in found if when >= since]
    return max((later - earlier for earlier, later in itertools.pairwise(timed)), default=None)


def _pace(content: bytes, since: float) -> float | None:
    """From the first and the last record near the end: of a thousand runs few of those between are looked at."""
    lines = content[max(len(content) - TAIL_BYTES, 0) :].split(b"\n")
    newest = next((found for line in reversed(lines) if (found := _timed(line)) is not None), None)
    if newest is None or newest[0] < since:
        return None  # an attempt that has recorded nothing yet
    begin = bisect.bisect_left(lines, since, key=lambda line: (_timed(line) or (0.0, 0))[0])
    late = (found for line in lines[begin:] if (found := _timed(line)) is not None and found[0] >= since)
    first, last = next(late, None), newest
    if first is None or last[1] <= first[1] or last[0] <= first[0]:
        return None
    return (last[0] - first[0]) / (last[1] - first[1])


def _timed(line: bytes) -> tuple[float, int] | None:
    """When a step was recorded, and which; None of what is no record."""
    record = _record(line)
    return (record["time"], record["step"]) if record is not None and "time" in record else None

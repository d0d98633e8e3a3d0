"""Updates that came to nothing, and a loss that is no number any more: whether a run that looks fine has diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.records.events import read_events
from trainkit.records.metrics import read_thinned
from trainkit.records.rundir import RunDir

KINDS = ("started", "skipped", "nonfinite", "rolled_back")
_DIVERGED_SHARE = 0.5
"""From this share of all updates on nobody calls it bad luck."""


@dataclass(frozen=True)
class Setbacks:
    """What a run has lost to gradients and losses that were not finite."""

    nan_from: int | None = None
    """Step of the train record from which on the loss is no number, to the newest one; None if the newest is one."""
    skipped: int = 0
    """Updates that fp16 skipped because a gradient overflowed, to try the next data with a smaller scale."""
    nonfinite: int = 0
    """Others that came to nothing because a gradient was infinite or not a number."""
    updates: int = 0
    """All that were tried, these among them."""
    rollbacks: int = 0

    @property
    def lost(self) -> int:
        """Updates that came to nothing."""
        return self.skipped + self.nonfinite

    @property
    def diverged(self) -> bool:
        """Whether what was trained is not worth its numbers."""
        return self.nan_from is not None or (self.lost > 2 and self.lost >= _DIVERGED_SHARE * self.updates)

    def in_words(self) -> str:
        """``loss nan from step 10, 38 of 40 updates skipped``; empty where all went well."""
        words = [f"loss nan from step {self.nan_from}"] * (self.nan_from is not None)
        words += [f"{self.lost} of {self.updates} updates skipped"] * (self.lost > 0)
        words += [f"rolled back {self.rollbacks} time{'s' * (self.rollbacks > 1)}"] * (self.rollbacks > 0)
        return ", ".join(words)


def setbacks_of(events: Iterable[Mapping[str, Any]], train: Sequence[Mapping[str, Any]], steps: int) -> Setbacks:
    """What a run's events (of `KINDS`; others are passed over) and its train records, in order of step, tell.

    What was lost and then done again, after a restart, counts once.

    Args:
        steps: updates that were done.
    """
    lost: list[Mapping[str, Any]] = []
    rollbacks = undone = 0
    for event in events:
        step = event.get("step")
        if event["event"] not in KINDS or not isinstance(step, int):
            continue
        if event["event"] == "started":
            # fp16's skips carry the step before them, which the checkpoint has; others their own.
            lost = [item for item in lost if item["step"] <= step]
        elif event["event"] == "rolled_back":
            rollbacks += 1
            before = event.get("from_step")
            undone += max(before - step, 0) if isinstance(before, int) else 0
        elif event["event"] == "skipped" or not (lost and _ends_skips(lost[-1], event)):
            lost.append(event)
    skipped = sum(item["event"] == "skipped" for item in lost)
    # An update that fp16 skips is none of the steps.
    return Setbacks(_nan_from(train), skipped, len(lost) - skipped, steps + skipped + undone, rollbacks)


def steps_done(events: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> int:
    """Optimizer updates of a run, by its records and by what it has saved: the last ones may be in no record yet."""
    saved = (event for event in events if event["event"] == "saved" and event.get("step") is not None)
    return max((item["step"] for item in (*records, *saved)), default=0)


def divergence_of(run: RunDir) -> str:
    """How a run has diverged, in words; empty if it has not. Reads all of its records."""
    train = [record for record in read_thinned(run).records if record["split"] == "train"]
    events = read_events(run, (*KINDS, "saved"))
    setbacks = setbacks_of(events, train, steps_done(events, train))
    return setbacks.in_words() if setbacks.diverged else ""


def _ends_skips(last: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """The last skip of too many in a row is told a second time, with its loss."""
    return bool(last["event"] == "skipped" and last["step"] == event["step"])


def _nan_from(train: Sequence[Mapping[str, Any]]) -> int | None:
    found = None
    for record in reversed(train):
        if "loss" not in record or record["loss"] is not None:
            break
        found = record["step"]
    return found

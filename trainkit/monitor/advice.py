"""What a run's time says about its settings: one line, and only where it is clear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.config.checks import less_traffic
from trainkit.config.schema import Config

ENOUGH_SECONDS = 30.0
"""Of less nothing can be said: all that is slow at first would weigh too much."""
_NOT_RUNNING = ("start", "end")


@dataclass(frozen=True)
class Place:
    """What the run has had."""

    world_size: int
    workers: int
    """Loader processes of each rank."""
    cpus: int
    """Of each rank."""
    waits_for_one: bool = False
    """A straggler has been found: communication that is waited for is its fault."""


def advice(seconds: Mapping[str, float], config: Config, place: Place) -> str | None:
    """The setting whose change would save most, with how much time it is about; None where nothing stands out.

    Args:
        seconds: on what the time of rank 0 went, by the names of `trainkit.training.clock.PARTS`.
    """
    total = sum(spent for name, spent in seconds.items() if name not in _NOT_RUNNING)
    if total < ENOUGH_SECONDS:
        return None
    shares = {name: spent / total for name, spent in seconds.items()}
    found = [
        (share / _FROM[part], f"{share:.0%} {words}: {change}")
        for part, words in _WORDS.items()
        if (share := shares.get(part, 0.0)) >= _FROM[part] and (change := _change(part, share, config, place))
    ]
    return max(found)[1] if found else None


_FROM = {"data": 0.2, "exposed": 0.2, "checkpoint": 0.1, "evaluation": 0.3, "other": 0.2}
"""From which part of the time on it is worth a word."""
_WORDS = {
    "data": "data wait",
    "exposed": "waiting for gradients of other ranks",
    "checkpoint": "saving",
    "evaluation": "validation",
    "other": "records and the loop itself",
}


def _change(part: str, share: float, config: Config, place: Place) -> str | None:
    """What to set to what; None: nothing that would surely help."""
    if part == "data":
        free = place.cpus - 1
        if place.workers < free:
            return f"data.workers={min(free, max(4, 2 * place.workers))}"
        return f"more CPUs for each rank, --cpus-per-task {2 * place.cpus}"
    if part == "exposed":
        if place.world_size == 1 or place.waits_for_one:
            return None
        return less_traffic(config) or f"train.global_batch_size={2 * config.train.global_batch_size}"
    if part == "checkpoint":
        rarer = math.ceil(share / 0.03)
        if config.checkpoint.every_steps is not None:
            return f"checkpoint.every_steps={rarer * config.checkpoint.every_steps}"
        if config.checkpoint.every_epochs is not None:
            return f"checkpoint.every_epochs={rarer * config.checkpoint.every_epochs}"
        return None
    if part == "evaluation":
        return f"train.eval_every_epochs={math.ceil(share / 0.1) * config.train.eval_every_epochs}"
    return "monitor.log_every=50" if config.monitor.log_every < 10 else None

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Slow(Keeper):
    """Validation takes 40 ms."""

    def validate(self, where: Any, should_stop: Any = None) -> bool:
        self.hosts.append(where)  # type: ignore[attr-defined]
        time.sleep(0.04)
        return True

    def save(self, **options: Any) -> None:
        """Takes no time."""


def test_validation_takes_a_quarter_of_the_time_at_most_however_short_the_rounds_are() -> None:
    """An update of a swarm that averages gradients can be over long before its limit."""
    from trainkit.collaborative.keeping import RoundKeeper
    from trainkit.collaborative.loop import Box
    from trainkit.collaborative.result import Round

    nothing: Any = SimpleNamespace(
        over=lambda: None, go_on=lambda over: None, log=lambda record: None, remark=lambda kind, **facts: None
    )
    validated: list[Any] = []
    writer: Any = SimpleNamespace(attempt=nothing)
    parts: Any = SimpleNamespace(splits=SimpleNamespace(train=[0] * 10))
    progress = Progress(val={"loss": 1.0, "acc1": 10.0})
    keeper = Slow(parts, writer, nothing, nothing, progress, hosts=validated)
    common: Any = SimpleNamespace(in_model=nullcontext, theta=None, momentum=None)
    clock: Any = SimpleNamespace(count=10**6, seconds=60.0)
    watch: Any = SimpleNamespace(peers={}, others=lambda since: {})
    rounds = RoundKeeper(keeper, common, clock, watch, role="judge", say=lambda line: None)
    average = Round(2, "average", "", 0.0, False)
    began, index = time.monotonic(), 0
    while time.monotonic() - began < 1.0:
        rounds.after_round(Box(index, 0, 0.0, {}, 0.0, 2, 0, average))
        index += 1
        time.sleep(0.005)
    assert 3 <= len(validated) <= 7  # 1 s / 4 / 40 ms
    assert index > 3 * len(validated)

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

if TYPE_CHECKING:
    from trainkit.swarm.records import Role, RoundKeeper

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Slow(Keeper):
    """Validation takes 40 ms."""

    def validate(self, where: Any, should_stop: Any = None) -> bool:
        self.hosts.append(where)  # type: ignore[attr-defined]
        time.sleep(0.04)
        return True

    def save(self, **options: Any) -> None:
        """Takes no time."""


def round_keeper(role: Role, validated: list[Any], lines: list[str], events: list[Any]) -> RoundKeeper:
    """One that notes what it validates, says and writes as an event."""
    from trainkit.swarm.records import RoundKeeper

    def remark(kind: str, **facts: Any) -> None:
        events.append((kind, facts))

    nothing: Any = SimpleNamespace(over=lambda: None, go_on=lambda over: None, log=lambda record: None, remark=remark)
    writer: Any = SimpleNamespace(attempt=nothing)
    parts: Any = SimpleNamespace(splits=SimpleNamespace(train=[0] * 10))
    progress = Progress(val={"loss": 1.0, "acc1": 10.0})
    keeper = Slow(parts, writer, nothing, nothing, progress, hosts=validated)
    common: Any = SimpleNamespace(in_model=nullcontext, theta=None, momentum=None)
    clock: Any = SimpleNamespace(count=10**6, seconds=60.0)
    watch: Any = SimpleNamespace(peers={}, others=lambda since: {})
    return RoundKeeper(keeper, common, clock, watch, role=role, say=lines.append)


def test_validation_takes_a_quarter_of_the_time_at_most_however_short_the_rounds_are() -> None:
    """An update of a swarm that averages gradients can be over long before its limit."""
    from trainkit.swarm.robust import Round
    from trainkit.swarm.rounds import Box

    validated: list[Any] = []
    rounds = round_keeper("judge", validated, [], [])
    average = Round(2, "average", "", 0.0, False)
    began, index = time.monotonic(), 0
    while time.monotonic() - began < 1.0:
        rounds.after_round(Box(index, 0, 0.0, {}, 0.0, 2, 0, average))
        index += 1
        time.sleep(0.005)
    assert 3 <= len(validated) <= 7  # 1 s / 4 / 40 ms
    assert index > 3 * len(validated)


def test_a_round_that_was_given_up_is_told_with_the_reason_and_is_an_event() -> None:
    from trainkit.swarm.robust import Round
    from trainkit.swarm.rounds import Box

    lines: list[str] = []
    events: list[Any] = []
    rounds = round_keeper("guest", [], lines, events)
    why = "its loss rose from 2e-06 to 0.6"
    rounds.after_round(Box(7, 0, 0.0, {}, 0.0, 2, 0, Round(2, "average", "", 0.0, False, collapsed=why)))
    rounds.after_round(Box(8, 0, 0.0, {}, 0.0, 2, 0, Round(0, "nothing", "no group", 0.0, False, collapsed=why)))
    assert [line.split("  ", 1)[1] for line in lines] == [
        f"2 peers averaged, 0 of 0 parts  what was learned here is given up: {why}",
        f"no average (no group)  what was learned here is given up: {why}",
    ]
    assert [(kind, facts["round"], facts["why"]) for kind, facts in events] == [
        ("collapsed", 8, why),
        ("collapsed", 9, why),
    ]

"""A peer that has lost its swarm, and somebody who answers again: what it asks and tells, in which order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.errors import RefusedError, UserError
from trainkit.swarm.messages import Manifest, RoundClock

pytestmark = pytest.mark.usefixtures("hivemind_here")

CONFIG = load("hivemind", ["collaborative.round_seconds=4", "collaborative.rounds=1000"]).config
OLD = RoundClock.starting(time.time() - 400.0, 4.0, 1000)
MANIFEST = Manifest("id", "run", "", OLD.first + 3, "", 10, 1, 8, facts={"seed": "0"})


@dataclass
class Swarm:
    """Who answers, and what has been asked of it. It gives its state to those who have said who they are."""

    manifests_: Sequence[Manifest]
    gives: bool = True
    done: list[str] = field(default_factory=list)
    round: int = 0

    def require_welcome(self) -> None:
        self.done.append("welcome")

    def introduce_myself(self, seconds: float, *, wait: bool) -> None:
        self.done.append("introduced" if wait else "told")

    def manifests(self) -> dict[str, Manifest]:
        return {str(number): one for number, one in enumerate(self.manifests_)}

    def adopt(self, seconds: float) -> bool:
        self.done.append("adopted")
        self.round = RoundClock(4.0, MANIFEST.first_round, 1000).index(time.time())
        return self.gives and "introduced" in self.done


def present_clock(swarm: Swarm) -> list[RoundClock]:
    from trainkit.swarm.guest import _Guest

    spec = SimpleNamespace(stop_requested=lambda: len(swarm.done) > 12)
    entry = SimpleNamespace(addresses=("/ip4/203.0.113.7/tcp/4711/p2p/Qm",))
    guest: Any = _Guest(MANIFEST, CONFIG, entry, spec, swarm, swarm, swarm, None)  # type: ignore[arg-type]
    watch = SimpleNamespace(poll=lambda: None, stopped=False)
    return list(guest._present_clock(SimpleNamespace(watch=watch, clock=OLD)))


def test_it_says_who_it_is_before_it_asks_for_the_state_which_strangers_are_not_given() -> None:
    swarm = Swarm([MANIFEST])
    (clock,) = present_clock(swarm)
    assert clock.first == MANIFEST.first_round
    assert swarm.done == ["welcome", "introduced", "adopted"]


@pytest.mark.parametrize("manifests", [[], [replace(MANIFEST, first_round=OLD.first - 1)]], ids=["none", "older"])
def test_it_waits_on_while_who_answers_does_not_know_the_run_or_no_news_of_it(manifests: list[Manifest]) -> None:
    assert present_clock(Swarm(manifests)) == []


def test_it_waits_on_while_nobody_gives_the_state() -> None:
    assert present_clock(Swarm([MANIFEST], gives=False)) == []


@pytest.mark.parametrize(
    ("now", "error", "says"),
    [
        (replace(MANIFEST, run_id="another", name="new"), UserError, "Another run is at"),
        (replace(MANIFEST, protocol=99), RefusedError, "The swarm speaks version 99"),
        (replace(MANIFEST, facts={"seed": "1"}), RefusedError, "This peer differs from the run in: seed"),
    ],
)
def test_what_has_become_another_run_meanwhile_is_told_and_ends_the_waiting(
    now: Manifest, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        present_clock(Swarm([now]))

"""A peer that waits for its swarm, and comes back into it: what it asks and tells, in which order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.errors import RefusedError, RunFailedError, UserError
from trainkit.swarm.messages import Manifest, RoundClock
from trainkit.swarm.spec import Hooks, PeerSpec

pytestmark = pytest.mark.usefixtures("hivemind_here")


@dataclass
class World:
    """A clock that nobody waits for, and a swarm that is back at some moment."""

    back_at: float
    ready_at: float = 0.0
    stop_at: float = 1e9
    now: float = 0.0
    asked: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def look(self) -> int:
        self.asked.append(self.now)
        return int(self.now >= self.back_at)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, patience: float = 24 * 3600.0) -> bool:
        from trainkit.swarm.guest import wait_until_back

        hooks = Hooks(lambda: self.now >= self.stop_at, self.said.append)
        ready, now = lambda: self.now >= self.ready_at, lambda: self.now
        return wait_until_back(self.look, ready, hooks, patience, now, self.sleep)


def test_it_asks_until_somebody_answers_ever_less_often_and_tells_so() -> None:
    world = World(back_at=3600.0)
    assert world.wait()
    assert 0 <= world.now - world.back_at <= 60.0
    pauses = [later - before for before, later in zip(world.asked, world.asked[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert [pauses[0], pauses[-1]] == pytest.approx([2.0, 60.0])
    assert world.said[0].startswith("Nobody of the swarm answers. Waiting for it for up to 24 hours")
    assert 4 <= len(world.said[1:]) <= 6
    assert world.said[1].startswith("Still waiting for the swarm, since 1")


def test_who_answers_and_is_not_ready_is_asked_again_soon() -> None:
    world = World(back_at=3600.0, ready_at=3690.0)
    assert world.wait()
    assert world.now < 3690.0 + 35.0
    assert world.said.count(world.said[0]) == 1


def test_it_leaves_at_once_when_told_to() -> None:
    world = World(back_at=3600.0, stop_at=100.0)
    assert not world.wait()
    assert world.now == pytest.approx(100.0, abs=1.0)


@pytest.mark.parametrize(("patience", "says", "over"), [(86400.0, "24 hours", 86400.0), (0.0, "0 s", 0.0)])
def test_it_gives_up_when_the_stated_time_is_over(patience: float, says: str, over: float) -> None:
    world = World(back_at=1e9)
    with pytest.raises(RunFailedError, match=f"has not answered for {says}"):
        world.wait(patience)
    assert world.now == pytest.approx(over, abs=1.0)
    assert patience or world.asked == [0.0]


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


def finds_run(swarm: Swarm, stop_after: int = 5) -> Any:
    """Whether a guest that has lost ``swarm`` comes back into it, and by which clock."""
    from trainkit.swarm.guest import Guest

    entry: Any = SimpleNamespace(addresses=("/ip4/203.0.113.7/tcp/4711/p2p/Qm",))
    guest: Any = Guest(ExitStack(), entry, PeerSpec("me"), Hooks(lambda: len(swarm.done) > stop_after, print))
    guest.manifest, guest.config, guest.clock = MANIFEST, CONFIG, OLD
    guest.dht = guest.averaging = guest.common = swarm
    guest.watch = SimpleNamespace(poll=lambda: None, stopped=False)
    return guest.finds_run(), guest.clock.first


def test_it_says_who_it_is_before_it_asks_for_the_state() -> None:
    """Strangers are not given it."""
    swarm = Swarm([MANIFEST])
    assert finds_run(swarm) == (True, MANIFEST.first_round)
    assert swarm.done == ["welcome", "introduced", "adopted"]


@pytest.mark.parametrize(
    "swarm",
    [Swarm([]), Swarm([replace(MANIFEST, first_round=OLD.first - 1)]), Swarm([MANIFEST], gives=False)],
    ids=["who answers knows no run", "an older manifest", "nobody gives the state"],
)
def test_it_waits_on_while_there_is_nothing_to_go_on_with(swarm: Swarm) -> None:
    assert finds_run(swarm) == (False, OLD.first)


@pytest.mark.parametrize(
    ("now", "error", "says"),
    [
        (replace(MANIFEST, run_id="another", name="new"), UserError, "Another run is at"),
        (replace(MANIFEST, protocol=99), RefusedError, "The swarm speaks version 99"),
        (replace(MANIFEST, facts={"seed": "1"}), RefusedError, "This peer differs from the run in: seed"),
    ],
)
def test_what_has_become_another_run_ends_the_waiting(now: Manifest, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        finds_run(Swarm([now]))

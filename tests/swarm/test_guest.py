"""A peer that waits for its swarm, and comes back into it: what it asks and tells, in which order."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.errors import RefusedError, RunFailedError, UserError
from trainkit.swarm.messages import Manifest, RoundClock
from trainkit.swarm.spec import PATIENCE_SECONDS, Hooks, PeerSpec

pytestmark = pytest.mark.usefixtures("hivemind_here")


def a_guest(hooks: Hooks, patience: float = PATIENCE_SECONDS) -> Any:
    from trainkit.swarm.roles import Guest

    entry: Any = SimpleNamespace(addresses=("/ip4/203.0.113.7/tcp/4711/p2p/Qm",))
    guest: Any = Guest(ExitStack(), entry, PeerSpec("me", patience=patience), hooks)
    guest.watch = SimpleNamespace(poll=lambda: None, stopped=False)
    return guest


@dataclass
class World:
    """A clock that nobody waits for, and a swarm that is back at some moment."""

    back_at: float = 3600.0
    ready_at: float = 0.0
    stop_at: float = 1e9
    now: float = 0.0
    asked: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def look(self, addresses: Sequence[str]) -> int:
        self.asked.append(self.now)
        return int(self.now >= self.back_at)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, patience: float = PATIENCE_SECONDS) -> bool:
        from trainkit.swarm import roles

        guest = a_guest(Hooks(lambda: self.now >= self.stop_at, self.said.append), patience)
        guest.dht = SimpleNamespace(reconnect=self.look)
        guest.finds_run = lambda: self.now >= self.ready_at
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roles, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
            return bool(guest.wait_until_back())


def test_it_asks_until_somebody_answers_ever_less_often() -> None:
    world = World()
    assert world.wait()
    assert 0 <= world.now - world.back_at <= 30.0
    pauses = [later - before for before, later in pairwise(world.asked)]
    assert pauses == sorted(pauses)
    assert [pauses[0], pauses[-1]] == pytest.approx([2.0, 30.0])
    assert world.said[0].startswith("Nobody of the swarm answers. Waiting for it for up to 1 d")


def test_it_asks_again_soon_if_somebody_answers_and_leaves_at_once_if_told() -> None:
    nearly, told = World(ready_at=3690.0), World(stop_at=100.0)
    assert (nearly.wait(), told.wait()) == (True, False)
    assert nearly.now < 3725.0
    assert told.now < 101.0


def test_it_gives_up_when_the_stated_time_is_over() -> None:
    for patience, says in ((86400.0, "1 d"), (0.0, "0 s")):
        world = World(back_at=1e9)
        with pytest.raises(RunFailedError, match=f"has not answered for {says}"):
            world.wait(patience)
        assert world.now == pytest.approx(patience, abs=1.0)
        assert patience or world.asked == [0.0]


CONFIG = load("hivemind", ["collaborative.round_seconds=4", "collaborative.rounds=1000"]).config
OLD = RoundClock.starting(time.time() - 400.0, 4.0, 1000)
MANIFEST = Manifest("id", "run", "", OLD.first + 3, "", 10, 1, 8, facts={"seed": "0"})


def finds_run(manifests: Sequence[Manifest], *, gives: bool = True) -> tuple[tuple[bool, int], list[str]]:
    """Whether a guest comes back into the swarm that it has lost, and by which clock; and what it has asked of it.

    ``gives``: it gives its state to those who have said who they are.
    """
    done: list[str] = []

    def adopt(seconds: float, *, newer_than: int) -> bool:
        done.append("adopted")
        return gives and "introduced" in done

    guest = a_guest(Hooks(lambda: len(done) > 5, print))
    guest.manifest, guest.config, guest.clock = MANIFEST, CONFIG, OLD
    guest.averaging, guest.common = SimpleNamespace(adopt=adopt), SimpleNamespace(round=1000)
    guest.dht = SimpleNamespace(
        require_welcome=lambda: done.append("welcome"),
        introduce_myself=lambda seconds, wait: done.append("introduced" if wait else "told"),
        manifests=lambda: dict(enumerate(manifests)),
    )
    return (guest.finds_run(), guest.clock.first), done


def test_it_says_who_it_is_before_it_asks_for_the_state() -> None:
    """Strangers are not given it."""
    assert finds_run([MANIFEST]) == ((True, MANIFEST.first_round), ["welcome", "introduced", "adopted"])


@pytest.mark.parametrize(
    ("manifests", "gives"),
    [([], True), ([replace(MANIFEST, first_round=OLD.first - 1)], True), ([MANIFEST], False)],
    ids=["who answers knows no run", "an older manifest", "nobody gives the state"],
)
def test_it_waits_on_while_there_is_nothing_to_go_on_with(manifests: list[Manifest], gives: bool) -> None:
    assert finds_run(manifests, gives=gives)[0] == (False, OLD.first)


@pytest.mark.parametrize(
    ("now", "error", "says"),
    [
        (replace(MANIFEST, run_id="another", name="new"), UserError, "Another run is at"),
        (replace(MANIFEST, facts={"seed": "1"}), RefusedError, "This peer differs from the run in: seed"),
    ],
)
def test_what_has_become_another_run_ends_the_waiting(now: Manifest, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        finds_run([now])

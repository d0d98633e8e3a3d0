from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from trainkit.errors import RunFailedError
from trainkit.swarm.assemble import Waiting


@dataclass
class World:
    """A clock that nobody waits for, and a swarm that is back at some moment."""

    back_at: float
    ready_at: float = 0.0
    stop_at: float = 1e9
    now: float = 0.0
    asked: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def look(self, addresses: Sequence[str]) -> int:
        assert addresses == ("here",)
        self.asked.append(self.now)
        return int(self.now >= self.back_at)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, patience: float = 24 * 3600.0) -> bool:
        stopped = lambda: self.now >= self.stop_at  # noqa: E731
        ready = lambda: self.now >= self.ready_at  # noqa: E731
        waiting = Waiting(self.look, ready, stopped, self.said.append, patience, lambda: self.now, self.sleep)
        return waiting.until_back(("here",))


def test_a_peer_waits_until_somebody_of_the_swarm_answers() -> None:
    world = World(back_at=3 * 3600.0)
    assert world.wait()
    assert 0 <= world.now - world.back_at <= 60.0


def test_it_asks_less_and_less_often_and_at_least_once_a_minute() -> None:
    world = World(back_at=3600.0)
    world.wait()
    pauses = [later - before for before, later in zip(world.asked, world.asked[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert [pauses[0], pauses[-1]] == pytest.approx([2.0, 60.0])


def test_who_answers_and_is_not_ready_is_asked_again_soon() -> None:
    world = World(back_at=3600.0, ready_at=3690.0)
    assert world.wait()
    assert world.now < 3690.0 + 35.0
    assert world.said.count(world.said[0]) == 1


def test_it_says_how_long_it_will_wait_and_every_ten_minutes_that_it_does() -> None:
    world = World(back_at=3600.0)
    world.wait()
    assert world.said[0].startswith("Nobody of the swarm answers. Waiting for it for up to 24 hours")
    assert 4 <= len(world.said[1:]) <= 6
    assert world.said[1].startswith("Still waiting for the swarm, since 1")


def test_it_leaves_at_once_when_told_to() -> None:
    world = World(back_at=3600.0, stop_at=100.0)
    assert not world.wait()
    assert world.now == pytest.approx(100.0, abs=1.0)


def test_it_gives_up_when_the_stated_time_is_over() -> None:
    world = World(back_at=1e9)
    with pytest.raises(RunFailedError, match="has not answered for 24 hours"):
        world.wait()
    assert world.now == pytest.approx(24 * 3600.0, abs=1.0)


def test_who_has_no_patience_asks_once() -> None:
    world = World(back_at=1e9)
    with pytest.raises(RunFailedError):
        world.wait(patience=0.0)
    assert world.asked == [0.0]

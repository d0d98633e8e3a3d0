"""Who is let into a group."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from trainkit.collaborative import guarding

    clock = Clock()
    monkeypatch.setattr(guarding, "time", clock)
    return clock


@pytest.fixture
def averager() -> Any:
    from trainkit.collaborative.guarding import GuardedAverager

    made: Any = GuardedAverager.__new__(GuardedAverager)
    made._silent, made._parent_pid = {}, -1
    return made


def test_who_takes_a_place_in_three_groups_in_a_row_and_sends_nothing_is_not_waited_for(
    averager: Any, clock: Clock
) -> None:
    for _ in range(3):
        assert not averager.is_benched("eve")
        averager.note_silent(["eve", "ann"], ["eve"])
    assert averager.is_benched("eve")
    assert not averager.is_benched("ann")


def test_it_may_come_again_later_and_the_next_time_it_waits_twice_as_long(averager: Any, clock: Clock) -> None:
    waited = []
    for _ in range(10):
        averager.note_silent(["eve"], ["eve"])
        began = clock.now
        while averager.is_benched("eve"):
            clock.now += 1.0
        waited.append(clock.now - began)
    assert waited == [0, 0, 30, 60, 120, 240, 480, 600, 600, 600]


def test_one_round_in_which_it_sends_something_and_all_is_forgotten(averager: Any, clock: Clock) -> None:
    for silent in (["eve"], ["eve"], [], ["eve"], ["eve"]):
        averager.note_silent(["eve"], silent)
    assert not averager.is_benched("eve")


def test_the_memory_of_the_silent_is_bounded(averager: Any) -> None:
    peers = [f"Qm{index}" for index in range(5000)]
    averager.note_silent(peers, peers)
    assert len(averager._silent) <= 1000


def test_peers_of_one_invitation_share_a_voice_but_for_the_owners_side_and_guests() -> None:
    from trainkit.collaborative.admission import Member
    from trainkit.collaborative.guarding import voices_of

    def member(name: str, role: Any = "volunteer") -> Member:
        return Member("", name, role, 0, f"invitation of {name}", b"")

    members = {"a": member("eve"), "b": member("eve"), "c": member("ann"), "d": member("guest"), "e": member("guest")}
    owners = {"f": member("ranks", "reducer"), "g": member("ranks", "reducer")}
    assert voices_of({**members, **owners}) == {"a": 0.5, "b": 0.5, "c": 1.0}


def test_a_step_that_fails_is_told_by_its_control_and_not_once_more_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import asyncio

    from hivemind.averaging import DecentralizedAverager

    from trainkit.collaborative.averager import _Averager

    async def too_long(self: Any, **options: Any) -> None:
        raise asyncio.TimeoutError

    monkeypatch.setattr(DecentralizedAverager, "_step", too_long)
    made: Any = _Averager.__new__(_Averager)
    made._parent_pid = -1
    asyncio.run(made._step(step=None))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(DecentralizedAverager._step(made, step=None))

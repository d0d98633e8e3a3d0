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
    from trainkit.swarm import averager as swarm_averager

    clock = Clock()
    monkeypatch.setattr(swarm_averager, "time", clock)
    return clock


@pytest.fixture
def averager() -> Any:
    from trainkit.swarm.averager import GuardedAverager

    made: Any = GuardedAverager.__new__(GuardedAverager)
    made._late, made._fetching, made._fetched, made._parent_pid = {}, set(), {}, -1
    return made


def test_who_takes_a_place_in_three_groups_in_a_row_and_sends_nothing_is_not_waited_for(
    averager: Any, clock: Clock
) -> None:
    for _ in range(3):
        assert not averager.is_benched("eve")
        averager.note_late(["eve", "ann"], ["eve"], ["ann"])
    assert averager.is_benched("eve")
    assert not averager.is_benched("ann")


def test_nor_is_who_begins_and_never_ends_after_twice_as_many(averager: Any, clock: Clock) -> None:
    for _ in range(6):
        assert not averager.is_benched("eve")
        averager.note_late(["eve"], ["eve"], ["eve"])
    assert averager.is_benched("eve")


def test_it_may_come_again_later_and_each_time_it_waits_longer(averager: Any, clock: Clock) -> None:
    waited = []
    for _ in range(8):
        averager.note_late(["eve"], ["eve"], [])
        began = clock.now
        while averager.is_benched("eve"):
            clock.now += 1.0
        waited.append(clock.now - began)
    assert waited == [0, 0, 30, 120, 480, 600, 600, 600]


def test_one_round_in_which_it_is_in_time_and_all_is_forgotten(averager: Any, clock: Clock) -> None:
    for late in (["eve"], ["eve"], [], ["eve"], ["eve"]):
        averager.note_late(["eve"], late, [])
    assert not averager.is_benched("eve")


def test_the_memory_of_who_was_late_is_bounded(averager: Any) -> None:
    peers = [f"Qm{index}" for index in range(5000)]
    averager.note_late(peers, peers, [])
    assert len(averager._late) <= 1000


def test_a_peer_is_given_the_state_once_at_a_time_and_not_without_end(
    averager: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio
    from types import SimpleNamespace

    from hivemind.averaging import DecentralizedAverager

    async def state(self: Any, request: Any, context: Any) -> Any:
        for piece in ("theta", "momentum"):
            clock.now += 3.0
            yield piece

    async def admits(peer: Any) -> bool:
        return True

    async def fetch() -> list[str]:
        answers = averager.rpc_download_state(None, SimpleNamespace(remote_id="eve"))
        return [piece async for piece in answers]

    async def run() -> list[int]:
        first = averager.rpc_download_state(None, SimpleNamespace(remote_id="eve"))
        await anext(first)
        meanwhile = await fetch()
        rest = [piece async for piece in first]
        at_once = await fetch()
        clock.now += 6.0  # as long as that took
        return [len(pieces) for pieces in (meanwhile, rest, at_once, await fetch())]

    monkeypatch.setattr(DecentralizedAverager, "rpc_download_state", state)
    averager._admits = admits
    assert asyncio.run(run()) == [0, 1, 0, 2]


def test_peers_of_one_invitation_share_a_voice_but_for_the_owners_side_and_guests() -> None:
    from trainkit.swarm.admission import Member
    from trainkit.swarm.averager import voices_of

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

    from trainkit.swarm.averager import _Averager

    async def too_long(self: Any, **options: Any) -> None:
        raise asyncio.TimeoutError

    monkeypatch.setattr(DecentralizedAverager, "_step", too_long)
    made: Any = _Averager.__new__(_Averager)
    made._parent_pid = -1
    asyncio.run(made._step(step=None))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(DecentralizedAverager._step(made, step=None))

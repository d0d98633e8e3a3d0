from __future__ import annotations

import pytest

from trainkit.swarm.messages import RoundClock

CLOCK = RoundClock(seconds=10.0, first=100, count=3)  # rounds end at 1010, 1020 and 1030


@pytest.mark.parametrize(
    ("now", "index"), [(900.0, 0), (1000.0, 0), (1009.9, 0), (1010.0, 1), (1029.9, 2), (1030.0, 3), (9999.0, 3)]
)
def test_the_round_follows_from_the_time(now: float, index: int) -> None:
    assert CLOCK.index(now) == index


def test_the_run_ends_when_its_last_round_does() -> None:
    assert CLOCK.end == CLOCK.boundary(2) == 1030.0


@pytest.mark.parametrize("now", [1000.0, 1003.0, 1009.9])
def test_the_first_round_lasts_at_least_its_length(now: float) -> None:
    clock = RoundClock.starting(now, 10.0, 3)
    assert clock.index(now) == 0
    assert 10.0 <= clock.boundary(0) - now <= 20.0


def test_a_run_that_goes_on_starts_with_the_round_after_those_that_are_done() -> None:
    clock = RoundClock.starting(1003.0, 10.0, 5, done=2)
    assert clock.index(1003.0) <= 2
    assert clock.boundary(2) - 1003.0 >= 10.0


def test_the_clock_is_the_same_whenever_it_is_started_within_a_round() -> None:
    clocks = {RoundClock.starting(now, 10.0, 3) for now in (1000.0, 1003.0, 1009.9)}
    assert clocks == {RoundClock(10.0, first=101, count=3)}
    assert RoundClock.starting(1010.0, 10.0, 3) not in clocks


def test_a_peer_that_joins_later_is_in_the_same_round_as_the_creator() -> None:
    creator = RoundClock.starting(1003.0, 10.0, 3)
    joined = RoundClock(10.0, creator.first, 3)  # of what the creator has published
    assert [joined.index(now) for now in (1019.9, 1020.0, 1029.9, 1030.0, 1040.0)] == [0, 1, 1, 2, 3]
    assert (joined.boundary(0), joined.end) == (1020.0, 1040.0)


def test_the_schedule_spans_the_rounds() -> None:
    steps = [CLOCK.grid(now, epochs=20) for now in (900.0, 1000.0, 1015.0, 1030.0, 9999.0)]
    assert [step for step, _, _ in steps] == [0, 0, 10_000, 19_999, 19_999]
    assert {(per_epoch, total) for _, per_epoch, total in steps} == {(1000, 20_000)}

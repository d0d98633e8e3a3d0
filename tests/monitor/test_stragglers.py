from __future__ import annotations

import pytest

from trainkit.monitor.stragglers import SECONDS, WINDOWS, Stragglers

HOSTS = ("n1", "n1", "n2", "n2")
QUICK = [8.0, 8.0, 8.0, 8.0]
SLOW = [8.0, 8.0, 14.0, 8.0]
"""Of 15 s that all have taken for it."""


def named(*windows: list[float], wall: float = SECONDS, hosts: tuple[str, ...] = HOSTS) -> list[list[int]]:
    """Which ranks are named after each look."""
    watch = Stragglers(hosts)
    return [[found.rank for found in watch.look(own, wall)] for own in windows]


def test_a_rank_that_is_slow_for_a_minute_is_named_once() -> None:
    assert named(*[SLOW] * 9) == [[], [], [], [2], [], [], [], [], []]


def test_it_is_named_with_its_host_and_how_slow_it_is() -> None:
    watch = Stragglers(HOSTS)
    (found,) = [item for _ in range(WINDOWS) for item in watch.look(SLOW, SECONDS)]
    assert found.facts() == {"rank": 2, "host": "n2", "times": 1.75}
    assert "Rank 2 on n2 is a straggler" in str(found)


def test_one_quick_moment_and_all_begins_anew() -> None:
    assert named(SLOW, SLOW, SLOW, QUICK, SLOW, SLOW, SLOW) == [[]] * 7
    assert named(*[SLOW] * 4, QUICK, *[SLOW] * 4) == [[], [], [], [2], [], [], [], [], [2]]


def test_records_in_quick_succession_are_looked_at_together() -> None:
    tenth = [seconds / 10 for seconds in SLOW]
    assert named(*[tenth] * 10 * WINDOWS, wall=SECONDS / 10 + 1e-6)[-1] == [2]
    assert named(*[tenth] * (10 * WINDOWS - 1), wall=SECONDS / 10 + 1e-6)[-1] == []


@pytest.mark.parametrize(
    "own",
    [
        QUICK,
        [8.0, 8.0, 11.9, 8.0],  # no more than that may well be chance
        [0.5, 0.5, 1.9, 0.5],  # 4 times as slow, and nobody waits for it for long
        [14.0, 14.0, 8.0, 14.0],  # the quick one is not the trouble
    ],
)
def test_who_is_no_straggler(own: list[float]) -> None:
    assert named(*[own] * 9) == [[]] * 9


def test_two_of_four_are_named_both() -> None:
    assert named(*[[14.0, 14.0, 8.0, 8.0]] * WINDOWS)[-1] == [0, 1]


def test_of_two_ranks_one_can_be_a_straggler_and_one_alone_cannot() -> None:
    assert named(*[[5.0, 14.0]] * WINDOWS, hosts=("n1", "n2"))[-1] == [1]
    assert named(*[[14.0]] * WINDOWS, hosts=("n1",))[-1] == []


def test_ranks_whose_hosts_nobody_has_told_are_not_watched() -> None:
    assert named(*[SLOW] * WINDOWS, hosts=())[-1] == []

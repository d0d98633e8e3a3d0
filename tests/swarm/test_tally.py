from __future__ import annotations

import math

import pytest

from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.robust import FRESH_SECONDS, Tally, newest_round, tally

NOW = 1_000_000.0


def told(samples: int, rate: float = 0.0, *, round_index: int = 3, age: float = 0.0) -> PeerProgress:
    return PeerProgress(
        name="x", round=round_index, samples=samples, samples_per_sec=rate, loss=0.0, group=1, time=NOW - age
    )


def counted(own: Tally, *, trusted: tuple[str, ...] = (), is_trusted: bool = False, **others: PeerProgress) -> Tally:
    return tally(own, others, round_index=3, trusted=trusted, is_trusted=is_trusted, now=NOW)


def test_an_update_is_gathered_by_all_who_are_at_it() -> None:
    found = counted(Tally(100, 10), a=told(150, 20), b=told(50, 5), behind=told(999, 50, round_index=2))
    assert found == Tally(300, 35)
    assert found.seconds_left(1000) == 20.0
    assert found.seconds_left(300) == 0.0


def test_who_has_not_spoken_for_a_second_has_gathered_for_one_more() -> None:
    assert counted(Tally(100, 50), a=told(60, 40, age=1.0)).samples == 200


def test_who_is_not_heard_any_more_has_nothing_to_give() -> None:
    assert counted(Tally(100, 50), dead=told(90, 40, age=FRESH_SECONDS + 1)) == Tally(100, 50)


def test_without_any_speed_there_is_no_end_in_sight() -> None:
    assert counted(Tally(0, 0)).seconds_left(1) == math.inf


@pytest.mark.parametrize("samples", [10**9, 1 << 50])
def test_a_volunteers_claim_ends_no_update_for_all(samples: int) -> None:
    found = counted(Tally(100, 10), liar=told(samples, 1e9), a=told(100, 10), b=told(100, 10))
    assert found == Tally(600, 60)


def test_the_owners_side_is_believed_and_may_be_much_faster() -> None:
    fast = told(5000, 500)
    assert counted(Tally(100, 10), fast=fast, trusted=("fast",)).samples == 5100
    assert counted(Tally(100, 10), fast=fast).samples == 400


def test_both_ends_of_a_bound_come_to_the_same_sum() -> None:
    """Else the fast one would wait while the slow one gathers what it thinks is missing."""
    slow, fast = Tally(100, 10), Tally(5000, 500)
    owners = counted(slow, is_trusted=True, other=told(5000, 500))
    assert counted(fast, trusted=("owner",), owner=told(100, 10)) == owners == Tally(400, 40)


def test_only_the_owners_side_says_that_there_is_a_newer_state() -> None:
    others = {"liar": told(0, round_index=10**6), "owner": told(0, round_index=4), "reducer": told(0, round_index=5)}
    assert newest_round(others, {"owner", "reducer"}, NOW) == 5
    assert newest_round(others, set(), NOW) == -1
    assert newest_round({"owner": told(0, age=60.0)}, {"owner"}, NOW) == -1

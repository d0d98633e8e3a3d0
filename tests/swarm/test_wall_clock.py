"""How far a machine's clock is off, by what others say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trainkit.errors import UserError
from trainkit.swarm.address import MOST_APART, ahead_by, require_same_time


def asked(ahead: float, *ways: tuple[float, float]) -> list[tuple[float, float, float]]:
    """Questions that were so many seconds on the way there, and back."""
    return [(100.0 + ahead, 100.0 + there, 100.0 + there + back + ahead) for there, back in ways]


@pytest.mark.parametrize("ahead", [2.5, 0.3, 0.0, -0.3, -2.5])
def test_where_answers_come_at_once_the_clocks_are_compared(ahead: float) -> None:
    assert ahead_by(asked(ahead, (0.001, 0.001))) == pytest.approx(ahead, abs=0.01)


@pytest.mark.parametrize("ways", [[(3.0, 0.1)], [(0.1, 3.0)], [(2.0, 2.0), (0.5, 3.0)]], ids=str)
def test_a_slow_answer_is_no_wrong_clock(ways: list[tuple[float, float]]) -> None:
    assert ahead_by(asked(0.0, *ways)) == 0.0


def test_of_several_answers_the_quickest_ways_count() -> None:
    assert ahead_by(asked(2.5, (3.0, 0.1), (0.01, 2.0))) == pytest.approx(2.5, abs=0.02)


class Swarm:
    """Stands for the peer's node."""

    def __init__(self, ahead: float | None) -> None:
        self.ahead = ahead

    def in_dht(self, work: Callable[..., Awaitable[Any]], seconds: float, otherwise: Any) -> Any:
        return self.ahead


@pytest.mark.parametrize("ahead", [None, 0.0, MOST_APART, -MOST_APART])
def test_clocks_that_agree_or_that_nobody_can_compare_keep_nobody_out(ahead: float | None) -> None:
    require_same_time(Swarm(ahead), ["/ip4/127.0.0.1/tcp/1/p2p/x"])


@pytest.mark.parametrize(("ahead", "how"), [(2.5, "2.5 s ahead of"), (-1.2, "1.2 s behind")])
def test_others_are_named_with_how_far_they_are_off_and_the_remedy(ahead: float, how: str) -> None:
    with pytest.raises(UserError, match=f"The clock of this machine is {how} the swarm's.") as error:
        require_same_time(Swarm(ahead), [])
    assert "timedatectl set-ntp true" in error.value.fix

"""A peer with other weights than the owner's side takes over the right ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")


def caught_up(gives: list[int], *, round_index: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of each try, where the state that is given away is of these rounds, one after the other."""
    from trainkit.swarm import rounds

    monkeypatch.setattr(rounds, "_ASK_AGAIN_SECONDS", 0.05)
    found: list[bool] = []
    states = iter(gives)

    def adopt(left: float, *, newer_than: int) -> bool:
        found.append(next(states) > newer_than)
        return found[-1]

    peer: Any = SimpleNamespace(
        clock=SimpleNamespace(seconds=seconds),
        averaging=SimpleNamespace(adopt=adopt),
        common=SimpleNamespace(round=round_index),
    )
    rounds._catch_up(peer)
    return found


def test_a_state_from_before_this_rounds_step_is_not_taken_over_but_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert caught_up([6, 6, 7], round_index=7, seconds=20.0, monkeypatch=monkeypatch) == [False, False, True]


def test_it_asks_for_half_a_round_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    found = caught_up([6] * 1000, round_index=7, seconds=0.6, monkeypatch=monkeypatch)
    assert 2 <= len(found) <= 7
    assert not any(found)

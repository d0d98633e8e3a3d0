"""What a peer of a group finds out about itself before it sends anything."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.collaborative.common import PROBE_SIZE
from trainkit.collaborative.gathered import CLIENT, About, Gathered

pytestmark = pytest.mark.usefixtures("hivemind_here")

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def strays(own: torch.Tensor, role: str = "volunteer", *, trusted: bool = True) -> bool:
    """With weights ``own``, in a group with somebody who has others and gives its state away."""
    from trainkit.collaborative.averager import _Averager

    async def member(peer: str) -> Any:
        return SimpleNamespace(peer_id=peer, role="reducer", trusted=trusted and peer == "reducer")

    def about(weights: torch.Tensor, *, shares: bool) -> Gathered:
        return Gathered(None, CLIENT, About(shares=shares, probe=weights.numpy().tobytes()))

    averager: Any = SimpleNamespace(
        peer_id="me", guard=SimpleNamespace(member=member), own=SimpleNamespace(grant=SimpleNamespace(role=role))
    )
    group: Any = {"me": about(own, shares=False), "reducer": about(WEIGHTS, shares=True)}
    return asyncio.run(_Averager._has_strayed(averager, group))


def test_a_gradient_of_other_weights_than_the_owners_sides_is_not_sent() -> None:
    assert strays(1.01 * WEIGHTS)
    assert not strays(WEIGHTS + 1e-6)


def test_what_volunteers_say_of_their_weights_makes_nobody_a_stray() -> None:
    assert not strays(1.01 * WEIGHTS, trusted=False)


def test_by_the_owners_weights_all_others_are_measured() -> None:
    assert not strays(1.01 * WEIGHTS, "owner")

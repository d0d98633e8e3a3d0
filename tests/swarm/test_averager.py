"""What a peer of a group finds out about itself before it sends anything."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.config.loading import load
from trainkit.swarm.exchange import CLIENT, About, Gathered, Outcome
from trainkit.swarm.robust import Round
from trainkit.swarm.sync_diloco import PROBE_SIZE, Given

pytestmark = pytest.mark.usefixtures("hivemind_here")

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def strays(own: torch.Tensor, role: str = "volunteer", *, trusted: bool = True) -> bool:
    """With weights ``own``, in a group with somebody who has others and gives its state away."""
    from trainkit.swarm.averager import _Averager

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


def settled(
    theirs: torch.Tensor, *, same_weights: bool, role: str = "reducer", average: float = 1.0
) -> tuple[Round, list[tuple[bool, ...]]]:
    """A round of a volunteer with `WEIGHTS`, whose group's reducer had others; and which parts it has stepped by."""
    from trainkit.swarm.average import Averaging, _Exchange

    nobody = SimpleNamespace(role="volunteer")
    member = SimpleNamespace(peer_id="reducer", role=role, trusted=True)
    stepped: list[tuple[bool, ...]] = []
    common: Any = SimpleNamespace(
        same_weights=same_weights,
        num_parameters=4,
        probe=lambda: WEIGHTS,
        step=lambda *_, arrived, **__: stepped.append(arrived),
    )
    averager: Any = SimpleNamespace(
        peer_id="me",
        client_mode=True,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=[average * torch.ones(4)],
    )
    dht: Any = SimpleNamespace(member=lambda peer: member, own=SimpleNamespace(grant=nobody))
    link: Any = SimpleNamespace(learn=lambda sent, outcome: "", upload=None)
    averaging = Averaging(averager, dht, common, load("hivemind").config.collaborative, link)
    told = {"reducer": {"shares": True, "probe": theirs.numpy().tobytes()}}
    outcome = Outcome((2,), (2,), (True,), ("reducer",), (), 0, 0, 0, 0.0)
    averaging._exchange = _Exchange(
        control=SimpleNamespace(result=lambda seconds: (told, outcome)),
        given=Given(torch.ones(4), (1.0,), torch.ones(4), sound=True),
        sent=(1.0,), trained=1.0, next_round=3, alone=False, began=time.monotonic(), failed="",
    )  # fmt: skip
    result = averaging.settle(1.0, trained_on=False, leads=False)
    assert result is not None
    return result, stepped


def test_an_average_of_gradients_at_other_weights_is_not_used() -> None:
    result, stepped = settled(1.01 * WEIGHTS, same_weights=True)
    assert (result.used, result.why, result.drifted) == ("nothing", "the others are at another update", True)
    assert stepped == [(False,)]
    assert settled(WEIGHTS, same_weights=True)[0].used == "average"


@pytest.mark.parametrize(("role", "used"), [("reducer", "nothing"), ("owner", "average")])
def test_what_the_owner_has_averaged_is_not_for_others_to_judge(role: str, used: str) -> None:
    assert settled(WEIGHTS, same_weights=False, role=role, average=8.0)[0].used == used


def test_a_pseudo_gradient_is_of_use_to_whoever_has_drifted() -> None:
    result, stepped = settled(1.01 * WEIGHTS, same_weights=False)
    assert (result.used, result.drifted, stepped) == ("average", True, [(True,)])


def test_what_volunteers_say_of_their_weights_makes_nobody_a_stray() -> None:
    assert not strays(1.01 * WEIGHTS, trusted=False)


def test_by_the_owners_weights_all_others_are_measured() -> None:
    assert not strays(1.01 * WEIGHTS, "owner")

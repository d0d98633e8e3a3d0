"""The end of a round: which averages a peer uses."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.config.loading import load
from trainkit.errors import RunFailedError
from trainkit.swarm import processes
from trainkit.swarm.average import Averaging, _Exchange
from trainkit.swarm.averager import Averaged
from trainkit.swarm.robust import Round
from trainkit.swarm.sync import PROBE_SIZE, Given, Outcome

pytestmark = pytest.mark.usefixtures("hivemind_here")

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def settled(
    *, drifted: bool = False, same_weights: bool, role: str = "reducer", average: float = 1.0, members: int = 2
) -> tuple[Round, list[tuple[bool, ...]]]:
    """A round of a volunteer that has perhaps drifted from its group's reducer; and which parts it has stepped by."""
    nobody = SimpleNamespace(role="volunteer")
    member = SimpleNamespace(peer_id="reducer", role=role, trusted=True)
    stepped: list[tuple[bool, ...]] = []
    common: Any = SimpleNamespace(
        same_weights=same_weights, num_parameters=4, step=lambda average, *_, **__: stepped.append(average.arrived)
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
    averaged = Averaged({"me": 8.0, "reducer": 4.0}, drifted, Outcome((2,), (members,), (True,), ("reducer",)))
    given = Given(torch.ones(4), (1.0,), torch.ones(4), sound=True)
    return settle(averaging, given, averaged, leads=False), stepped


def settle(averaging: Averaging, given: Given, averaged: Averaged, *, next_round: int = 3, leads: bool) -> Round:
    """A round in which a peer has given that, and its averager says this."""
    averaging.under_way = _Exchange(
        control=SimpleNamespace(result=lambda seconds: averaged), given=given, sent=given.weights, trained=1.0,
        next_round=next_round, began=time.monotonic(), failed="",
    )  # fmt: skip
    result = averaging.settle(1.0, trained_on=False, leads=leads)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no tensors"), "no tensors"),
        (BrokenPipeError(), "A helper process of this peer has died: its averager"),
    ],
)
def test_an_error_of_the_averager_ends_the_search_at_once(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that asks it, the error would be told to nobody."""

    def step(**options: Any) -> None:
        raise error

    monkeypatch.setattr(processes, "_ANSWER_SECONDS", 0.2)
    averager: Any = SimpleNamespace(
        client_mode=True, is_alive=lambda: True, pid=os.getpid(), step=step, probe=torch.zeros_like(WEIGHTS)
    )
    dht: Any = SimpleNamespace(alive=True)
    common: Any = SimpleNamespace(probe=lambda: WEIGHTS)
    unused: Any = None
    with pytest.raises((ValueError, RunFailedError), match=says):
        Averaging(averager, dht, common, load("hivemind").config.collaborative, unused).begin(time.time(), 0.0)


def test_who_knows_some_of_a_large_group_says_how_many_and_how_fast_all_are() -> None:
    result, _ = settled(same_weights=False, members=300)
    assert (result.group, result.samples_per_sec) == (300, 300 * 6.0)


@pytest.mark.parametrize(
    ("tried", "standing", "sent"),
    [(False, "tried", 64.0), (True, "tried", 0.0), (True, "differs", 0.0), (True, "counts", 64.0)],
)
def test_what_a_peer_with_other_libraries_learns_waits_until_it_counts(tried: bool, standing: str, sent: float) -> None:
    given = Given(torch.ones(4), (64.0,), torch.ones(4), sound=True)
    common: Any = SimpleNamespace(num_parameters=4, give=lambda samples, codec: given)
    averager: Any = SimpleNamespace(client_mode=True, standing=standing)
    link: Any = SimpleNamespace(sent=tuple, load=SimpleNamespace(codec="8bit"))
    averaging = Averaging(averager, averager, common, load("hivemind").config.collaborative, link)
    averaging.tried = tried
    averaging.exchange(samples=64, trained=1.0, next_round=3)
    assert averaging.under_way is not None
    assert (averaging.under_way.sent, averaging.under_way.given.weights) == ((sent,), (64.0,))


def test_an_average_of_gradients_at_other_weights_is_not_used() -> None:
    result, stepped = settled(drifted=True, same_weights=True)
    assert (result.used, result.why, result.drifted) == ("nothing", "the others are at another update", True)
    assert stepped == [(False,)]
    assert settled(same_weights=True)[0].used == "average"


@pytest.mark.parametrize(("role", "used"), [("reducer", "nothing"), ("owner", "average")])
def test_what_the_owner_has_averaged_is_not_for_others_to_judge(role: str, used: str) -> None:
    assert settled(same_weights=False, role=role, average=8.0)[0].used == used


def test_a_pseudo_gradient_is_of_use_to_whoever_has_drifted() -> None:
    result, stepped = settled(drifted=True, same_weights=False)
    assert (result.used, result.drifted, stepped) == ("average", True, [(True,)])

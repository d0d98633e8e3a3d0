"""Averages that others have made, judged by what this peer has trained itself."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.config.loading import load
from trainkit.swarm.link import PART, Outcome
from trainkit.swarm.robust import Round
from trainkit.swarm.sync import PROBE_SIZE, Given

pytestmark = pytest.mark.usefixtures("hivemind_here")

VALUES, PARAMETERS = 3 * PART, 3 * PART - 100  # the last hundred are running statistics
REDUCERS = ("me", "anna", "bob")


def trained(seed: int, *, common: float = 0.3) -> Tensor:
    """What a peer sends: in part what all have learned."""
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(one)) for one in (0, seed)]
    vector = common * vectors[0] + vectors[1]
    vector[PARAMETERS:] = 1.0 + 0.01 * vectors[1][PARAMETERS:]
    return vector


OWN = trained(1)
AVERAGE = (OWN + trained(2) + trained(3)) / 3
ANNA, BOB = slice(PART, 2 * PART), slice(2 * PART, VALUES)


def judged(
    average: Tensor, *, own: Tensor = OWN, reducers: tuple[str, ...] = REDUCERS, slower: float = 1.0
) -> dict[str, tuple[str, str]]:
    from trainkit.swarm.robust import untrue

    found = untrue(average, own, PARAMETERS, reducers, own_id="me", slower=slower)
    return {verdict.peer: (verdict.action, verdict.why) for verdict in found}


def changed(where: slice, factor: float) -> Tensor:
    average = AVERAGE.clone()
    average[where] *= factor
    return average


def test_a_true_average_is_believed() -> None:
    assert judged(AVERAGE) == {}


@pytest.mark.parametrize("factor", [-1.0, -9.0, -50.0])
def test_only_the_reducer_that_gives_back_the_opposite_is_not_believed(factor: float) -> None:
    (reducer, (action, why)), *others = judged(changed(ANNA, factor)).items()
    assert (reducer, action, others) == ("anna", "dropped", [])
    assert why.startswith("as a reducer gave back the opposite of what it got (cosine -0.")


@pytest.mark.parametrize(("factor", "action"), [(9.0, "left out"), (100.0, "dropped"), (float("nan"), "dropped")])
def test_nor_one_whose_averages_are_longer_than_contributions_can_be(factor: float, action: str) -> None:
    assert judged(changed(BOB, factor))["bob"][0] == action


def test_what_others_have_learned_in_more_updates_may_be_longer() -> None:
    longer = changed(ANNA, 9.0)
    assert "anna" in judged(longer)
    assert judged(longer, slower=4.0) == {}


def test_so_may_everything_be_if_what_this_peer_has_averaged_itself_is() -> None:
    assert judged(9.0 * AVERAGE).keys() <= {"bob"}  # but not the running statistics
    assert "anna" in judged(9.0 * AVERAGE, reducers=("anna", "anna", "bob"))


@pytest.mark.parametrize("factor", [1e6, float("inf")])
def test_running_statistics_that_nobody_has_measured_are_not_believed(factor: float) -> None:
    assert judged(changed(slice(PARAMETERS, VALUES), factor)).keys() == {"bob"}


def test_parts_that_have_not_arrived_are_nobodys() -> None:
    assert judged(changed(ANNA, -9.0), reducers=("me", "", "bob")) == {}


def test_who_has_trained_nothing_can_judge_no_direction() -> None:
    nothing = torch.zeros(VALUES)
    nothing[PARAMETERS:] = OWN[PARAMETERS:]
    assert judged(changed(ANNA, -1.0), own=nothing) == {}


@pytest.mark.parametrize(
    ("others", "own", "times"),
    [({}, 100.0, 1.0), ({"a": 400.0}, 100.0, 4.0), ({"a": 50.0}, 100.0, 1.0), ({"a": 400.0}, 0.0, 1.0)],
)
def test_how_much_slower_a_peer_is_follows_from_what_all_say(
    others: dict[str, float], own: float, times: float
) -> None:
    from trainkit.swarm.robust import slower_than

    assert slower_than(others, own) == times


def test_one_that_claims_any_speed_changes_nothing() -> None:
    from trainkit.swarm.robust import slower_than

    assert slower_than({"a": 100.0, "liar": 1e9}, 100.0) == 1.0


# The end of a round.

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


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
        step=lambda average, *_, **__: stepped.append(average.arrived),
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
    outcome = Outcome((2,), (2,), (True,), ("reducer",))
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

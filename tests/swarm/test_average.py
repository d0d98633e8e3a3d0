"""Averages that others have made, judged by what this peer has trained itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from trainkit.swarm.link import PART

if TYPE_CHECKING:
    from torch import Tensor

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
    from trainkit.swarm.average import untrue

    found = untrue(average, own, PARAMETERS, reducers, own_id="me", slower=slower)
    return {verdict.peer: (verdict.action, verdict.why) for verdict in found}


def changed(where: slice, factor: float) -> Tensor:
    average = AVERAGE.clone()
    average[where] *= factor
    return average


def test_a_true_average_is_believed() -> None:
    assert judged(AVERAGE) == {}


@pytest.mark.parametrize("factor", [-1.0, -9.0, -50.0])
def test_of_two_reducers_only_the_one_is_not_believed_that_gives_back_the_opposite(factor: float) -> None:
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
    from trainkit.swarm.average import slower_than

    assert slower_than(others, own) == times


def test_one_that_claims_any_speed_changes_nothing() -> None:
    from trainkit.swarm.average import slower_than

    assert slower_than({"a": 100.0, "liar": 1e9}, 100.0) == 1.0

"""A peer whose own training has collapsed in a round gives nothing, and goes on from the common weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from trainkit.swarm.robust import Round

pytestmark = pytest.mark.usefixtures("hivemind_here")

# How far the weights move in a round, and its loss.
STEADY = [(0.010, 3e-6), (0.011, 2e-6)]
COLLAPSED = (1.4, 0.6)


def alone(*rounds: tuple[float, float | None]) -> tuple[list[Round], list[float], nn.Module]:
    """How the rounds of an owner ended whom nobody has joined, where the common weights then were, and the model."""
    from trainkit.config.schema import CollaborativeConfig
    from trainkit.swarm.average import Averaging
    from trainkit.swarm.link import Link
    from trainkit.swarm.sync_diloco import OuterState

    model = nn.Linear(64, 8, bias=False)
    nn.init.zeros_(model.weight)
    common = OuterState(model, lr=1.0, momentum=0.0)
    dht: Any = SimpleNamespace(own=SimpleNamespace(grant=SimpleNamespace(role="owner")), member=lambda peer: None)
    averager: Any = SimpleNamespace(client_mode=False, peer_id="owner", bandwidth=None)
    averaging = Averaging(averager, dht, common, CollaborativeConfig(), Link(512, "fp16", 60.0, 10.0))
    ended, places = [], []
    for number, (way, loss) in enumerate(rounds):
        with torch.no_grad():
            model.weight.add_(way)
        averaging.exchange(samples=64, trained=1.0, next_round=number + 1, alone=True, loss=loss)
        result = averaging.settle(0.0, trained_on=False, leads=True)
        assert result is not None
        ended.append(result)
        places.append(round(float(common.theta.mean()), 4))
    return ended, places, model


def test_a_round_in_which_weights_and_loss_rose_out_of_proportion_is_given_up() -> None:
    ended, places, model = alone(*STEADY, COLLAPSED, (0.01, 3e-6))
    assert [one.used for one in ended] == ["own", "own", "nothing", "own"]
    assert places == [0.01, 0.021, 0.021, 0.031]
    assert float(next(model.parameters()).detach().mean()) == pytest.approx(0.031)  # it has started anew from there
    assert [one.collapsed for one in ended] == ["", "", "its loss rose from 2e-06 to 0.6", ""]


@pytest.mark.parametrize(
    "last",
    [
        pytest.param((1.4, 1e-6), id="long, as after a round of few updates: the loss has not risen"),
        pytest.param((0.05, 0.6), id="of a higher loss, and no longer than usual: other data"),
        pytest.param((1.4, 5e-4), id="of a loss at which nothing is told wrong"),
        pytest.param((1.4, None), id="not judged by its loss"),
    ],
)
def test_any_other_round_counts(last: tuple[float, float | None]) -> None:
    ended, places, _ = alone(*STEADY, last)
    assert (ended[-1].used, ended[-1].collapsed) == ("own", "")
    assert places[-1] == pytest.approx(0.021 + last[0], abs=1e-3)


def test_of_four_such_rounds_in_a_row_the_last_counts_so_that_nobody_is_stuck() -> None:
    ended, _, _ = alone(*STEADY, COLLAPSED, COLLAPSED, COLLAPSED, COLLAPSED)
    assert [one.used for one in ended] == ["own", "own", "nothing", "nothing", "nothing", "own"]


def test_the_first_round_of_a_peer_counts() -> None:
    assert alone(COLLAPSED)[0][0].used == "own"

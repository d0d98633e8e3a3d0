from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from trainkit.swarm.link import PART
from trainkit.swarm.sync_diloco import Average, Given, OuterState


def state(*, lr: float = 1.0, momentum: float = 0.0) -> tuple[nn.Module, OuterState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, OuterState(model, lr=lr, momentum=momentum)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def common(outer: OuterState) -> Tensor:
    """The weights that the peers have in common."""
    return outer.theta[: outer.num_parameters].clone()


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def step(
    outer: OuterState,
    vector: Tensor,
    given: Given,
    *,
    arrived: Sequence[bool] = (),
    counted: Sequence[bool] = (),
    trained_on: bool = False,
) -> None:
    """Make the outer step, by default with everything in it."""
    everything = [True] * len(given.weights)
    average = Average(vector, outer.round + 1, arrived or everything, counted or everything)
    outer.step(average, given, trained_on=trained_on)


def test_alone_with_lr_1_and_no_momentum_the_peer_keeps_what_it_has_learned() -> None:
    model, outer = state()
    move(model, 0.5)
    learned, given = flat(model), outer.give(8)
    # It points back to where the round began.
    assert torch.allclose(given.vector[: outer.num_parameters], torch.tensor(-0.5))
    step(outer, given.vector, given)
    assert torch.allclose(flat(model), learned)


def test_the_outer_step_is_sgd_with_nesterov_momentum() -> None:
    model, outer = state(lr=0.7, momentum=0.9)
    reference = common(outer).requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        move(model, 0.1 * (number + 1))
        given = outer.give(8)
        reference.grad = given.vector[: outer.num_parameters].clone()
        sgd.step()
        step(outer, given.vector, given)
        assert torch.allclose(common(outer), reference.detach(), atol=1e-6)


def test_what_is_not_finite_has_no_say_and_the_model_starts_anew() -> None:
    model, outer = state()
    before = outer.theta.clone()
    move(model, math.nan)
    given = outer.give(8)
    assert (given.usable, set(given.weights), float(given.vector[: outer.num_parameters].norm())) == (False, {0.0}, 0.0)
    step(outer, given.vector, given)
    assert torch.equal(outer.theta, before)
    assert torch.equal(flat(model), common(outer))


def test_a_late_average_keeps_what_was_learned_since() -> None:
    (model, outer), (in_time, same) = state(lr=0.7, momentum=0.9), state(lr=0.7, momentum=0.9)
    for one in (model, in_time):
        move(one, 0.5)
    given, average = outer.give(8), torch.full_like(outer.theta, -0.3)
    step(same, average, same.give(8))
    move(model, 0.01)  # it trains on
    step(outer, average, given, trained_on=True)
    assert torch.equal(outer.theta, same.theta)
    assert torch.equal(outer.momentum, same.momentum)
    assert torch.allclose(flat(model), flat(in_time) + 0.01, atol=1e-6)
    # Only that is the next round's.
    assert torch.allclose(outer.give(8).vector[: outer.num_parameters], torch.tensor(-0.01), atol=1e-6)


@pytest.mark.parametrize("trained_on", [False, True])
def test_what_was_not_counted_is_in_the_mean_of_a_later_contribution(trained_on: bool) -> None:
    """With the samples of both rounds."""
    model, outer = state()
    move(model, 0.5)
    others = torch.full_like(outer.theta, 0.2)
    step(outer, others, outer.give(8), counted=[False], trained_on=trained_on)
    assert torch.allclose(flat(model), common(outer) + 0.5, atol=1e-6)  # it has followed the others, and keeps its own
    move(model, 0.3)
    given = outer.give(4)
    assert given.weights == (12.0,)
    assert torch.allclose(given.vector[: outer.num_parameters], torch.tensor(-0.4), atol=1e-6)
    step(outer, others, given, trained_on=trained_on)
    assert torch.allclose(flat(model), common(outer), atol=1e-6)
    move(model, 0.1)
    assert outer.give(4).weights == (4.0,)


def test_where_nothing_has_arrived_common_weights_and_momentum_stay() -> None:
    model = nn.Linear(PART // 64, 128, bias=False)  # two parts
    outer = OuterState(model, lr=1.0, momentum=0.9)
    before = outer.theta.clone()
    step(outer, torch.ones_like(outer.theta), outer.give(8), arrived=[False, True])
    assert torch.equal(outer.theta[:PART], before[:PART])
    assert float(outer.momentum[:PART].norm()) == 0.0
    assert not torch.equal(outer.theta[PART:], before[PART:])
    before = outer.theta.clone()
    step(outer, torch.ones_like(outer.theta), outer.give(0), arrived=[False, False], counted=[False, False])
    assert torch.equal(outer.theta, before)
    assert outer.round == 2


def test_the_model_as_the_peers_have_it_in_common_is_lent_and_given_back() -> None:
    model, outer = state()
    move(model, 0.5)
    own = flat(model)
    with outer.in_model():
        assert torch.equal(flat(model), common(outer))
    assert torch.equal(flat(model), own)


def test_running_statistics_are_averaged_as_they_are() -> None:
    model, outer = state()
    mean, variance = model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")
    model(torch.randn(64, 4))
    given = outer.give(8)
    assert torch.allclose(given.vector[outer.num_parameters : outer.num_parameters + 3], mean)
    given.vector[outer.num_parameters :] = 2.0
    step(outer, given.vector, given)
    assert torch.equal(variance, torch.full((3,), 2.0))


def test_running_statistics_of_a_model_that_has_trained_on_are_its_own() -> None:
    model, outer = state()
    mean, given = model.get_buffer("1.running_mean"), outer.give(8)
    model(torch.randn(64, 4))
    own = mean.clone()
    step(outer, torch.zeros_like(outer.theta), given, trained_on=True)
    assert torch.equal(mean, own)
    assert torch.equal(outer.theta[outer.num_parameters : outer.num_parameters + 3], torch.zeros(3))


def test_another_peers_state_is_taken_over_whole() -> None:
    (_, donor), (model, outer) = state(), state()
    donor.theta += 1.0
    donor.momentum += 2.0
    outer.load(donor.theta, donor.momentum, 4)
    assert torch.equal(outer.theta, donor.theta)
    assert torch.equal(outer.momentum, donor.momentum)
    assert outer.round == 4
    assert torch.equal(flat(model), common(donor))


@pytest.mark.parametrize("broken", ["weights instead of", "momentum: weights instead of", "not finite"])
def test_a_state_that_does_not_fit_or_is_not_finite_changes_nothing(broken: str) -> None:
    """One of another model, of another optimizer, of a model that has diverged."""
    _, outer = state()
    before = outer.theta.clone()
    theta = {"weights instead of": before[:-1], "not finite": before * math.nan}.get(broken, before)
    momentum = outer.momentum[:-1] if "momentum" in broken else outer.momentum
    with pytest.raises(ValueError, match=broken.removeprefix("momentum: ")):
        outer.load(theta, momentum, 1)
    assert torch.equal(outer.theta, before)


def test_peers_with_the_same_weights_have_the_same_probe_and_no_others() -> None:
    """Weights that differ anywhere have another one in every round."""
    from trainkit.swarm.digest import has_drifted

    probes = [state()[1].probe() for _ in range(3)]
    assert all(torch.equal(first, second) for first, second in pairwise(probes))
    for place in range(0, state()[1].theta.numel(), 97):
        ours, theirs = state()[1], state()[1]
        theirs.theta[place] += 0.1 * float(theirs.theta.norm())
        for ours.round in (0, 5):
            theirs.round = ours.round
            assert has_drifted(theirs.probe().numpy().tobytes(), ours.probe())

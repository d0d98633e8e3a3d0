from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from trainkit.collaborative.outer import OuterState


def state(*, lr: float = 1.0, momentum: float = 0.0) -> tuple[nn.Module, OuterState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, OuterState(model, lr=lr, momentum=momentum)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def test_the_pseudo_gradient_points_back_to_where_the_round_began() -> None:
    model, outer = state()
    move(model, 0.5)
    assert torch.allclose(outer.local()[: outer.num_parameters], torch.full((outer.num_parameters,), -0.5))


def test_alone_with_lr_1_and_no_momentum_the_peer_keeps_what_it_has_learned() -> None:
    model, outer = state()
    move(model, 0.5)
    learned = [parameter.detach().clone() for parameter in model.parameters()]
    outer.step(outer.local(), 1)
    for parameter, expected in zip(model.parameters(), learned, strict=True):
        assert torch.allclose(parameter, expected)


def test_the_outer_step_is_sgd_with_nesterov_momentum() -> None:
    model, outer = state(lr=0.7, momentum=0.9)
    reference = outer.theta[: outer.num_parameters].clone().requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(3):
        move(model, 0.1 * (step + 1))
        contribution = outer.local()
        reference.grad = contribution[: outer.num_parameters].clone()
        sgd.step()
        outer.step(contribution, step + 1)
        assert torch.allclose(outer.theta[: outer.num_parameters], reference.detach(), atol=1e-6)


def test_a_round_without_a_contribution_leaves_the_common_weights() -> None:
    model, outer = state()
    before = outer.theta.clone()
    move(model, 0.5)
    outer.step(None, 1)
    assert torch.equal(outer.theta, before)
    assert torch.equal(outer.local()[: outer.num_parameters], torch.zeros(outer.num_parameters))


def test_running_statistics_are_averaged_as_they_are() -> None:
    model, outer = state()
    model(torch.randn(64, 4))
    contribution = outer.local()
    assert torch.allclose(contribution[outer.num_parameters : outer.num_parameters + 3], model[1].running_mean)  # type: ignore[index]
    contribution[outer.num_parameters :] = 2.0
    outer.step(contribution, 1)
    assert torch.equal(model[1].running_var, torch.full((3,), 2.0))  # type: ignore[index]


def test_another_peers_state_is_taken_over_whole() -> None:
    _, donor = state()
    model, outer = state()
    donor.theta += 1.0
    donor.momentum += 2.0
    outer.load(donor.theta, donor.momentum, 4, 3.5)
    assert torch.equal(outer.theta, donor.theta)
    assert torch.equal(outer.momentum, donor.momentum)
    assert (outer.round, outer.age) == (4, 3.5)
    assert torch.equal(torch.cat([p.reshape(-1) for p in model.parameters()]), donor.theta[: donor.num_parameters])


@pytest.mark.parametrize("broken", ["shape", "nan"])
def test_a_state_that_does_not_fit_or_is_not_finite_is_refused_and_changes_nothing(broken: str) -> None:
    _, outer = state()
    before = outer.theta.clone()
    theta = outer.theta[:-1] if broken == "shape" else torch.full_like(outer.theta, math.nan)
    with pytest.raises(ValueError):
        outer.load(theta, outer.momentum, 1, 1.0)
    assert torch.equal(outer.theta, before)


def test_peers_with_the_same_weights_have_the_same_probe() -> None:
    probes = [state()[1].probe() for _ in range(3)]
    assert all(torch.equal(first, second) for first, second in pairwise(probes))


def test_only_rounds_with_the_group_make_a_state_older() -> None:
    _, outer = state()
    outer.step(None, 1)
    outer.step(None, 2, counts=False)
    assert (outer.round, outer.age) == (2, 1.0)

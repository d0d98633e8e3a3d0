"""Updates by `Stepper`, to those of the optimizer's own ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.training.test_precision import alone
from trainkit.config.schema import OptimConfig
from trainkit.training import precision as precision_module
from trainkit.training.fused import Stepper
from trainkit.training.optim import build_optimizer, set_lr
from trainkit.training.precision import Precision

ADAMW, SGD = OptimConfig(name="adamw"), OptimConfig(name="sgd", nesterov=True)
PLAIN = OptimConfig(name="sgd", momentum=0.0)
KERNELS = {"adamw": "torch._fused_adamw_", "sgd": "torch._fused_sgd_"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2).double())


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def trained(config: OptimConfig, make: Callable[[torch.optim.Optimizer], Callable[[], Any]]) -> list[torch.Tensor]:
    """Weights and moments after some updates, with other learning rates and a checkpoint loaded in between."""
    model = network()
    optimizer = build_optimizer(model, config)
    step = make(optimizer)
    for number in range(6):
        set_lr(optimizer, 0.1 / (1 + number))
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        give_gradients(model, number)
        step()
    moments = [value for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()]
    return [*model.parameters(), *filter(torch.is_tensor, moments)]


@pytest.mark.parametrize("config", [ADAMW, SGD, PLAIN])
def test_its_updates_are_those_of_the_optimizer_bit_for_bit(config: OptimConfig) -> None:
    own = trained(config, lambda optimizer: optimizer.step)
    ours = trained(config, lambda optimizer: Stepper(optimizer).step)
    assert len(own) == len(ours)
    assert all(torch.equal(one, other) for one, other in zip(own, ours, strict=True))


def steps_of(optimizer: torch.optim.Optimizer, model: nn.Module, change: Callable[[], object] = lambda: None) -> int:
    """How many of two further updates go through the optimizer's own ``step``."""
    stepper = Stepper(optimizer)
    for number in range(2):
        give_gradients(model, number)
        stepper.step()
    with mock.patch.object(optimizer, "step", side_effect=optimizer.step) as step:
        for number in range(2):
            give_gradients(model, number)
            change()
            stepper.step()
    return step.call_count


@pytest.mark.parametrize("config", [ADAMW, SGD])
def test_a_fused_optimizer_with_a_state_is_not_asked(config: OptimConfig) -> None:
    model = network()
    assert steps_of(build_optimizer(model, config), model) == 0


def test_hooks_a_missing_gradient_and_another_optimizer_are_left_to_the_optimizer() -> None:
    model = network()
    hooked = build_optimizer(model, ADAMW)
    hooked.register_step_post_hook(lambda *_: None)
    assert steps_of(hooked, model) == 2
    plain = torch.optim.AdamW(model.parameters())
    assert steps_of(plain, model) == 2

    def forget() -> None:
        next(model.parameters()).grad = None

    assert steps_of(build_optimizer(model, ADAMW), model, forget) == 2


@pytest.mark.parametrize("config", [ADAMW, SGD, PLAIN])
def test_an_update_that_the_device_says_is_not_finite_leaves_no_trace(
    config: OptimConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module, "is_free_to_ask", lambda device: False)

    def values(bad: tuple[int, ...]) -> list[torch.Tensor]:
        model, precision = network(), Precision("fp32", alone())
        optimizer = build_optimizer(model, config)
        for number in range(4 + len(bad)):
            # The first one too: SGD has no momentum yet, and would keep what happens to be in its memory.
            give_gradients(model, number - sum(number > one for one in bad))
            if number in bad:
                next(model.parameters()).grad = torch.full((8, 4), float("nan"))
            precision.step(optimizer, model.parameters(), None)
        moments = [value for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()]
        return [*model.parameters(), *filter(torch.is_tensor, moments)]

    without, among = values(()), values((0, 3))
    assert len(without) == len(among)
    assert all(torch.equal(one, other) for one, other in zip(without, among, strict=True))

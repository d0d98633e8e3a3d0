from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.models.freezing import freeze


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2))


def mean_of(model: nn.Sequential, norm: int) -> Tensor:
    """Its running mean, as it is now."""
    mean = model[norm].running_mean
    assert isinstance(mean, Tensor)
    return mean.clone()


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_fits_a_pattern_is_not_trained() -> None:
    model = network()
    freeze(model, ["0.*", "3.bias"])
    assert trained(model) == {"1.weight", "1.bias", "3.weight", "4.weight", "4.bias"}


def test_without_patterns_everything_is_trained() -> None:
    model = network()
    freeze(model, [])
    assert trained(model) == set(dict(model.named_parameters()))


def test_a_frozen_norm_keeps_its_statistics_and_the_others_do_not() -> None:
    model = network()
    freeze(model, ["[01].*"])
    model.train()
    first, last = mean_of(model, 1), mean_of(model, 4)
    model(torch.randn(4, 1, 3, 3) + 5)
    assert torch.equal(mean_of(model, 1), first)
    assert not torch.equal(mean_of(model, 4), last)


def test_a_norm_that_is_frozen_in_part_goes_on_counting() -> None:
    model = network()
    freeze(model, ["1.bias"])
    model.train()
    before = mean_of(model, 1)
    model(torch.randn(4, 1, 3, 3) + 5)
    assert not torch.equal(mean_of(model, 1), before)


@pytest.mark.parametrize(
    ("patterns", "what"), [(["conv*"], "no parameter fits 'conv\\*'"), (["*"], "nothing to train")]
)
def test_patterns_that_make_no_sense_are_refused(patterns: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        freeze(network(), patterns)

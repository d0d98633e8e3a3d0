"""Activation checkpointing: less is kept, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.training.activations import checkpoint_activations


def network(which: Any) -> nn.Sequential:
    """Four blocks with dropout and BatchNorm."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5)) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(128, 5))
    checkpoint_activations(model, which)
    return model


def trained(which: Any) -> dict[str, Tensor]:
    """The model's tensors and gradients after three updates."""
    model = network(which)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
    gradients = {f"{name}.grad": value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {**model.state_dict(), **gradients}


@pytest.mark.parametrize("which", ["full", 2])
def test_weights_gradients_and_statistics_are_the_same_to_the_last_bit(which: Any) -> None:
    plain, thrifty = trained("none"), trained(which)
    assert plain.keys() == thrifty.keys(), "names in checkpoints stay those of the plain model"
    assert [name for name, value in plain.items() if not torch.equal(value, thrifty[name])] == []


def kept(which: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    model, storages = network(which), {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor  # alive, or another could come to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(1024, 128))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(item.untyped_storage().nbytes() for place, item in storages.items() if place not in own)


def test_the_more_blocks_it_is_the_less_is_kept() -> None:
    none, half, full = kept("none"), kept(2), kept("full")
    assert half < 0.65 * none
    assert full < 0.4 * none


def test_a_model_without_so_many_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="activation_checkpointing=5 would do nothing") as refused:
        network(5)
    assert refused.value.fix == "Leave it out, or use 4 or less."
    with pytest.raises(UserError, match="full would do nothing"):
        checkpoint_activations(nn.Linear(2, 2), "full")

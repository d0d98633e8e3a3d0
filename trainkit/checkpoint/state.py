"""What is in a checkpoint: full tensors, gathered from however many ranks, and handed out again to however many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainkit.distributed.process_group import Distributed

# Names are those of the plain model's parameters: neither DDP's nor a sharding's trace is left in them.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full weights and optimizer state on rank 0's CPU, empty elsewhere. Every rank must call it.

    Only tensors are kept of the optimizer: learning rates and the like come from the configuration.
    """
    model = _inner(model)
    weights = _copies(get_model_state_dict(model, options=_GATHER))
    moments = _copies(get_optimizer_state_dict(model, optimizer, options=_GATHER))
    return weights, moments


def _inner(model: nn.Module) -> nn.Module:
    """torch leaves the traces of DDP and FSDP out of the names, but not that of DataParallel."""
    return model.module if isinstance(model, nn.DataParallel) else model


def _copies(state: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a state dict, each with memory of its own: safetensors refuses tied ones."""
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def hand_out_model(model: nn.Module, weights: Mapping[str, Tensor], dist: Distributed) -> None:
    """Load rank 0's ``weights`` into the model of every rank; the other ranks pass an empty dict."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.world_size > 1)
    set_model_state_dict(_inner(model), dict(weights), options=options)


def hand_out_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor], dist: Distributed
) -> None:
    """Load rank 0's optimizer state into the optimizer of every rank; the other ranks pass an empty dict."""
    model = _inner(model)
    # Nested, not flattened as it is stored: torch cannot broadcast a flattened optimizer state.
    current = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    nested: dict[str, Any] = {"state": {}, "param_groups": current.get("param_groups", [])}
    for name, value in moments.items():
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        nested["state"].setdefault(parameter, {})[kind] = value
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.world_size > 1)
    set_optimizer_state_dict(model, optimizer, nested if dist.is_main else {}, options=options)

"""A model whose numbers go from rank 0 straight into every rank's shards: it is whole on no GPU and on no other rank.

Until then it is hollow: its tensors are on the meta device, which gives them a shape and no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import Held, Sent, load_where_named
from trainkit.config.schema import Config
from trainkit.data.base import DataInfo
from trainkit.distributed.process_group import Distributed
from trainkit.models import build_model
from trainkit.strategies.base import TakesHollow
from trainkit.training.layout import placed


def build_hollow(config: Config, info: DataInfo) -> nn.Module:
    """The model of `build_model`, hollow. One that cannot be made so, since it looks at its numbers while it is made or
    keeps some that are neither parameters nor buffers, is made whole and emptied.

    Raises UserError as `build_model` does.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are loaded into it torch says that they go nowhere
            model = build_model(config.model, info, config.seed)
        is_whole = any(tensor.is_meta for module in model.modules() for tensor in _loose(vars(module).values()))
    except Exception:  # whatever its code makes of numbers that are not there; what else is wrong is said below
        is_whole = True
    return _emptied(build_model(config.model, info, config.seed) if is_whole else model)


def spread(plain: nn.Module, strategy: TakesHollow, config: Config, dist: Distributed) -> nn.Module:
    """``plain``, made by ``strategy`` from shards, one tensor after the other, of what it is on rank 0.

    Args:
        plain: on rank 0 with its numbers, on the CPU; on the others it may be hollow.
    """
    whole = _tensors(plain) if dist.is_main else {}
    model = strategy.parallelize(placed(_emptied(plain), config, torch.device("meta")))
    _replace(
        model,
        lambda tensor: torch.empty_like(tensor, device=strategy.home),
        lambda buffer: torch.empty_like(buffer, device=dist.device),
    )
    own = _tensors(model)
    assert not dist.is_main or own.keys() == whole.keys()
    load_where_named(own, Sent(Held(whole), dist), dist)
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All of them: also the buffers that are in no checkpoint."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _emptied(model: nn.Module) -> nn.Module:
    def hollow(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta")

    return _replace(model, hollow, hollow)


def _replace(model: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]) -> nn.Module:
    """``model`` with others in the places of its tensors. What was one tensor in two places stays one, which
    `nn.Module.to_empty` does not see to."""
    # The old ones are kept meanwhile, or an id could come twice.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in made:
                    made[id(old)] = old, nn.Parameter(parameter(old.detach()), requires_grad=old.requires_grad)
                module._parameters[name] = made[id(old)][1]  # type: ignore[assignment]
        for name, value in module._buffers.items():
            if value is not None:
                if id(value) not in made:
                    made[id(value)] = value, buffer(value)
                module._buffers[name] = made[id(value)][1]
    return model


def _loose(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _loose(value)

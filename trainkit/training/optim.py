"""The optimizer, and which parameters it treats how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainkit import plugins
from trainkit.checkpoint.state import Held, load_moments, master_of, moments_of
from trainkit.config.optimizers import find_optimizer
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, is_sharded
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters. Biases, the scales of norms, and what the model itself names in
    ``no_weight_decay()`` (timm's: position embeddings, class tokens) are left alone. Build it after the model has been
    parallelized: sharding replaces the parameters.

    AdamW and SGD are torch's, LAMB (You et al., arXiv 1904.00962) and Muon (Jordan, with the scale of Liu et al., arXiv
    2502.16982, so that rates and decay are AdamW's) timm's. Others are as timm and torch make them, or the user's own
    function or class makes them: ``build(groups, lr, *, options)``.

    Raises UserError for one of the user's own that cannot be used.
    """
    groups = _by_decay(model, config) if config.layer_decay == 1 else _by_layer(model, config)
    for group in groups:
        group["params"] = [master_of(parameter) for parameter in group["params"]]
    if not config.is_own:
        return _noted(_of_a_library(groups, config))
    make = plugins.load("trainkit.optim", config.name)
    _try_out(make, config)
    return _noted(make(groups, config.lr, **config.given()))


def _noted(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` with what checkpoints need not hold, because the configuration says it."""
    optimizer.as_built = [{**group, "params": None} for group in optimizer.param_groups]  # type: ignore[attr-defined]
    return optimizer


def _of_a_library(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    given = {"lr": config.lr, **config.given()}
    if config.name == "sgd":
        # torch has no sharded version of that fused kernel.
        sharded = any(is_sharded(parameter) for group in groups for parameter in group["params"])
        return torch.optim.SGD(groups, fused=not sharded, **given)
    if config.name == "adamw":
        # The fused kernel updates all parameters in one pass, on GPU and CPU alike.
        return torch.optim.AdamW(groups, fused=True, **given)
    listed = find_optimizer(config.name)
    if listed.class_name == "Lamb":  # gradients are clipped by train.grad_clip_norm, like any optimizer's
        given["max_grad_norm"] = None
    try:
        if listed.library == "torch":
            optimizer: torch.optim.Optimizer = getattr(torch.optim, listed.name)(groups, **given)
        else:
            from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

            optimizer = create_optimizer_v2(groups, opt=listed.name, weight_decay=config.weight_decay, **given)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optim.name={config.name} cannot be made with these options.",
            why=f"{error}.".replace("..", "."),
            fix="Correct them, or leave them out.",
            key="optim.name",
        ) from error
    return optimizer


def _try_out(make: Callable[..., Any], config: OptimConfig) -> None:
    """Refuse an optimizer of the user's own that needs more than gradients, or cannot go on from a checkpoint.

    It makes two updates of a small model, is saved and restored, and makes a third: that must be the same to the last
    bit.
    """
    dist = Distributed(RankEnv.single(), torch.device("cpu"))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "weight_decay": config.weight_decay}]
        optimizer = make([*groups, {"params": [model.bias], "weight_decay": 0.0}], config.lr, **config.given())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned {type(optimizer).__name__}, which is no torch.optim.Optimizer")
        return model, _noted(optimizer)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    try:
        with torch.random.fork_rng(devices=[]):
            model, optimizer = made()
            update(model, optimizer, 1)
            update(model, optimizer, 2)
            other, resumed = made()
            other.load_state_dict(model.state_dict())
            saved = Held({name: value.clone() for name, value in moments_of(model, optimizer).items()})
            load_moments(other, resumed, saved, dist)
            update(model, optimizer, 3)
            update(other, resumed, 3)
    except Exception as error:
        raise UserError(
            f"optim.name={config.name} cannot make the updates of a small model.",
            why=f"{type(error).__name__}: {error}".rstrip(".") + ".",
            fix="It must take parameter groups and a rate, and make an update by step() alone: no closure is given.",
            key="optim.name",
        ) from error
    if not all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)):
        raise UserError(
            f"optim.name={config.name} cannot go on from a checkpoint.",
            why="What is saved of it, tensors and numbers of its state and groups, does not give the same next update.",
            fix="Keep what it needs in optimizer.state, as tensors or numbers.",
            key="optim.name",
        )


def _by_decay(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    spared = _spared(model)
    decayed: list[nn.Parameter] = []
    left_alone: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (left_alone if parameter.ndim < 2 or name in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": left_alone, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _by_layer(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups with an ``lr_scale`` each, which is lower for layers nearer to the image (Clark et al., arXiv 2003.10555).

    Raises UserError for a model that does not say, as timm's do, which parameters are a layer.
    """
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]

    inner = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    if not hasattr(inner, "group_matcher"):
        raise UserError(
            f"optim.layer_decay={config.layer_decay:g} needs to know the model's layers.",
            why=f"{type(inner).__name__} has no group_matcher(), which timm's models have.",
            fix="Use a model of timm, or optim.layer_decay=1.",
            key="optim.layer_decay",
        )
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        inner, config.weight_decay, no_weight_decay_list=_spared(inner), layer_decay=config.layer_decay
    )
    return [{key: group[key] for key in ("params", "weight_decay", "lr_scale")} for group in groups]


def _spared(model: nn.Module) -> set[str]:
    """Names of parameters that a module says must not decay, wherever in the model it is: below a wrapper, or a
    backbone below a head of the user's own."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update; in groups of layers that learn slower, their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)

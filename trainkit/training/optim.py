"""The optimizer, and which parameters it treats how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.state import master_of
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import is_sharded
from trainkit.errors import UserError


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters. Biases, the scales of norms, and what the model itself names in
    ``no_weight_decay()`` (timm's: position embeddings, class tokens) are left alone. Build it after the model has been
    parallelized: sharding replaces the parameters.

    AdamW and SGD are torch's, LAMB (You et al., arXiv 1904.00962) and Muon (Jordan, with the scale of Liu et al., arXiv
    2502.16982, so that rates and decay are AdamW's) timm's.
    """
    groups = _by_decay(model, config) if config.layer_decay == 1 else _by_layer(model, config)
    for group in groups:
        group["params"] = [master_of(parameter) for parameter in group["params"]]
    if config.name == "sgd":
        # torch has no sharded version of that fused kernel.
        fused = not any(is_sharded(parameter) for parameter in model.parameters())
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    if config.name == "adamw":
        # The fused kernel updates all parameters in one pass, on GPU and CPU alike.
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    from timm.optim import Lamb, Muon  # type: ignore[attr-defined]

    optimizer: torch.optim.Optimizer
    if config.name == "lamb":
        # Gradients are clipped by train.grad_clip_norm, like any optimizer's.
        optimizer = Lamb(groups, lr=config.lr, betas=config.betas, max_grad_norm=None)
    else:
        optimizer = Muon(groups, lr=config.lr, betas=config.betas, momentum=config.momentum, nesterov=config.nesterov)
    return optimizer


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
        inner,
        weight_decay=config.weight_decay,
        no_weight_decay_list=_spared(inner),
        layer_decay=config.layer_decay,
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

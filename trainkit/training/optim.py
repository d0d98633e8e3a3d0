"""The optimizer."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters. Biases, the scales of norms, and what the model itself names in
    ``no_weight_decay()`` (timm's: position embeddings, class tokens) are left alone. Build it after the model has been
    parallelized: sharding replaces the parameters.
    """
    spared = _spared(model)
    decayed: list[nn.Parameter] = []
    left_alone: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (left_alone if parameter.ndim < 2 or name in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": left_alone, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        # torch has no sharded version of that fused kernel.
        fused = not any(hasattr(parameter, "to_local") for parameter in model.parameters())
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    # The fused kernel updates all parameters in one pass, on GPU and CPU alike.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


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
    """Use ``lr`` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr

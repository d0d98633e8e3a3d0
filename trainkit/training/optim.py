"""The optimizer."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters; biases and the scales of norms are left alone. Build it after the model
    has been parallelized: sharding replaces the parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        # Not fused: torch has no sharded version of that kernel.
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    # The fused kernel updates all parameters in one pass, on GPU and CPU alike.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr

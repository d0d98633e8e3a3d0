"""A small training, and what a rank of it holds."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config import plugins
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.distributed.strategies.base import SharesOptimizer
from trainkit.training.optim import build_optimizer


class SmallViT(nn.Module):
    """Parameters of all shapes that a vision transformer has; those of [1, N, D] are 2 % of it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 64, 64))
        layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        scores: Tensor = self.head(self.blocks(tokens).mean(1))
        return scores


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count bytes of parameters, gradients and optimizer state on this rank."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = (value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor))
    held = (local_part(item) for item in chain(parameters, gradients, state))
    return sum(item.numel() * item.element_size() for item in held)


def trained(
    dist: Distributed, strategy: str, *, optimizer_name: Any = "adamw", updates: int = 1, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model after some updates, with the gradients of the last one."""
    torch.manual_seed(0)
    chosen = plugins.load("trainkit.distributed.strategies", strategy)(dist, **options)
    model = chosen.parallelize(SmallViT())
    optimizer = build_optimizer(model, OptimConfig(name=optimizer_name))
    if isinstance(chosen, SharesOptimizer):
        chosen.share(optimizer)
    for _ in range(updates):
        optimizer.zero_grad()
        with chosen.grad_sync(model, enabled=True):
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    return model, optimizer


class Drag(torch.optim.Optimizer):
    """A user's own: momentum, with a count of each weight and a number of each group that are saved with it."""

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.0, drag: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "drag": drag})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["drag"] *= 0.75
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("kept", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                    parameter.add_(state["kept"], alpha=-group["lr"] * group["drag"] / state["count"])

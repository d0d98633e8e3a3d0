"""DiLoCo (arXiv 2311.08105): every peer trains on its own for a round, then the peers agree on what was learned.

A peer's *pseudo-gradient* is how far its weights have moved in a round, against their direction. The peers average
theirs, weighted by samples, and each makes the same step of SGD with Nesterov momentum from the weights that they had
in common.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

# Weights that peers compare in each round, to see whether they still train the same model.
PROBE_SIZE = 256


class OuterState:
    """What the peers have in common: weights ``theta``, their momentum, and the number of the next round.

    Flat float32 vectors on the CPU. BatchNorm's running statistics, if any, lie behind the parameters in ``theta``;
    they are averaged as they are.
    """

    def __init__(self, model: nn.Module, *, lr: float, momentum: float) -> None:
        self.model = model
        self.params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.num_parameters = sum(parameter.numel() for parameter in self.params)
        self.lr, self.mu = lr, momentum
        self.lock = threading.Lock()  # hivemind reads the state from a thread of its own
        self.theta = _flatten(self._tensors())
        self.momentum = torch.zeros(self.num_parameters)
        self.round = 0
        self.age = 0.0
        """Rounds that this state has behind it with the group; of two that have drifted apart the older one counts."""
        generator = torch.Generator().manual_seed(self.num_parameters)
        self.version = 0
        """Grows whenever the model is given the common weights: other copies of it are then out of date."""
        self._probe = torch.randint(self.num_parameters, (PROBE_SIZE,), generator=generator)

    def local(self) -> Tensor:
        """This peer's contribution: pseudo-gradient, then buffers, in one vector."""
        contribution = _flatten(self._tensors())
        size = self.num_parameters
        contribution[:size] = self.theta[:size] - contribution[:size]
        return contribution

    def probe(self) -> Tensor:
        """Some of the weights, the same ones on every peer."""
        return self.theta[self._probe].clone()

    def step(self, contribution: Tensor | None, next_round: int, *, counts: bool = True) -> None:
        """The outer update; None leaves the weights that the peers had in common. The model starts from them.

        ``counts``: the round adds to the state's age.
        """
        size = self.num_parameters
        with self.lock:
            if contribution is not None:
                gradient = contribution[:size]
                self.momentum.mul_(self.mu).add_(gradient)
                self.theta[:size] -= self.lr * (gradient + self.mu * self.momentum)
                self.theta[size:] = contribution[size:]
            self.round = next_round
            self.age += counts
        self.into_model()

    @torch.no_grad()
    def into_model(self) -> None:
        """Copy the common weights into the model."""
        position = 0
        for tensor in self._tensors():
            part = self.theta[position : position + tensor.numel()]
            tensor.copy_(part.view_as(tensor))
            position += tensor.numel()
        self.version += 1

    def _tensors(self) -> list[Tensor]:
        # Asked anew each time: moving a model to a GPU keeps its parameters and replaces its buffers.
        return [*self.params, *(buffer for buffer in self.model.buffers() if buffer.is_floating_point())]

    def load(self, theta: Tensor, momentum: Tensor, round_index: int, age: float) -> None:
        """Go on from another peer's state, or from a checkpoint.

        Raises ValueError when it does not fit or is not finite.
        """
        if theta.shape != self.theta.shape or momentum.shape != self.momentum.shape:
            raise ValueError(f"it has {theta.numel()} weights instead of {self.theta.numel()}")
        if not (torch.isfinite(theta).all() and torch.isfinite(momentum).all()):
            raise ValueError("it is not finite")
        with self.lock:
            self.theta.copy_(theta)
            self.momentum.copy_(momentum)
            self.round, self.age = round_index, age
        self.into_model()


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors]).cpu()

"""DiLoCo (arXiv 2311.08105): every peer trains on its own for a round, then the peers agree on what was learned.

A peer's *pseudo-gradient* is how far its weights have moved in a round, against their direction. The peers average
theirs, weighted by samples, and each makes the same step of SGD with Nesterov momentum from the weights that they had
in common.

Two things may be late, and neither stops anybody (compare the overlapped and the partial exchanges of Streaming DiLoCo,
arXiv 2501.18512, and eager updates, arXiv 2502.12996):

- The average of a round may arrive while the next round is being trained. The common weights then step as they would
  have, from the same numbers on every peer; and the model, which has moved on from where the round ended, is moved by
  the difference: its own contribution is taken back, the common step is added, what it has learned since stays.
- A contribution may be left out, whole or in parts: for want of a group, of time, or of bandwidth. The model follows
  the common step and keeps what it has learned besides, so that this becomes part of a later contribution. After k
  rounds that is a sum of k moves, each made close to the common weights of its time, because the model has followed
  them; it enters as their mean, with the samples of all k rounds as its weight, and so is no longer than others'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainkit.collaborative.common import CommonState, Given, flatten, unflattened
from trainkit.collaborative.parts import cuts, num_parts

# A contribution weighs as much as so many rounds at most: reducers do not believe everything.
_MOST_ROUNDS = 4


class OuterState(CommonState):
    """The common weights, and the momentum by which they move."""

    def __init__(self, model: nn.Module, *, lr: float, momentum: float) -> None:
        super().__init__(model)
        self.lr, self.mu = lr, momentum
        # Of each part: samples and rounds of this peer that are in no average yet.
        self._samples = [0.0] * num_parts(self.theta.numel())
        self._rounds = [0] * len(self._samples)

    def give(self, samples: int) -> Given:
        """This peer's contribution to the round that ends now, in which it has trained on ``samples``."""
        local, size = flatten(self._tensors()), self.num_parameters
        moved = self.theta[:size] - local[:size]
        finite = bool(torch.isfinite(local).all())
        if samples and finite:
            self._samples = [held + samples for held in self._samples]
            self._rounds = [rounds + 1 for rounds in self._rounds]
        if not finite:
            return self.nothing()
        vector = local
        vector[:size] = moved
        for part, rounds in zip(cuts(size), self._rounds, strict=False):
            vector[part] /= max(1, rounds)
        weights = tuple(
            held * min(1.0, _MOST_ROUNDS / max(1, rounds))
            for held, rounds in zip(self._samples, self._rounds, strict=True)
        )
        return Given(vector, weights, moved, sound=True)

    def step(
        self,
        average: Tensor,
        next_round: int,
        given: Given,
        *,
        arrived: Sequence[bool],
        counted: Sequence[bool],
        trained_on: bool = False,
    ) -> None:
        """The outer update, and the model goes on from it.

        Args:
            average: of what the peers gave.
            given: what this peer gave.
            arrived: parts of the average that are there; of the others the common weights stay as they are.
            counted: parts of ``given`` that are in an average; the others stay in the model, for a later round.
            trained_on: the model has been trained since it gave.
        """
        size, before = self.num_parameters, self.theta.clone()
        with self.lock:
            for part, is_there in zip(cuts(self.theta.numel()), arrived, strict=True):
                if is_there:
                    self._step_part(average, slice(part.start, min(part.stop, size)))
                    buffers = slice(max(part.start, size), part.stop)
                    self.theta[buffers] = average[buffers]
            self.round = next_round
        taken = given.moved.clone()
        for number, (part, is_in) in enumerate(zip(cuts(size), counted, strict=False)):
            if not is_in:
                taken[part] = 0.0
            else:
                self._samples[number], self._rounds[number] = 0.0, 0
        if not given.sound:
            self.forget()
        elif trained_on:
            self._move(self.theta[:size] - before[:size] + taken)
        else:
            self.into_model()
            if not all(counted):
                self._move(taken - given.moved)

    def _step_part(self, average: Tensor, part: slice) -> None:
        gradient, momentum = average[part], self.momentum[part]
        momentum.mul_(self.mu).add_(gradient)
        self.theta[part] -= self.lr * (gradient + self.mu * momentum)

    @torch.no_grad()
    def _move(self, way: Tensor) -> None:
        """Move the model's parameters; its running statistics follow by themselves."""
        for tensor, part in unflattened(way, self.params):
            tensor.add_(part.to(tensor.device, tensor.dtype))
        self.version += 1

    def forget(self) -> None:
        """Drop what is in no average yet: the model is as the peers have it in common."""
        self._samples, self._rounds = [0.0] * len(self._samples), [0] * len(self._samples)
        self.into_model()

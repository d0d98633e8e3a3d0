"""The owner's trial of an average on validation data, before it is used."""

import math
import time
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import Subset

from trainkit.data.base import EvalBatch, Samples
from trainkit.data.loader import Loading, eval_batches
from trainkit.data.tensors import TensorSamples
from trainkit.swarm.identity.admission import remember
from trainkit.swarm.protocol.outer_step import Average, OuterState
from trainkit.training.train_state import TrainState

_MOST_SAMPLES = 512
_TRIAL_SHARE = 0.01
"""Share of a round, for one pass over the samples; there is one in a round, and a second one where an average is
refused.
"""
_TRIAL_BATCH = 64
# How many standard errors of the mean an average is worse by: than the model as it is, and than by the owner's part.
_WORSE = 4.0
_WORSE_THAN_OWN = 3.0
# Of the highest loss so far: towards the end losses are nearly zero, and small changes of them say nothing.
_LEAST = 0.005
_LARGEST_LOSS = 100.0  # of a sample; so is what is not finite


class AverageTrial:
    """Tries averages on samples that are drawn once.

    Args:
        state: the model for this rank alone.
        seconds: of a round.
    """

    def __init__(self, state: TrainState, common: OuterState, seconds: float) -> None:
        self._state = state
        self._common = common
        self._seconds = seconds
        self._batches: list[EvalBatch] = []
        self._known: dict[tuple[float, float], Tensor] = {}
        self._highest = 0.0

    def harm(self, average: Average, own: Average) -> str:
        """Why the model would be worse by ``average``; empty if it would not.

        Args:
            own: the owner's contribution alone.
        """
        now = self._losses(self._common.theta)
        then = self._losses(self._common.stepped(average))
        before = float(now.mean())
        after = float(then.mean())
        self._highest = max(self._highest, before)
        is_worse = after > before + _LEAST * self._highest and worse(then, now, _WORSE)
        if not (is_worse and worse(then, self._losses(self._common.stepped(own)), _WORSE_THAN_OWN)):
            return ""
        return f"by it the loss of {len(now)} validation samples goes from {before:.3g} to {after:.3g}"

    def _losses(self, theta: Tensor) -> Tensor:
        """Return the loss of each sample with the weights ``theta``; those of the last few are known."""
        key = float(theta.sum()), float(theta.norm())
        if key not in self._known:
            model = self._state.model
            was_training = model.training
            model.eval()
            try:
                with self._common.in_model(theta), torch.no_grad():
                    self._batches = self._batches or self._drawn()
                    losses = self._evaluated(self._batches)
            finally:
                model.train(was_training)
            remember(self._known, key, losses, most=4)
        return self._known[key]

    def _evaluated(self, batches: list[EvalBatch]) -> Tensor:
        state = self._state
        losses = list[Tensor]()
        for images, labels, mask in batches:
            with state.precision.autocast():
                output = state.model(state.normalized(images))
            losses.append(state.task.loss(output.float(), labels, "none")[mask])
        return torch.cat(losses).double().cpu().nan_to_num(nan=_LARGEST_LOSS).clamp_max(_LARGEST_LOSS)

    def _drawn(self) -> list[EvalBatch]:
        """Return as many of the samples as can be evaluated in time."""
        state = self._state
        val = self._state.splits.val
        order = torch.randperm(len(val), generator=torch.Generator().manual_seed(state.config.seed))[:_MOST_SAMPLES]
        some: Samples = Subset(val, order.tolist())  # type: ignore[arg-type]
        if isinstance(val, TensorSamples):
            some = TensorSamples(val.images[order], val.labels[order])
        loading = Loading(workers=state.workers, device=state.dist.device, broken=state.broken)
        size = min(_TRIAL_BATCH, len(order))
        with eval_batches(some, state.splits.eval_transform, loading, batch_size=size) as batches:
            first = next(batches)
            for _ in range(2):  # the first time kernels and caches are made, too
                began = time.perf_counter()
                self._evaluated([first])
                took = time.perf_counter() - began
            return [first, *islice(batches, max(0, int(_TRIAL_SHARE * self._seconds / took) - 1))]


def worse(one: Tensor, other: Tensor, errors: float) -> bool:
    """Return whether the losses ``one`` of samples are higher than the ``other`` of the same by more than so many
    standard errors of the mean.
    """
    more = one - other
    return bool(more.mean() > errors * more.std(correction=0) / math.sqrt(len(more)))

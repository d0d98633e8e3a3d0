"""One optimizer update: the same for every loop, strategy and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainkit.data.augment import Augment
from trainkit.data.base import Batch
from trainkit.data.order import derive_seed
from trainkit.distributed.device import seed_random
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.tasks.base import training_losses
from trainkit.tasks.meter import Meter
from trainkit.training.optim import set_lr
from trainkit.training.parts import Parts
from trainkit.training.precision import Stepped
from trainkit.training.timing import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER, Clock


class Update(NamedTuple):
    """One update that was made, or came to nothing."""

    loss: Tensor
    """Of this rank's samples, on the device."""
    stepped: Stepped


class Updater:
    """Makes updates of one model.

    ``meter`` has the loss and the task's sums of all since it was last read. The loss is that of all samples alike,
    also where some count for more: so it compares with that of validation. ``clock`` is told what time is spent on.
    """

    def __init__(self, parts: Parts, *, beat: Callable[[], None] = lambda: None, clock: Clock | None = None) -> None:
        self.meter = Meter(parts.task, parts.dist)
        self._parts, self._beat, self._clock = parts, beat, clock or Clock()
        self._augment = Augment(parts.config.augment, parts.splits.info, parts.normalized)
        self._parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]

    def __call__(self, batches: Iterator[Batch], *, lr: float, seed: int) -> Update:
        """Train on one global batch.

        Args:
            batches: gives ``grad_accum_steps`` micro batches, on the device.
            seed: of dropout and the like, which is keyed by the micro batch's place among all of the update: so the
                same micro batch draws the same numbers, whichever rank it falls to.
        """
        p, train = self._parts, self._parts.config.train
        device, passes, clock = p.dist.device, p.grad_accum_steps, self._clock
        total: Tensor | None = None
        mean_weight: Tensor | None = None
        self._beat()
        set_lr(p.optimizer, lr)
        for micro_step in range(passes):
            is_last = micro_step == passes - 1  # gradients are exchanged once per update
            clock.wait()
            batch = next(batches)
            clock.to(COPY)
            self._beat()
            seed_random(derive_seed(seed, micro_step * p.dist.world_size + p.dist.rank), device)
            images, target = self._augment(batch)
            clock.to(FORWARD)
            with p.strategy.grad_sync(p.model, enabled=is_last):
                with p.precision.autocast():
                    output = p.model(images)
                    losses = training_losses(p.task, output.float(), target)
                if losses.weight is not None:
                    mean = losses.weight / passes
                    mean_weight = mean if mean_weight is None else mean_weight + mean
                share = losses.weighted / passes if passes > 1 else losses.weighted
                clock.to(BACKWARD)
                if is_last and p.dist.world_size > 1:
                    clock.watch_backward(share)
                p.precision.backward(share)
            clock.to(OTHER)
            self.meter.add(losses.plain, output, target.labels)
            total = share.detach() if total is None else total + share.detach()
        assert total is not None
        clock.to(OPTIMIZER)
        if mean_weight is not None:
            divide_by_mean(mean_weight, self._parameters, p.dist)
            total = total / mean_weight
        stepped = p.precision.step(p.optimizer, self._parameters, train.grad_clip_norm)
        clock.to(OTHER)
        clock.step()
        self._beat()
        return Update(total, stepped)


def divide_by_mean(mean: Tensor, parameters: Iterable[nn.Parameter], dist: Distributed) -> None:
    """Make the gradients of a mean of weighted losses those of their weighted mean.

    The mean weight is known only when all of a global batch has been seen, by all ranks together. Dividing the
    gradients by it then, instead of each part by its own, gives the same on any number of ranks and micro batches.

    Args:
        mean: of the weights of this rank's samples, on the device; changed.
    """
    if dist.world_size > 1:
        torch.distributed.all_reduce(mean)  # equally many samples a rank
        mean /= dist.world_size
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_([local_part(gradient) for gradient in gradients], mean)

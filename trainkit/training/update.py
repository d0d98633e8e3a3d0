"""One optimizer update: the same for every loop, strategy and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import plain_name
from trainkit.data.augment import Augment
from trainkit.data.base import Batch
from trainkit.data.order import derive_seed, global_batch
from trainkit.distributed.device import is_free_to_ask, seed_random
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.errors import RunFailedError
from trainkit.monitor.loggers import setback_line
from trainkit.tasks.base import training_losses
from trainkit.tasks.meter import Meter
from trainkit.training.build import TrainState
from trainkit.training.optim import set_lr
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

    def __init__(
        self, parts: TrainState, *, beat: Callable[[], None] = lambda: None, clock: Clock | None = None
    ) -> None:
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


# Updates whose gradients were infinite or not a number: noticed, written down, and not for ever.

# So many in a row, and the run has diverged: by then no batch of bad luck explains it.
_DIVERGED = 3
# So many in a row are for ever: fp16 has halved its scale 50 times, and `skip` would train nothing more.
_FOR_EVER = 50
# On a GPU the answers are fetched together; at the latest after so many updates.
_MOST_PENDING = 100

Remark = Callable[..., None]
"""Writes an event: ``remark(kind, **facts)``."""


class DivergedError(Exception):
    """Too many updates in a row came to nothing."""

    def __init__(self, count: int, position: int, loss: float | str, norm: float | str | None) -> None:
        super().__init__(count, position)
        self.count, self.position, self.loss, self.norm = count, position, loss, norm

    def for_user(self) -> RunFailedError:
        """What ends the run."""
        norm = "" if self.norm is None else f", the gradients' norm {self.norm}"
        return RunFailedError(
            f"Training has diverged: {self.count} updates in a row were not finite.",
            why=f"The loss of the last one is {self.loss}{norm}. The weights are those before them.",
            fix="Lower optim.lr, or set train.grad_clip_norm; events.jsonl (nonfinite) names the samples. "
            "train.on_nonfinite=rollback goes on with other data.",
        )


class NonFinite:
    """Looks after the updates of one run.

    Args:
        seed: of the order of the data.
        in_a_row: how many updates before the first one were not finite.
    """

    def __init__(self, parts: TrainState, remark: Remark, *, seed: int, in_a_row: int = 0) -> None:
        self._parts, self._remark, self._seed = parts, remark, seed
        self._pending: list[tuple[int, int, Update]] = []
        self.in_a_row = in_a_row
        self._fp16 = parts.precision.scales_loss  # it has asked the device already
        self._at_once = self._fp16 or is_free_to_ask(parts.dist.device)
        self._most = _FOR_EVER if self._fp16 or parts.config.train.on_nonfinite == "skip" else _DIVERGED

    def add(self, position: int, step: int, update: Update) -> None:
        """Take note of an update, the ``step``-th, on the global batch at ``position``.

        Raises DivergedError as `look` does.
        """
        if self._at_once and not update.stepped.nonfinite.item():  # as nearly all are, and nothing is pending
            self.in_a_row = 0
            return
        self._pending.append((position, step, update))
        if self._at_once or len(self._pending) >= _MOST_PENDING:
            self.look()

    def look(self) -> None:
        """Ask the device which of the updates since the last look were not finite. Every rank calls it alike.

        Raises DivergedError when there were too many in a row.
        """
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            flags = [pending[0][2].stepped.nonfinite.item()]
        else:
            flags = torch.stack([update.stepped.nonfinite for _, _, update in pending]).tolist() if pending else []
        for flag, (position, step, update) in zip(flags, pending, strict=True):
            if not flag:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            for_ever = self.in_a_row >= self._most
            if update.stepped.skip is not None:
                scales = update.stepped.skip
                name = plain_name(self._trained()[scales.parameter]).removeprefix("module.")
                self._say("skipped", step=step, scale_before=scales.before, scale_after=scales.after, parameter=name)
            if update.stepped.skip is None or for_ever:
                loss, norm = self._facts(update)
                samples = global_batch(
                    len(self._parts.splits.train), self._seed, position, self._parts.config.train.global_batch_size
                )
                self._say("nonfinite", step=step, loss=loss, grad_norm=norm, samples=samples)
                if for_ever:
                    raise DivergedError(self.in_a_row, position, loss, norm)

    def _say(self, kind: str, **facts: Any) -> None:
        """As an event, and as a line of rank 0's log."""
        self._remark(kind, **facts)
        if self._parts.dist.is_main:
            print(setback_line({"event": kind, **facts}), flush=True)

    def _trained(self) -> list[str]:
        return [name for name, parameter in self._parts.model.named_parameters() if parameter.requires_grad]

    def _facts(self, update: Update) -> tuple[float | str, float | str | None]:
        dist, norm = self._parts.dist, update.stepped.norm
        loss = dist.all_reduce_sum(update.loss.double()) / dist.world_size
        return _word(loss.item()), None if norm is None else _word(norm.item())


def _word(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    return value if abs(value) < float("inf") else str(value)

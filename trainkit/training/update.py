"""One optimizer update, the same for every loop, strategy and precision; and those that come to nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.checkpoint.state import plain_name
from trainkit.common import terminal
from trainkit.common.errors import RunFailedError
from trainkit.data.base import Batch
from trainkit.data.batch_augment import Augment
from trainkit.data.order import derive_seed, global_batch
from trainkit.distributed.device import as_float64, is_free_to_ask, seed_random
from trainkit.distributed.process_group import local_part
from trainkit.distributed.strategies.base import SharesBuffers
from trainkit.distributed.watchdog import Pace
from trainkit.monitor.log_tail import setback_line
from trainkit.training.clock import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER, Clock
from trainkit.training.optim import set_lr
from trainkit.training.precision import Stepped
from trainkit.training.tasks.base import training_losses
from trainkit.training.tasks.meter import Meter
from trainkit.training.train_state import TrainState

_DIVERGED = 3
"""Updates in a row that were not finite, and the run has diverged: by then no batch of bad luck explains it."""
_FOR_EVER = 50
"""The same where they may be skipped: fp16 has halved its scale 50 times, and `skip` would train nothing more."""
_MOST_PENDING = 100
"""On a GPU the answers are fetched together, at the latest after this many updates."""


class Update(NamedTuple):
    """One update that was made, or came to nothing."""

    loss: Tensor
    """Loss of this rank's samples, on the device."""
    stepped: Stepped


class Updater:
    """Makes updates of one model.

    ``meter`` has the loss and the task's sums of all since it was last read. The loss is that of all samples alike,
    also where some count for more: so it compares with that of validation. ``clock`` is told what time is spent on.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        beat: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.meter = Meter(state.task, state.dist)
        self._state = state
        self._beat = beat
        self._clock = clock or Clock()
        self._pace = pace or Pace(None, 0.0)
        self._teacher = state.teacher
        self._augment = Augment(state.config.augment, state.splits.info, state.normalized)
        self._share_buffers: Callable[[], Mapping[int, Tensor]] = dict
        if isinstance(state.strategy, SharesBuffers):
            self._share_buffers = state.strategy.share_buffers(state.model)
        self.buffers: Mapping[int, Tensor] = {}
        """Copies of the model's buffers after the last update, by their addresses, where the ranks exchange them."""
        self._parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]

    def __call__(
        self, batches: Iterator[Batch], *, lr: float, seed: int, size: int | None = None, is_told: bool = False
    ) -> Update:
        """Train on one global batch.

        Args:
            batches: gives ``grad_accum_steps`` micro batches, on the device.
            seed: of dropout and the like, which is keyed by the micro batch's place among all of the update: so the
                same micro batch draws the same numbers, whichever rank it falls to.
            size: side of the images in pixels, if they are to be resized.
            is_told: a record follows: the ranks sum up what it says before the weights change.
        """
        state = self._state
        clock = self._clock
        dist = state.dist
        passes = state.grad_accum_steps
        shares: list[Tensor] = []
        weights: list[Tensor] = []
        self._beat()
        set_lr(state.optimizer, lr)
        for micro_step in range(passes):
            is_last = micro_step == passes - 1  # gradients are exchanged once per update
            clock.wait()
            if micro_step:
                self._pace.leave()
            batch = next(batches)
            self._pace.enter()
            clock.to(COPY)
            self._beat()
            seed_random(derive_seed(seed, micro_step * dist.world_size + dist.rank), dist.device)
            images, target = self._augment(batch, size)
            clock.to(FORWARD)
            with state.strategy.grad_sync(state.model, enabled=is_last):
                with state.precision.autocast():
                    output = state.model(images)
                    losses = training_losses(state.task, output.float(), target)
                    if self._teacher is not None:
                        losses = self._teacher.taught(losses, images, output.float())
                if losses.weight is not None:
                    weights.append(losses.weight / passes)
                share = losses.weighted
                if passes > 1:
                    share = share / passes
                clock.to(BACKWARD)
                if is_last and dist.world_size > 1:
                    clock.watch_backward(share)
                state.precision.backward(share)
            clock.to(OTHER)
            self.meter.add(losses.plain, output, target.labels)
            shares.append(share.detach())
        clock.to(OPTIMIZER)
        total = sum(shares[1:], shares[0])  # of one micro batch: no kernel
        if weights:
            mean_weight = sum(weights[1:], weights[0])
            # The mean weight is known only when all ranks have seen their part of the global batch. Dividing the
            # gradients by it then gives the same on any number of ranks and micro batches.
            if dist.world_size > 1:
                torch.distributed.all_reduce(mean_weight)  # equally many samples a rank
                mean_weight /= dist.world_size
            for parameter in self._parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).div_(mean_weight)
            total = total / mean_weight
        self.buffers = self._share_buffers()
        if is_told and state.survivor.is_armed:
            self.meter.exchange(tell=clock.own())
        changes = state.survivor.changes
        stepped = state.precision.step(state.optimizer, self._parameters, state.config.train.grad_clip_norm, changes)
        self._pace.leave()
        clock.to(OTHER)
        clock.step()
        self._beat()
        return Update(total, stepped)


class DivergedError(RunFailedError):
    """Too many updates in a row came to nothing."""

    position = 0
    """The global batch of the last one."""


class NonFinite:
    """Counts the updates in a row whose gradients were infinite or not a number.

    Args:
        remark: writes an event: ``remark(kind, **facts)``.
        seed: of the order of the data.
        in_a_row: how many updates before the first one were not finite.
    """

    def __init__(self, state: TrainState, remark: Callable[..., None], *, seed: int, in_a_row: int = 0) -> None:
        self._state = state
        self._remark = remark
        self._seed = seed
        self._pending: list[tuple[int, int, Update]] = []
        self.in_a_row = in_a_row
        fp16 = state.precision.scales_loss  # it has asked the device already
        self._at_once = fp16 or is_free_to_ask(state.dist.device)
        self._most = _DIVERGED
        if fp16 or state.config.train.on_nonfinite == "skip":
            self._most = _FOR_EVER

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
        pending = self._pending
        self._pending = []
        if not pending:
            return
        flags = torch.stack([update.stepped.nonfinite for _, _, update in pending]).tolist()
        for flag, (position, step, update) in zip(flags, pending, strict=True):
            if not flag:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self._tell(position, step, update)

    def _tell(self, position: int, step: int, update: Update) -> None:
        """Write an update that came to nothing as events, and as lines of rank 0's log."""
        state = self._state
        for_ever = self.in_a_row >= self._most
        scales = update.stepped.skip
        if scales is not None:
            trained = [name for name, parameter in state.model.named_parameters() if parameter.requires_grad]
            name = plain_name(trained[scales.parameter]).removeprefix("module.")
            self._note("skipped", step=step, scale_before=scales.before, scale_after=scales.after, parameter=name)
            if not for_ever:
                return
        loss = _as_json(state.dist.all_reduce_sum(as_float64(update.loss)) / state.dist.world_size)
        norm = None
        words = ""
        if update.stepped.norm is not None:
            norm = _as_json(update.stepped.norm)
            words = f", the gradients' norm {norm}"
        config = state.config
        size = config.train.global_batch_size
        samples = global_batch(state.splits.train, self._seed, position, size, config.augment.repeats)
        self._note("nonfinite", step=step, loss=loss, grad_norm=norm, samples=samples)
        if for_ever:
            error = DivergedError(
                f"Training has diverged: {self.in_a_row} updates in a row were not finite.",
                why=f"The loss of the last one is {loss}{words}. The weights are those from before these updates.",
                fix="Lower optim.lr, or set train.grad_clip_norm; events.jsonl (nonfinite) names the samples. "
                "train.on_nonfinite=rollback goes on with other data.",
            )
            error.position = position
            raise error

    def _note(self, kind: str, **facts: Any) -> None:
        self._remark(kind, **facts)
        if self._state.dist.is_main:
            terminal.say(setback_line({"event": kind, **facts}) or kind)


def _as_json(number: Tensor) -> float | str:
    """JSON has no word for what is not finite."""
    value = number.item()
    return value if abs(value) < float("inf") else str(value)

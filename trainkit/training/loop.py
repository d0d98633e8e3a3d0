"""The loop: one for every strategy, precision and data set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.data.loader import train_batches
from trainkit.data.order import derive_seed
from trainkit.distributed.process_group import StopVote
from trainkit.distributed.watchdog import Place, watchdog
from trainkit.run.events import Attempt
from trainkit.training.build import TrainState
from trainkit.training.recorder import Progress, Recorder
from trainkit.training.timing import END, OPTIMIZER, OTHER, Lap, Stragglers, mfu
from trainkit.training.update import DivergedError, NonFinite, Updater


def train(parts: TrainState, keeper: Recorder, stop_requested: Callable[[], bool]) -> bool:
    """Train from ``keeper.progress`` to the end. True when done; False when stopped, saved, and to be continued.

    Data, augmentation and dropout are functions of (seed, position in the data), learning rates of the step: so a run
    that was interrupted anywhere and resumed does the very updates of one that was not.

    Args:
        stop_requested: has this rank been told to stop? The ranks agree before anybody does.

    Raises:
        RunFailedError: it has diverged (`train.on_nonfinite`), the summary says so; or a checkpoint cannot be written.
        UserError: more images are broken than ``data.max_broken``.
    """
    vote = StopVote(parts.dist)

    def should_stop() -> bool:
        stop = vote.poll(
            stop_requested(),
            save=keeper.minutes_are_over(),
            news=bool(parts.broken.met),
            over=keeper.checkpoints.over(),
        )
        if vote.news:
            keeper.tell_broken()
        keeper.checkpoints.go_on(vote.over)
        return stop

    try:
        # A stop request fell into the validation of this step: it is still owed.
        owed = keeper.progress.step > keeper.progress.validated_step and keeper.validation_is_due()
        if owed and not _validate(parts, keeper, should_stop):
            return _stop(keeper)
        while not keeper.is_over():
            try:
                if not _walk(parts, keeper, should_stop, lambda: vote.save):
                    return False
            except DivergedError as error:
                _diverged(parts, keeper, error)
        keeper.clock.to(END)
        return True
    finally:
        vote.finish()


def _walk(
    parts: TrainState, keeper: Recorder, should_stop: Callable[[], bool], minutes_are_over: Callable[[], bool]
) -> bool:
    """Train on as much data as is needed if no update is skipped. False when stopped and saved."""
    config, dist, progress, clock = parts.config, parts.dist, keeper.progress, keeper.clock
    profiler = keeper.profiler
    update = Updater(parts, beat=keeper.beat, clock=clock)
    stragglers = Stragglers(keeper.hosts if dist.is_main else ())
    nonfinite = NonFinite(parts, keeper.remark, seed=config.seed, in_a_row=progress.nonfinite)
    end = progress.position + parts.total_steps - progress.step
    update.meter.go_on(progress.window)
    is_warm = False
    noted = -1

    def take_note() -> None:
        """Have in ``progress``, which is about to be saved, what is still on the device."""
        nonlocal noted
        if noted == progress.position:  # before the validation of this very update: each time is a message
            return
        noted = progress.position
        nonfinite.look()
        progress.nonfinite = nonfinite.in_a_row
        progress.window = list(update.meter.sums())

    parts.model.train()
    loader = train_batches(
        parts.splits,
        seed=config.seed,
        start_step=progress.position,
        stop_step=end,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=parts.micro_batch_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=parts.workers,
        device=dist.device,
        broken=parts.broken,
    )
    with loader as batches:
        for position in range(progress.position, end):
            if progress.step == profiler.next:
                profiler.turn(progress.step)
            lr = parts.lr_at(progress.step)
            # Dropout and the like: a function of the position, so that resuming needs no random state.
            made = update(batches, lr=lr, seed=derive_seed(config.seed, position))
            progress.position = position + 1
            progress.images += config.train.global_batch_size
            counts = made.stepped.skip is None  # schedule and step stand still on one that fp16 skips
            if parts.ema is not None and counts:
                clock.to(OPTIMIZER)
                parts.ema.update(made.stepped.nonfinite, updates=progress.ema_updates)
                progress.ema_updates += 1
                clock.to(OTHER)
            progress.step += counts
            if counts and not is_warm:
                keeper.warm()
                is_warm = True
            is_final = progress.step == parts.total_steps
            log = counts and (progress.step % config.monitor.log_every == 0 or is_final)
            validate, save = counts and keeper.validation_is_due(), counts and keeper.saving_is_due()
            nonfinite.add(position, progress.step, made)
            if log or validate or save:
                nonfinite.look()
            progress.nonfinite = nonfinite.in_a_row
            if log:
                lap = clock.lap(progress)
                measured = update.meter.read(tell=lap.own)
                keeper.metrics.log(_record(parts, progress, measured, lr, made.stepped.norm, lap))
                for straggler in stragglers.look(update.meter.told, lap.training):
                    keeper.remark("straggler", step=progress.step, **straggler.facts())
                    print(straggler, flush=True)
                profiler.look(progress.step)
            if validate:
                take_note()
                if not _validate(parts, keeper, should_stop):
                    return _stop(keeper)
            over = is_final or keeper.stops_early()
            if should_stop() and not over:
                take_note()
                return _stop(keeper)
            if save or over or (counts and minutes_are_over()):
                take_note()
                keeper.save()
            if over and not is_final:
                return True
    return True


def _diverged(parts: TrainState, keeper: Recorder, error: DivergedError) -> None:
    """Go back to a checkpoint and on with the data after the offending, or end the run."""
    keeper.progress.nonfinite = 0  # whoever goes on from here has all tries again
    keeper.progress.window = []  # what was measured of late is not finite
    if parts.config.train.on_nonfinite == "rollback" and keeper.roll_back(error.position + 1):
        return
    failed = error.for_user()
    keeper.save()
    epochs = keeper.progress.step / parts.steps_per_epoch
    keeper.summarize("failed", epochs=epochs, test=None, why=f"{failed.what} {failed.why}")
    raise failed


def _validate(parts: TrainState, keeper: Recorder, should_stop: Callable[[], bool]) -> bool:
    """Validate, and save a new best model. False when told to stop half way."""
    where = {**where_of(parts, keeper.progress), "lr": parts.lr_at(keeper.progress.step - 1)}
    better = keeper.validate(where, should_stop)
    if better and not keeper.saving_is_due():
        keeper.save()  # the best must be on disk, whatever the rhythm of saving
    return better is not None


def _stop(keeper: Recorder) -> bool:
    keeper.save()
    keeper.settle()  # the process may end right after
    return False


def _record(
    parts: TrainState,
    progress: Progress,
    measured: dict[str, float],
    lr: float,
    norm: Tensor | None,
    lap: Lap,
) -> dict[str, Any]:
    size, device = parts.config.train.global_batch_size, parts.dist.device
    record: dict[str, Any] = {
        **where_of(parts, progress),
        "split": "train",
        **measured,
        "lr": lr,
        "images_per_sec": round(lap.steps * size / lap.training, 2) if lap.training > 0 else None,
        **lap.fields(ranks=parts.dist.world_size),
    }
    if parts.flops_per_image is not None:
        record["mfu"] = mfu(parts, record["images_per_sec"])
    if norm is not None:
        record["grad_norm"] = norm.item()
    if parts.precision.scales_loss:
        record["skipped_steps"] = parts.precision.skipped_steps
    if device.type == "cuda":
        record["max_memory_mb"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return record


def where_of(parts: TrainState, progress: Progress) -> dict[str, Any]:
    """Time, step and epoch of a record."""
    epoch = progress.step / parts.steps_per_epoch
    return {"time": round(time.time(), 3), "step": progress.step, "epoch": round(epoch, 4)}


# A rank that hangs is ended: by whom and when.


@contextmanager
def watched(
    parts: TrainState, node: Attempt | None, hosts: list[str], beat: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """A rank that somebody has started in a job ends if it hangs; one that a person looks at may stand still."""
    if node is None or (sys.stdin is not None and sys.stdin.isatty()):
        yield beat
        return
    place = Place(parts.dist.rank, hosts, node.logs)
    passes = parts.grad_accum_steps + 2  # of `Updater`
    with watchdog(node, place, hang_seconds=parts.config.launch.hang_seconds, beats_per_step=passes) as own:
        made = 0

        def both() -> None:
            nonlocal made
            made += 1
            if made >= passes:  # until its first update is made, which may compile the model, it still starts
                beat()
            own()

        yield both

"""The loop: one for every strategy, precision and data set."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.data.order import derive_seed
from trainkit.distributed.device import peak_memory_mb
from trainkit.distributed.process_group import StopVote
from trainkit.training.clock import END, OPTIMIZER, OTHER, Lap, Stragglers
from trainkit.training.costs import mfu
from trainkit.training.recorder import Recorder, as_finished
from trainkit.training.survivor import copies_of
from trainkit.training.tasks.meter import Meter
from trainkit.training.train_state import TrainState
from trainkit.training.update import DivergedError, NonFinite, Update, Updater


def train(state: TrainState, recorder: Recorder, stop_requested: Callable[[], bool]) -> bool:
    """Train from ``recorder.progress`` to the end. True when done; False when stopped, saved, and to be continued.

    Data, augmentation and dropout are functions of (seed, position in the data), learning rates of the step: so a run
    that was interrupted anywhere and resumed does the very updates of one that was not.

    Args:
        stop_requested: has this rank been told to stop? The ranks agree before anybody does.

    Raises:
        RunFailedError: it has diverged (`train.on_nonfinite`), the summary says so; or a checkpoint cannot be written.
        UserError: more images are broken than ``data.max_broken``.
    """
    vote = StopVote(state.dist)

    def should_stop() -> bool:
        return recorder.should_stop(vote, stop_requested())

    try:
        begun = dict(vars(recorder.progress))
        state.survivor.finished(recorder.progress.step, partial(as_finished, state, begun, copies_of(state.model)))
        saves = _pay(state, recorder)
        # A stop request fell into the validation of this step: it is still owed.
        owed = recorder.progress.step > recorder.progress.validated_step and recorder.validation_is_due()
        is_stopped = owed and not _validate(state, recorder, should_stop)
        if saves and not is_stopped:
            recorder.save()
        while not is_stopped and not recorder.is_over():
            try:
                is_stopped = not _train_on(state, recorder, vote, should_stop)
            except DivergedError as error:
                _diverged(state, recorder, error)
        if is_stopped:
            recorder.save()
            recorder.settle()  # the process may end right after
        else:
            recorder.instruments.clock.to(END)
        return not is_stopped
    except RuntimeError as error:
        state.survivor.outlives(error)
        raise
    finally:
        state.survivor.disarm()
        vote.finish()


def _pay(state: TrainState, recorder: Recorder) -> bool:
    """Write the record of an update right after which ranks have failed. Returns whether its state is to be saved now,
    by the rhythm of saving."""
    progress = recorder.progress
    owed = progress.owed
    progress.owed = None
    if owed is None:
        return False
    if owed["logs"]:
        meter = Meter(state.task, state.dist)
        meter.go_on(progress.window)
        if progress.step % state.config.monitor.log_every == 0:
            progress.window = []
        norm = None if owed["grad_norm"] is None else torch.tensor(owed["grad_norm"], dtype=torch.float64)
        lr = state.lr_at(progress.step - 1, progress.falls)
        lap = recorder.instruments.clock.lap(progress)
        recorder.metrics.log(_record(state, recorder, meter.read(), lr, norm, lap))
    return recorder.saving_is_due()


def _train_on(state: TrainState, recorder: Recorder, vote: StopVote, should_stop: Callable[[], bool]) -> bool:
    """Train on as much data as is needed if no update is skipped. False when told to stop.

    Raises DivergedError when too many updates in a row came to nothing.
    """
    config = state.config
    progress = recorder.progress
    clock = recorder.instruments.clock
    profiler = recorder.instruments.profiler
    size = config.train.global_batch_size
    update = Updater(state, beat=recorder.instruments.beat, clock=clock, pace=recorder.instruments.pace)
    stragglers = Stragglers(recorder.instruments.hosts)
    nonfinite = NonFinite(state, recorder.remark, seed=config.seed, in_a_row=progress.nonfinite)
    update.meter.go_on(progress.window)
    end = progress.position + state.total_steps - progress.step

    def take_note() -> None:
        """Copy what is still on the device into ``progress``, which is about to be saved."""
        nonfinite.look()
        progress.nonfinite = nonfinite.in_a_row
        progress.window = update.meter.sums()

    def note(made: Update, *, logs: bool) -> None:
        """Note the update for this rank to save should others fail, with what it still calls for."""
        norm = None if made.stepped.norm is None else made.stepped.norm.item()
        owed = {"logs": logs, "grad_norm": norm}
        window = update.meter.exchanged if logs else []
        noted = {**vars(progress), "window": window, "owed": owed}
        state.survivor.finished(progress.step, partial(as_finished, state, noted, update.buffers))

    def log(made: Update, lr: float) -> None:
        """Record the updates since the last record, and report ranks that hold up the others."""
        lap = clock.lap(progress)
        # A run that is prolonged later goes on with the window that its end cut short.
        window = update.meter.sums() if progress.step % config.monitor.log_every else []
        measured = update.meter.read(tell=lap.own)
        update.meter.go_on(window)
        recorder.metrics.log(_record(state, recorder, measured, lr, made.stepped.norm, lap))
        for straggler in stragglers.look(update.meter.told, lap.training):
            recorder.remark("straggler", step=progress.step, **straggler._asdict())
            recorder.say(straggler)

    state.model.train()
    with state.batches(progress.position, end) as batches:
        for position in range(progress.position, end):
            if progress.step == profiler.next:
                profiler.turn(progress.step)

            # One update. Dropout and the like are a function of the position: resuming needs no random state.
            lr = state.lr_at(progress.step, progress.falls)
            seed = derive_seed(config.seed, position)
            side = state.size_at(position)
            is_final = progress.step + 1 == state.total_steps
            is_told = (progress.step + 1) % config.monitor.log_every == 0 or is_final
            made = update(batches, lr=lr, seed=seed, size=side, is_told=is_told)
            counts = made.stepped.skip is None  # schedule and step stand still on one that fp16 skips
            if state.ema is not None and counts:
                clock.to(OPTIMIZER)
                state.ema.update(made.stepped.nonfinite, updates=progress.ema_updates)
                progress.ema_updates += 1
                clock.to(OTHER)
            progress.position = position + 1
            progress.images += size
            progress.step += counts

            # What is due after it.
            is_final = counts and is_final
            logs = counts and is_told
            validate = counts and recorder.validation_is_due()
            save = counts and recorder.saving_is_due()
            nonfinite.add(position, progress.step, made)
            if logs:
                nonfinite.look()
            progress.nonfinite = nonfinite.in_a_row
            if state.survivor.is_armed:
                note(made, logs=logs)
            if logs:
                log(made, lr)
            profiler.look(progress.step)
            if validate or save:
                take_note()
            if validate and not _validate(state, recorder, should_stop):
                return False
            is_over = is_final or recorder.stops_early()  # after a validation
            is_stopped = should_stop() and not is_over
            saves = not is_stopped and (save or is_over or (counts and vote.save))
            if (is_stopped or saves) and not (validate or save):
                take_note()
            if is_stopped:
                return False
            if saves:
                recorder.save()
            if is_over:
                return True
    return True


def _diverged(state: TrainState, recorder: Recorder, error: DivergedError) -> None:
    """Go back to a checkpoint and on with the data after the offending, or end the run."""
    recorder.progress.nonfinite = 0  # whoever goes on from here has all tries again
    recorder.progress.window = []  # what was measured of late is not finite
    if state.config.train.on_nonfinite == "rollback" and recorder.roll_back(error.position + 1):
        return
    recorder.save()
    epochs = recorder.progress.step / state.steps_per_epoch
    recorder.summarize("failed", epochs=epochs, test=None, why=f"{error.what} {error.why}")
    raise error


def _validate(state: TrainState, recorder: Recorder, should_stop: Callable[[], bool]) -> bool:
    """Validate, and save a new best model. False when told to stop half way."""
    where = {**_where(state, recorder), "lr": state.lr_at(recorder.progress.step - 1, recorder.progress.falls)}
    better = recorder.validate(where, should_stop)
    if better and not recorder.saving_is_due():
        recorder.save()  # the best must be on disk, whatever the rhythm of saving
    return better is not None


def _record(
    state: TrainState, recorder: Recorder, measured: dict[str, float], lr: float, norm: Tensor | None, lap: Lap
) -> dict[str, Any]:
    """The record of the updates since the last one."""
    size = state.config.train.global_batch_size
    device = state.dist.device
    speed = round(lap.steps * size / lap.training, 2) if lap.training > 0 else None
    record = {**_where(state, recorder), "split": "train", **measured, "lr": lr, "images_per_sec": speed}
    record |= lap.fields(ranks=state.dist.world_size)
    if state.config.augment.min_size is not None:
        record["image_size"] = state.size_at(recorder.progress.position - 1)
    if state.flops_per_image is not None:
        record["mfu"] = mfu(state, speed)
    if norm is not None:
        record["grad_norm"] = norm.item()
    if state.precision.scales_loss:
        record["skipped_steps"] = state.precision.skipped_steps
    if device.type != "cpu":
        record["max_memory_mb"] = peak_memory_mb(device)
    return record


def _where(state: TrainState, recorder: Recorder) -> dict[str, Any]:
    step = recorder.progress.step
    return {"time": round(time.time(), 3), "step": step, "epoch": round(step / state.steps_per_epoch, 4)}

"""Compose a training: build model and data, call the loop, write the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import start_from
from trainkit.checkpoint.uploads import open_remote
from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common import terminal
from trainkit.config.schema import Config
from trainkit.config.task_metrics import labels_asked_by
from trainkit.data.base import Splits
from trainkit.data.loader import resolve_workers
from trainkit.data.own_samples import check_first_samples
from trainkit.data.registry import build_data
from trainkit.data.shards import ShardImages
from trainkit.distributed.device import share_of_cpus
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.watchdog import Pace
from trainkit.monitor.profiler import Profiler
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.training.batch_size import check_batch_sizes, explain_out_of_memory, memory_told, resolve_micro_batch_size
from trainkit.training.clock import clock_of
from trainkit.training.loop import train
from trainkit.training.progress import Progress, Pruner
from trainkit.training.recorder import Instruments, Recorder, go_on, survives
from trainkit.training.run_session import (
    WAIT_AT_END,
    Session,
    Uploading,
    checkpoints_of,
    failures_recorded,
    meeting,
    open_together,
)
from trainkit.training.schedule import check_own_schedule
from trainkit.training.startup import Reports, Starting, hint_on_update
from trainkit.training.tasks.base import build_task
from trainkit.training.train_state import TrainState, build

Outcome = Literal["finished", "preempted"]


def run(
    config: Config,
    env: RankEnv,
    stop: StopFlag,
    *,
    open_run: Callable[[], Attempt],
    secret: Secret = NO_SECRET,
    reports: Reports | None = None,
) -> tuple[Outcome, RunDir]:
    """Train one rank's share of a run to its end, or until all ranks have been told to stop and have saved.

    Args:
        open_run: makes or opens the run folder and takes its lease; called on rank 0 only, once the ranks have met.
        secret: shared by the ranks of this run and nobody else.
        reports: to whom this rank reports; None: to nobody.

    Raises:
        TrainkitError: what a user can mend. It has been written to the run's events.
    """
    reports = reports or Reports()
    with Uploading(stop) as uploading, reports.starting, meeting(config, env, secret, reports.starting) as dist:
        splits = _read_data(config, dist, reports.starting)
        writer = open_together(config, dist, open_run)
        reports.starting.attempt = reports.node or writer
        session = Session(config, dist, writer, uploading, reports, stop)
        if isinstance(splits.train, ShardImages) and dist.is_main:
            splits.train.cache.tell = partial(writer.remark, "data_waits")
        with failures_recorded(writer, dist), open_training(session, splits) as training:
            is_done = train(training.state, training.recorder, lambda: stop.requested)
            training.recorder.instruments.profiler.close(training.recorder.progress.step)
            if is_done:
                _finish(training)
            else:
                session.hand_back(training.recorder.progress.step)
        uploading.seconds = WAIT_AT_END if is_done else 0.0
    return "finished" if is_done else "preempted", writer.run


def _read_data(config: Config, dist: Distributed, starting: Starting) -> Splits:
    """Build the splits, and refuse batch sizes and tasks that do not fit them before a run folder exists."""
    starting.at(f"read the data ({config.data.name} in {config.data.root})")
    splits = build_data(config.data, dist)
    if ":" in config.data.name:  # a user's own
        starting.at(f"read the first sample of each split of {config.data.name}")
        dist.together(lambda: _check_samples(config, splits) if dist.is_main else None)
    check_batch_sizes(config, dist.world_size, splits)
    build_task(config, splits)
    return splits


def _check_samples(config: Config, splits: Splits) -> None:
    workers = resolve_workers(config.data.workers, splits)
    check_first_samples(splits, labels_asked_by(config.task.name), workers)


@dataclass(frozen=True)
class Training:
    """One rank's part of an open training."""

    state: TrainState
    recorder: Recorder
    live: ExitStack
    """Loggers, hardware samples and watchdog. Close it once the last record is written."""


@contextmanager
def open_training(session: Session, splits: Splits) -> Iterator[Training]:
    """Build what trains, restore the newest checkpoint, and open loggers, samplers, watchdog and clock.

    Raises:
        RunFailedError: memory is too small, here or in the body of the context.
    """
    config = session.config
    dist = session.dist
    writer = session.writer
    uploading = session.uploading
    starting = session.reports.starting
    monitor = config.monitor
    starting.at(f"build the model ({config.model.name}) and its optimizer")
    uploading.uploads = open_remote(config.checkpoint.remote, writer, dist)
    config = resolve_micro_batch_size(config, dist, writer, lambda one: build(one, dist, splits))
    state = build(config, dist, splits)
    if config.schedule.is_own:
        check_own_schedule(state.lr_at, state.total_steps)
    with (
        closing(checkpoints_of(writer, config, dist, session.reports.keeper)) as checkpoints,
        explain_out_of_memory(config, dist),
        ExitStack() as live,
    ):
        progress, hosts = _started(state, session, checkpoints)
        checkpoints.forget_memory()
        facts = {
            "total_steps": state.total_steps,
            "params": state.num_parameters,
            "resumed_step": progress.step,
            "precision": state.precision.name,
            "micro_batch_size": state.micro_batch_size,
        }
        passes = state.grad_accum_steps + 2  # of `Updater`
        metrics, beat = live.enter_context(session.live(hosts, passes, last=state.survivor.save, **facts))
        profiler = Profiler(writer.run, monitor.profile_steps, is_main=dist.is_main)
        clock = clock_of(dist.device)
        clock.at_first_update = lambda: starting.at("")
        keeper = session.reports.keeper
        pace = Pace(keeper, config.launch.hang_seconds)
        instruments = Instruments(beat, clock, hosts, uploading.look, profiler, Pruner(writer.run, dist), pace)
        recorder = Recorder(state, writer, checkpoints, metrics, progress, instruments)
        updates = min(monitor.log_every, state.total_steps - progress.step)
        first = "make the first update"
        if updates > 1:
            first += f", of {updates} until the first line"
        starting.at(first, lambda: hint_on_update(config, **share_of_cpus(dist.device)))
        if keeper is not None and survives(state):
            state.survivor.arm(keeper)
        yield Training(state, recorder, live)


def _finish(training: Training) -> None:
    """Test the best model, write the summary, and record that the run is complete."""
    state = training.state
    recorder = training.recorder
    dist = state.dist
    progress = recorder.progress
    epoch = progress.step / state.steps_per_epoch
    stopped_early = recorder.tell_early_stop()
    test = None
    if not recorder.pruned:
        test = recorder.test({"step": progress.step, "epoch": epoch})
    training.live.close()
    fake = state.config.data.fake
    remarks = {"made_up": True} if fake else {}
    outcome = "pruned" if recorder.pruned else "finished"
    recorder.summarize(outcome, epochs=epoch, test=test, stopped_early=stopped_early or None, **remarks)
    recorder.checkpoints.finish()
    if dist.is_main:
        recorder.writer.ended("COMPLETED", step=progress.step)
    if fake and dist.world_size == 1:  # last: it leaves its marks on BatchNorm's statistics
        recorder.say(memory_told(state))


def _started(state: TrainState, session: Session, checkpoints: Checkpoints) -> tuple[Progress, list[str]]:
    """Load what training goes on from, and write the event ``started``. Returns the progress and each rank's host."""
    config = state.config
    dist = state.dist
    restored, progress = go_on(state, checkpoints)
    anew: tuple[str, ...] = ()
    if restored is None and config.model.checkpoint is not None:
        anew = start_from(Path(config.model.checkpoint).expanduser(), state.model, dist)
        if state.ema is not None:
            state.ema.restart()
    hosts = session.hosts()
    resized = state.differs_from(restored.state) if restored else ""
    if not dist.is_main:
        return progress, hosts
    late_average = state.ema is not None and progress.step > 0 and not progress.ema_updates
    if resized:
        terminal.say(f"Note: {resized}.")
    if late_average:
        terminal.say(f"Note: the average of the weights starts here, at step {progress.step}.")
    expected = state.splits.expected
    remarks = {
        "trained_anew": anew,
        "input": expected and asdict(expected),
        "resized": resized,
        "ema_began": late_average,
        "made_up": state.config.data.fake,
    }
    session.started(
        hosts,
        step=progress.step,
        total_steps=state.total_steps,
        steps_per_epoch=state.steps_per_epoch,
        precision=state.precision.name,
        params=state.num_parameters,
        micro_batch_size=state.micro_batch_size,
        grad_accum_steps=state.grad_accum_steps,
        **{name: value for name, value in remarks.items() if value},
    )
    return progress, hosts

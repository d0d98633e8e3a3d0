"""Compose a training: build model and data, call the loop, write the results."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import start_from
from trainkit.checkpoint.uploads import Uploads, open_remote
from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.cluster.signals import StopFlag, hand_back
from trainkit.common import terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.registry import build_data
from trainkit.data.shards import ShardImages
from trainkit.distributed.device import device_name, kind_of, share_of_cpus, software
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.monitor.base import Logger, open_loggers
from trainkit.monitor.hardware import sample_host
from trainkit.monitor.profiler import Profiler, snapshot_on_oom
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir, make_private
from trainkit.run.run_lease import StaleAttemptError
from trainkit.training.batch_size import check_batch_sizes, explain_out_of_memory, memory_told, resolve_micro_batch_size
from trainkit.training.clock import clock_of
from trainkit.training.loop import train, watched
from trainkit.training.placement import wants_gpu
from trainkit.training.progress import Progress, Pruner
from trainkit.training.recorder import Instruments, Recorder, go_on
from trainkit.training.startup import Reports, Starting, hint_on_data, hint_on_update
from trainkit.training.tasks.base import build_task
from trainkit.training.train_state import TrainState, build

Outcome = Literal["finished", "preempted"]

_WAIT_AT_STOP = 20.0
"""Seconds that a stopped run waits for uploads to `checkpoint.remote`."""
_WAIT_AT_END = 600.0
"""Seconds without progress after which a finished run stops waiting for uploads."""


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
    with _Uploading(stop) as uploading, reports.starting, _meeting(config, env, secret, reports.starting) as dist:
        splits = _read_data(config, dist, reports.starting)
        writer = _open_together(config, dist, open_run)
        reports.starting.attempt = reports.node or writer
        if isinstance(splits.train, ShardImages) and dist.is_main:
            splits.train.cache.tell = partial(writer.remark, "data_waits")
        with (
            _failures_recorded(writer, dist),
            open_training(config, dist, splits, writer, uploading, reports) as training,
        ):
            is_done = train(training.state, training.recorder, lambda: stop.requested)
            training.recorder.instruments.profiler.close(training.recorder.progress.step)
            if is_done:
                _finish(training)
            else:
                _hand_back(training, stop, uploading, reports.node)
        uploading.seconds = _WAIT_AT_END if is_done else 0.0
    return "finished" if is_done else "preempted", writer.run


class _Uploading:
    """Context in which uploads to `checkpoint.remote` may run. Leaving it waits for them; the other ranks have gone."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self.uploads: Uploads | None = None
        """None on all ranks but one, and where the run is uploaded nowhere."""
        self.seconds = _WAIT_AT_STOP
        """Seconds without progress after which the context stops waiting."""

    def __enter__(self) -> _Uploading:
        return self

    def __exit__(self, *_: object) -> None:
        uploads = self.uploads
        if uploads is not None:
            last_seconds = min(self.seconds, _WAIT_AT_STOP)
            uploads.finish(self.seconds, give_up=lambda: self._stop.requested and not uploads.wait(last_seconds))

    def look(self) -> None:
        """Upload what is new in the run's folder of checkpoints."""
        if self.uploads is not None:
            self.uploads.look()


def _meeting(config: Config, env: RankEnv, secret: Secret, starting: Starting) -> AbstractContextManager[Distributed]:
    """Return the context in which the ranks of the run have met."""
    starting.at("meet the other ranks" if env.world_size > 1 else "open the device")
    # Longer than the watchdog's patience: it knows more than a collective that times out.
    patience = timedelta(seconds=2 * max(config.launch.hang_seconds, 300))
    gpu = wants_gpu(config)
    interface = config.launch.interface
    return distributed(env, use_gpu=gpu, secret=secret, interface=interface, collective_timeout=patience)


def _read_data(config: Config, dist: Distributed, starting: Starting) -> Splits:
    """Build the splits, and refuse batch sizes and tasks that do not fit them before a run folder exists."""
    starting.at(f"read the data ({config.data.name} in {config.data.root})", lambda: hint_on_data(config))
    splits = build_data(config.data, dist)
    check_batch_sizes(config, dist.world_size, splits)
    build_task(config, splits)
    return splits


@dataclass(frozen=True)
class Training:
    """One rank's part of an open training."""

    state: TrainState
    recorder: Recorder
    live: ExitStack
    """Loggers, hardware samples and watchdog. Close it once the last record is written."""


@contextmanager
def open_training(
    config: Config, dist: Distributed, splits: Splits, writer: Attempt, uploading: _Uploading, reports: Reports
) -> Iterator[Training]:
    """Build what trains, restore the newest checkpoint, and open loggers, samplers, watchdog and clock.

    Raises:
        RunFailedError: memory is too small, here or in the body of the context.
    """
    starting = reports.starting
    run_dir = writer.run
    monitor = config.monitor
    starting.at(f"build the model ({config.model.name}) and its optimizer")
    uploading.uploads = open_remote(config.checkpoint.remote, writer, dist)
    config = resolve_micro_batch_size(config, dist, writer, lambda one: build(one, dist, splits))
    state = build(config, dist, splits)
    saving = config.checkpoint
    checkpoints = Checkpoints(
        run_dir.checkpoints, keep=saving.keep, dist=dist, may_write=writer.may_write, asynchronous=saving.asynchronous
    )
    with closing(checkpoints), explain_out_of_memory(config, dist), ExitStack() as live:
        progress, hosts = _started(state, writer, checkpoints)
        starting.at(f"open the loggers ({', '.join(monitor.loggers)})")
        metrics = live.enter_context(_loggers(state, writer, resumed_step=progress.step))
        live.enter_context(sample_host(run_dir, monitor.hardware_every_seconds, str(dist.device), dist.env))
        beat = live.enter_context(watched(state, reports.node, hosts, reports.beat))
        kind = kind_of(dist.device)
        live.enter_context(snapshot_on_oom(run_dir, dist.rank, kind, history=monitor.memory_history))
        profiler = Profiler(run_dir, monitor.profile_steps, is_main=dist.is_main)
        clock = clock_of(dist.device)
        clock.at_first_update = lambda: starting.at("")
        instruments = Instruments(beat, clock, hosts, uploading.look, profiler, Pruner(run_dir, dist))
        recorder = Recorder(state, writer, checkpoints, metrics, progress, instruments)
        updates = min(monitor.log_every, state.total_steps - progress.step)
        first = "make the first update"
        if updates > 1:
            first += f", of {updates} until the first line"
        starting.at(first, lambda: hint_on_update(config, splits.info.image_size, **share_of_cpus(dist.device)))
        yield Training(state, recorder, live)


def _loggers(state: TrainState, writer: Attempt, *, resumed_step: int) -> AbstractContextManager[Logger]:
    """Return the context in which the loggers of ``monitor.loggers`` are open."""
    facts = {
        "total_steps": state.total_steps,
        "params": state.num_parameters,
        "world_size": state.dist.world_size,
        "resumed_step": resumed_step,
        "precision": state.precision.name,
        "micro_batch_size": state.micro_batch_size,
    }
    return open_loggers(state.config, writer.run, is_main=state.dist.is_main, may_write=writer.may_write, **facts)


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


def _hand_back(training: Training, stop: StopFlag, uploading: _Uploading, node: Attempt | None) -> None:
    """Record that all ranks have saved and end on request."""
    dist = training.state.dist
    recorder = training.recorder
    signals = list(chain.from_iterable(dist.gather_json(stop.signals)))
    if uploading.uploads is not None:  # afterwards the job may be taken away at any moment
        uploading.uploads.wait(min(_WAIT_AT_STOP, training.state.config.launch.lead_seconds() / 3))
    attempt = recorder.writer if dist.is_main else node
    hand_back(attempt, dist.env, signals, step=recorder.progress.step)


def _started(state: TrainState, writer: Attempt, checkpoints: Checkpoints) -> tuple[Progress, list[str]]:
    """Load what training goes on from, and write the event ``started``. Returns the progress and each rank's host."""
    config = state.config
    dist = state.dist
    restored, progress = go_on(state, checkpoints)
    anew: tuple[str, ...] = ()
    if restored is None and config.model.checkpoint is not None:
        anew = start_from(Path(config.model.checkpoint).expanduser(), state.model, dist)
        if state.ema is not None:
            state.ema.restart()
    hosts = dist.gather_json(socket.gethostname())
    resized = state.differs_from(restored.state) if restored else ""
    if not dist.is_main:
        return progress, hosts
    late_average = state.ema is not None and progress.step > 0 and not progress.ema_updates
    if resized:
        terminal.say(f"Note: {resized}.")
    if late_average:
        terminal.say(f"Note: the averaged weights begin here, with those of step {progress.step}.")
    expected = state.splits.expected
    remarks = {
        "trained_anew": anew,
        "input": expected and asdict(expected),
        "resized": resized,
        "ema_began": late_average,
        "made_up": state.config.data.fake,
    }
    writer.started(
        step=progress.step,
        total_steps=state.total_steps,
        steps_per_epoch=state.steps_per_epoch,
        world_size=dist.world_size,
        hosts=list(dict.fromkeys(hosts)),
        device=device_name(dist.device),
        **share_of_cpus(dist.device),
        precision=state.precision.name,
        params=state.num_parameters,
        micro_batch_size=state.micro_batch_size,
        grad_accum_steps=state.grad_accum_steps,
        versions=software(dist.device),
        **{name: value for name, value in remarks.items() if value},
    )
    return progress, hosts


def _open_together(config: Config, dist: Distributed, open_run: Callable[[], Attempt]) -> Attempt:
    """Open the run folder on rank 0 and tell all ranks, or fail on all. Only rank 0 may write."""
    # Launch settings and data folder may differ between machines.
    data = config.data.model_copy(update={"root": ""})
    settings = to_yaml(config.model_copy(update={"launch": type(config.launch)(), "data": data}))
    others = dist.gather_json(settings)
    for rank, other in enumerate(others):
        if other != others[0]:
            what = f"The ranks were started with different settings: rank {rank} differs from rank 0."
            fix = "Give the same preset and overrides on every node."
            raise UserError(what, why="One run has one configuration.", fix=fix)
    writer = dist.together(lambda: open_run() if dist.is_main else None)
    told: Any = None if writer is None else [str(writer.run.path), writer.number]
    path, number = dist.broadcast_json(told)
    make_private(Path(path), exist_ok=True)  # a node without rank 0's disk writes its samples there
    return writer or Attempt(RunDir(Path(path)), number)


@contextmanager
def _failures_recorded(attempt: Attempt, dist: Distributed) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit | StaleAttemptError):  # the newer attempt owns the record
            words = f"{type(error).__name__}: {error}"
            if isinstance(error, TrainkitError):
                words = f"{error.what} {error.why}".strip()
            attempt.failed(words, rank=dist.rank)
        raise

"""Compose a training: build model and data, call the loop, write the results."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from trainkit.checkpoint.remote import Uploads, open_remote
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import start_from
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.shards import ShardImages
from trainkit.distributed.device import device_name, kind_of, share_of_cpus, software
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import TrainkitError, UserError
from trainkit.monitor import open_loggers
from trainkit.monitor.hardware import sample_host
from trainkit.monitor.profiler import Profiler, snapshot_on_oom
from trainkit.monitor.starting import Starting, hint_on_data, hint_on_update
from trainkit.ranks import NO_SECRET, RankEnv, Secret
from trainkit.ranks.signals import StopFlag, hand_back
from trainkit.run.events import Attempt, StaleAttemptError
from trainkit.run.folder import RunDir, make_private
from trainkit.tasks.base import build_task
from trainkit.training.build import TrainState, build, wants_gpu
from trainkit.training.loop import train, watched
from trainkit.training.memory import check_batch_sizes, explain_out_of_memory, memory_told, resolve_micro_batch_size
from trainkit.training.pruning import Pruner
from trainkit.training.recorder import Progress, Recorder, go_on
from trainkit.training.timing import clock_of

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
    node: Attempt | None = None,
    secret: Secret = NO_SECRET,
    beat: Callable[[], None] = lambda: None,
    starting: Starting | None = None,
) -> tuple[Outcome, RunDir]:
    """Train one rank's share of a run to its end, or until all ranks have been told to stop and have saved.

    Args:
        open_run: makes or opens the run folder and takes its lease; called on rank 0 only, once the ranks have met.
        node: the attempt that this node's launcher has begun, which need not share rank 0's folder; None: no launcher.
        secret: shared by the ranks of this run and nobody else.
        beat: called whenever this rank has made progress: an update, a batch, a save.
        starting: told what the start is at; None: nobody wants to know.

    Raises:
        TrainkitError: what a user can mend. It has been written to the run's events.
    """
    # Longer than the watchdog's patience: it knows more than a collective that times out.
    patience = timedelta(seconds=2 * max(config.launch.hang_seconds, 300))
    interface, monitor = config.launch.interface, config.monitor
    group = distributed(
        env, use_gpu=wants_gpu(config), secret=secret, interface=interface, collective_timeout=patience
    )  # fmt: skip
    uploads: Uploads | None = None
    waits = _WAIT_AT_STOP
    starting = starting or Starting(speaks=False, attempt=None)
    try:
        starting.at("meet the other ranks" if env.world_size > 1 else "open the device")
        with group as dist:
            starting.at(f"read the data ({config.data.name} in {config.data.root})", lambda: hint_on_data(config))
            splits = build_data(config.data, dist)
            check_batch_sizes(config, dist.world_size, splits)
            build_task(config, splits)  # fails before a run folder exists
            writer = _meet(config, dist, open_run)
            run_dir, kind = writer.run, kind_of(dist.device)
            starting.attempt = node or writer
            if isinstance(splits.train, ShardImages) and dist.is_main:
                splits.train.cache.tell = partial(writer.remark, "data_waits")
            starting.at(f"build the model ({config.model.name}) and its optimizer")
            with _failures_recorded(writer, dist), ExitStack() as held:
                uploads = open_remote(config.checkpoint.remote, writer, dist)
                config = resolve_micro_batch_size(config, dist, writer, lambda one: build(one, dist, splits))
                parts = build(config, dist, splits)
                keep, asynchronous = config.checkpoint.keep, config.checkpoint.asynchronous
                checkpoints = Checkpoints(
                    run_dir.checkpoints, keep=keep, dist=dist, may_write=writer.may_write, asynchronous=asynchronous
                )
                held.enter_context(closing(checkpoints))
                held.enter_context(explain_out_of_memory(config, dist))
                progress, hosts = _started(parts, writer, checkpoints)
                loggers = open_loggers(
                    config, run_dir, total_steps=parts.total_steps, params=parts.num_parameters,
                    world_size=dist.world_size, resumed_step=progress.step, precision=parts.precision.name,
                    micro_batch_size=parts.micro_batch_size, is_main=dist.is_main, may_write=writer.may_write,
                )  # fmt: skip
                with (
                    loggers as metrics,
                    sample_host(run_dir, monitor.hardware_every_seconds, str(dist.device), env),
                    watched(parts, node, hosts, beat) as beat,
                    snapshot_on_oom(run_dir, dist.rank, kind, history=monitor.memory_history),
                ):
                    profiler = Profiler(run_dir, monitor.profile_steps, is_main=dist.is_main)
                    clock, saved = clock_of(dist.device), uploads.look if uploads is not None else lambda: None
                    keeper = Recorder(
                        parts, writer, checkpoints, metrics, progress, beat, clock, hosts, saved, profiler,
                        Pruner(run_dir, dist),
                    )  # fmt: skip
                    clock.at_first_update = lambda: starting.at("")
                    more = min(monitor.log_every, parts.total_steps - progress.step)
                    starting.at(
                        f"make the first update{f', of {more} until the first line' * (more > 1)}",
                        lambda: hint_on_update(config, splits.info.image_size, **share_of_cpus(dist.device)),
                    )
                    is_done = train(parts, keeper, lambda: stop.requested)
                    profiler.close(progress.step)
                    epoch = progress.step / parts.steps_per_epoch
                    if is_done:
                        early = keeper.tell_early_stop()
                        test = None if keeper.pruned else keeper.test({"step": progress.step, "epoch": epoch})
                    else:
                        signals = [name for names in dist.gather_json(stop.signals) for name in names]
                        if uploads is not None:  # afterwards the job may be taken away at any moment
                            uploads.wait(min(_WAIT_AT_STOP, config.launch.lead_seconds() / 3))
                        hand_back(writer if dist.is_main else node, env, signals, step=progress.step)
                if is_done:
                    told = {"made_up": True} if config.data.fake else {}
                    outcome = "pruned" if keeper.pruned else "finished"
                    keeper.summarize(outcome, epochs=epoch, test=test, stopped_early=early or None, **told)
                    checkpoints.finish()
                    if dist.is_main:
                        writer.ended("COMPLETED", step=progress.step)
                    if config.data.fake and dist.world_size == 1:  # last: it leaves its marks on BatchNorm's statistics
                        print(memory_told(parts), flush=True)
        waits = _WAIT_AT_END if is_done else 0.0
    finally:
        starting.stop()
        if uploads is not None:  # the other ranks have gone
            uploads.finish(waits, give_up=lambda: stop.requested and not uploads.wait(waits and _WAIT_AT_STOP))
    return "finished" if is_done else "preempted", run_dir


def _started(parts: TrainState, writer: Attempt, checkpoints: Checkpoints) -> tuple[Progress, list[str]]:
    """Load what training goes on from, and write the event ``started``. Returns the progress and each rank's host."""
    config, dist = parts.config, parts.dist
    restored, progress = go_on(parts, checkpoints)
    anew: tuple[str, ...] = ()
    if restored is None and config.model.checkpoint is not None:
        anew = start_from(Path(config.model.checkpoint).expanduser(), parts.model, dist)
        if parts.ema is not None:
            parts.ema.restart()
    hosts = dist.gather_json(socket.gethostname())
    resized = parts.differs_from(restored.state) if restored else ""
    if not dist.is_main:
        return progress, hosts
    late_average = parts.ema is not None and progress.step > 0 and not progress.ema_updates
    if resized:
        print(f"Note: {resized}.", flush=True)
    if late_average:
        print(f"Note: the averaged weights begin here, with those of step {progress.step}.", flush=True)
    expected = parts.splits.expected
    remarks = {
        "trained_anew": anew, "input": expected and asdict(expected), "resized": resized, "ema_began": late_average,
        "made_up": config.data.fake,
    }  # fmt: skip
    writer.started(
        step=progress.step, total_steps=parts.total_steps, steps_per_epoch=parts.steps_per_epoch,
        world_size=dist.world_size, hosts=list(dict.fromkeys(hosts)), device=device_name(dist.device),
        **share_of_cpus(dist.device), precision=parts.precision.name, params=parts.num_parameters,
        micro_batch_size=parts.micro_batch_size, grad_accum_steps=parts.grad_accum_steps,
        versions=software(dist.device), **{name: value for name, value in remarks.items() if value},
    )  # fmt: skip
    return progress, hosts


def _meet(config: Config, dist: Distributed, open_run: Callable[[], Attempt]) -> Attempt:
    """Open the run folder on rank 0 and tell all ranks, or fail on all. Only rank 0 may write."""
    # Launch settings and data folder may differ between machines.
    data = config.data.model_copy(update={"root": ""})
    settings = to_yaml(config.model_copy(update={"launch": type(config.launch)(), "data": data}))
    others = dist.gather_json(settings)
    if any(other != settings for other in others):
        different = [rank for rank, other in enumerate(others) if other != others[0]]
        what = f"The ranks were started with different settings: rank {different[0]} differs from rank 0."
        fix = "Give the same preset and overrides on every node."
        raise UserError(what, why="One run has one configuration.", fix=fix)
    writer = dist.together(lambda: open_run() if dist.is_main else None)
    run_dir = RunDir(Path(dist.broadcast_json(str(writer.run.path) if writer is not None else "")))
    number = dist.broadcast_json(writer.number if writer is not None else 0)
    make_private(run_dir.path, exist_ok=True)  # a node without rank 0's disk writes its samples there
    return writer or Attempt(run_dir, number)


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

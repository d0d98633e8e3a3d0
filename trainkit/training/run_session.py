"""The session of a rank: it meets the others, opens the run, its loggers and its watchdog, and ends with it.

The same for our own loop and for those of users.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.uploads import Uploads
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.cluster.signals import KeeperLink, StopFlag, hand_back
from trainkit.common.errors import TrainkitError, UserError
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.distributed.device import device_name, kind_of, share_of_cpus, software
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.distributed.watchdog import watchdog
from trainkit.monitor.base import Loggers, open_loggers
from trainkit.monitor.hardware import sample_host
from trainkit.monitor.profiler import snapshot_on_oom
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir, make_private
from trainkit.run.run_lease import StaleAttemptError
from trainkit.training.idle_guard import IdleGuard, doing_of
from trainkit.training.placement import wants_gpu
from trainkit.training.startup import Reports, Starting

_WAIT_AT_STOP = 20.0
"""Seconds that a stopped run waits for uploads to `checkpoint.remote`."""
WAIT_AT_END = 600.0
"""Seconds without progress after which a finished run stops waiting for uploads."""


def checkpoints_of(writer: Attempt, config: Config, dist: Distributed, keeper: KeeperLink | None = None) -> Checkpoints:
    """Return the checkpoints of a run that this attempt writes; its ranks may have left one in memory."""
    saving = config.checkpoint
    return Checkpoints(
        writer.run.checkpoints, keep=saving.keep, dist=dist, may_write=writer.may_write,
        asynchronous=saving.asynchronous, memory=None if keeper is None else keeper.folder / "checkpoints",
    )  # fmt: skip


class Uploading:
    """Context in which uploads to `checkpoint.remote` may run. Leaving it waits for them; the other ranks have gone."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self.uploads: Uploads | None = None
        """None on all ranks but one, and where the run is uploaded nowhere."""
        self.seconds = _WAIT_AT_STOP
        """Seconds without progress after which the context stops waiting."""

    def __enter__(self) -> Uploading:
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


def meeting(config: Config, env: RankEnv, secret: Secret, starting: Starting) -> AbstractContextManager[Distributed]:
    """Return the context in which the ranks of the run have met."""
    starting.at("meet the other ranks" if env.world_size > 1 else "open the device")
    # Longer than the watchdog's patience: it knows more than a collective that times out.
    patience = timedelta(seconds=2 * max(config.launch.hang_seconds, 300))
    gpu = wants_gpu(config)
    interface = config.launch.interface
    return distributed(env, use_gpu=gpu, secret=secret, interface=interface, collective_timeout=patience)


def open_together(config: Config, dist: Distributed, open_run: Callable[[], Attempt]) -> Attempt:
    """Open the run folder on rank 0 and tell all ranks, or fail on all. Only rank 0 may write."""
    # Launch settings and data folder may differ between machines.
    data = config.data.model_copy(update={"root": ""})
    settings = to_yaml(config.model_copy(update={"launch": type(config.launch)(), "data": data}))
    others = dist.gather_json(settings)
    for rank, other in enumerate(others):
        if other != others[0]:
            what = f"The ranks were started with different settings: rank {rank} differs from rank 0."
            fix = "Give the same preset and overrides on every node."
            raise UserError(what, why="All ranks of a run need the same configuration.", fix=fix)
    writer = dist.together(lambda: open_run() if dist.is_main else None)
    told: Any = None if writer is None else [str(writer.run.path), writer.number]
    path, number = dist.broadcast_json(told)
    make_private(Path(path), exist_ok=True)  # a node without rank 0's disk writes its samples there
    return writer or Attempt(RunDir(Path(path)), number)


@contextmanager
def failures_recorded(attempt: Attempt, dist: Distributed) -> Iterator[None]:
    """Write down what is raised in the block, for whoever asks why the run has failed."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit | StaleAttemptError):  # the newer attempt owns the record
            words = f"{type(error).__name__}: {error}"
            if isinstance(error, TrainkitError):
                words = f"{error.what} {error.why}".strip()
            attempt.failed(words, rank=dist.rank)
        raise


@dataclass(frozen=True)
class Session:
    """One rank's part of a run that is open."""

    config: Config
    dist: Distributed
    writer: Attempt
    uploading: Uploading
    reports: Reports
    stop: StopFlag

    @contextmanager
    def live(
        self, hosts: list[str], passes: int, *, last: Callable[[], None] = lambda: None, **facts: Any
    ) -> Iterator[tuple[Loggers, Callable[[], None]]]:
        """Context in which loggers, hardware samples and watchdog are open: gives the logger, and what is to be called
        whenever this rank has made progress.

        Args:
            passes: such calls in an update.
            last: called, from another thread, before this rank ends because it hangs.
            facts: what is known of the attempt, see `trainkit.monitor.base.Start`.
        """
        monitor = self.config.monitor
        dist = self.dist
        run_dir = self.writer.run
        self.reports.starting.at(f"open the loggers ({', '.join(monitor.loggers)})")
        with ExitStack() as live:
            metrics = live.enter_context(
                open_loggers(
                    self.config, run_dir, is_main=dist.is_main, may_write=self.writer.may_write,
                    world_size=dist.world_size, **facts,
                )
            )  # fmt: skip
            writer = self.reports.node or self.writer
            doing = partial(doing_of, threading.get_ident())
            guard = IdleGuard(self.config.launch.idle_minutes, writer, hosts[dist.rank], self.stop, doing)
            if not self.reports.is_sampled:
                every_seconds = monitor.hardware_every_seconds
                live.enter_context(sample_host(run_dir, every_seconds, str(dist.device), dist.env, guard.look))
            beat = live.enter_context(self._watched(hosts, passes, guard, last))
            kind = kind_of(dist.device)
            live.enter_context(snapshot_on_oom(run_dir, dist.rank, kind, history=monitor.memory_history))
            yield metrics, beat

    @contextmanager
    def _watched(
        self, hosts: list[str], passes: int, guard: IdleGuard, last: Callable[[], None]
    ) -> Iterator[Callable[[], None]]:
        """Arm watchdog and idle guard, unless this rank has no launcher or a person watches it in a terminal."""
        beat = self.reports.beat
        node = self.reports.node
        if node is None or (sys.stdin is not None and sys.stdin.isatty()):
            yield beat
            return
        hang_seconds = self.config.launch.hang_seconds
        rank = self.dist.rank
        more = {"hang_seconds": hang_seconds, "beats_per_step": passes}
        with watchdog(node, rank, hosts, **more, keeper=self.reports.keeper, last=last) as own:
            made = 0

            def both() -> None:
                nonlocal made
                made += 1
                if made >= passes:  # until its first update is made, which may compile the model, it still starts
                    beat()
                    guard.has_started = True
                own()

            yield both

    def started(self, hosts: list[str], **facts: Any) -> None:
        """Write the event ``started``, with what it says of the ranks and their devices."""
        device = self.dist.device
        if self.dist.is_main:
            self.writer.started(
                world_size=self.dist.world_size, hosts=list(dict.fromkeys(hosts)), device=device_name(device),
                **share_of_cpus(device), versions=software(device), **facts,
            )  # fmt: skip

    def hosts(self) -> list[str]:
        """Host of each rank."""
        return self.dist.gather_json(socket.gethostname())

    def hand_back(self, step: int) -> None:
        """Record that all ranks have saved and end on request."""
        signals = list(chain.from_iterable(self.dist.gather_json(self.stop.signals)))
        if self.uploading.uploads is not None:  # afterwards the job may be taken away at any moment
            self.uploading.uploads.wait(min(_WAIT_AT_STOP, self.config.launch.lead_seconds() / 3))
        attempt = self.writer if self.dist.is_main else self.reports.node
        hand_back(attempt, self.dist.env, signals, step=step)

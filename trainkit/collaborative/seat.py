"""One peer's place, and everything that a peer is made of, built and taken down in order."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit import plugins
from trainkit.checkpoint.saving import Checkpoints
from trainkit.collaborative import rounds, synchronous
from trainkit.collaborative.averager import open_averager, patience
from trainkit.collaborative.averaging import Averaging
from trainkit.collaborative.bans import banned_with
from trainkit.collaborative.clock import RoundClock, UpdateClock
from trainkit.collaborative.common import CommonState
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.gradients import GatheringParts, GradientState
from trainkit.collaborative.link import Link
from trainkit.collaborative.loop import Ending, Peer
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.sentry import Sentry
from trainkit.collaborative.team import PATIENCE, Team, data_seed, spread
from trainkit.collaborative.waiting import PATIENCE_SECONDS
from trainkit.collaborative.watch import Watch
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.distributed.process_group import distributed
from trainkit.models import build_model
from trainkit.monitor.base import Logger, open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.ranks.env import RankEnv
from trainkit.ranks.secret import NO_SECRET, Secret
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer
from trainkit.training.building import wants_gpu
from trainkit.training.parts import Parts
from trainkit.training.progress import Progress


@dataclass(frozen=True)
class Seat:
    """One peer's place: who it is, its device, and what it is asked to do besides training."""

    name: str
    env: RankEnv
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    open_run: Callable[[Config], Writer] | None
    """Makes or opens this peer's run folder and takes its lease; None for a rank whose rank 0 keeps the records."""
    goes_on_later: bool = False
    """A stopped run will be started again from its last checkpoint, so it has no results yet."""
    identity: Path | None = None
    host: str | None = None
    """Address to listen on; None: call out only."""
    port: int = 0
    announce: str | None = None
    """The address that others are told, where it is not this machine's own."""
    must_prove: bool = False
    """Whether others reach it has yet to be seen."""
    opened: Callable[[RunDir, list[str]], None] = lambda run, addresses: None
    """Called once others can join through this peer, with the addresses."""
    folder: RunDir | None = None
    """The run folder, if there is one already: what it says of the swarm counts."""
    trains: bool = True
    """Else it only reduces, keeps the common weights and gives them away."""
    patience: float = PATIENCE_SECONDS
    """How long to wait for a swarm that does not answer any more."""
    max_upload: float | None = None
    """Bytes per second that this peer may send at most; None: as fast as it goes."""
    beat: Callable[[], None] = lambda: None
    """Called whenever this peer has made progress."""
    team: bool = False
    """All ranks of ``env`` are this one peer, and this is rank 0; else every rank is a peer of its own."""
    secret: Secret = NO_SECRET
    """What the ranks know and nobody else."""


def common_state(config: Config, splits: Splits) -> CommonState:
    """A model, on the CPU, and what the peers have in common of it."""
    model = build_model(config.model, splits.info, config.seed)
    if config.collaborative.sync == "gradients":
        return GradientState(model, config)
    return OuterState(model, lr=config.collaborative.outer_lr, momentum=config.collaborative.outer_momentum)


@contextmanager
def averaged(
    config: Config,
    seat: Seat,
    splits: Splits,
    common: CommonState,
    dht: SwarmDHT,
    run_id: str,
    *,
    measured: float | None = None,
) -> Iterator[tuple[Team, Averaging]]:
    """What trains here, and what agrees with the others.

    ``measured``: bytes per second that this peer can send, where that is too slow for all that there is to send.

    In this order: the averager's process is forked, which must be before CUDA is used for the first time.
    """
    ranks = seat.env if seat.team else replace(seat.env, rank=0, world_size=1)
    with (
        open_averager(dht, common, config.collaborative, run_id) as averager,
        distributed(ranks, use_gpu=wants_gpu(config), secret=seat.secret, collective_timeout=PATIENCE) as dist,
        spread(config, dist, splits, common, dht.peer_id) as team,
    ):
        if isinstance(common, GradientState):
            team = replace(team, parts=GatheringParts.of(team.parts, common.gathered))
        agreed = config.collaborative
        link = Link(
            common.theta.numel(), agreed.compression, agreed.round_seconds, patience(agreed), seat.max_upload, measured
        )
        yield team, Averaging(averager, dht, common, agreed, link)


def clock_at(config: Config, common: CommonState, first_round: int) -> RoundClock:
    """The clock of a run that began with that round."""
    agreed = config.collaborative
    if agreed.sync == "gradients":
        return UpdateClock(agreed.round_seconds, first_round, agreed.rounds, lambda: common.round)
    return RoundClock(agreed.round_seconds, first_round, agreed.rounds)


def take_part(peer: Peer) -> Ending:
    """Train with the others in the way of the run."""
    return synchronous.train(peer) if isinstance(peer.common, GradientState) else rounds.train(peer)


def peer_at(
    seat: Seat,
    team: Team,
    common: CommonState,
    averaging: Averaging,
    dht: SwarmDHT,
    clock: RoundClock,
    watch: Watch,
    progress: Progress,
) -> Peer:
    """The peer of a seat; its creator adds what only a creator does."""
    return Peer(
        name=seat.name,
        parts=team.judge,
        team=team,
        clock=clock,
        dht=dht,
        watch=watch,
        common=common,
        averaging=averaging,
        sentry=Sentry(
            averaging.screening,
            dht.excluded.bans,
            say=seat.say,
            enforce=lambda banned: _shut_out(dht, banned),
            invitation_of=lambda peer: banned_with(dht.member(peer), peer, dht.peer_id),
            judges_reducers=dht.own.grant.role == "owner",
        ),
        data_seed=data_seed(team.parts.config, dht.peer_id),
        stop_requested=seat.stop_requested,
        progress=progress,
        beat=seat.beat,
        trains=seat.trains,
        addresses=() if seat.host is None else tuple(dht.addresses()),
    )


def _shut_out(dht: SwarmDHT, banned: Collection[str]) -> None:
    dht.admission.ban(banned)
    dht.publish_excluded()


@contextmanager
def kept(config: Config, writer: Writer, parts: Parts, *, judges: bool) -> Iterator[tuple[Checkpoints, Logger]]:
    """Where checkpoints and metrics go. Loggers say which peers open them; lines a round are the keeper's."""
    wanted = ("all", "judge") if judges else ("all",)
    stated = {name: plugins.stated("trainkit.monitor", name) for name in config.monitor.loggers}
    names = tuple(name for name in stated if stated[name].get("PEERS", "all") in wanted)
    quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"loggers": names})})
    dist, run_dir = parts.dist, writer.run
    hardware = sample_hardware(run_dir, socket.gethostname(), config.monitor.hardware_every_seconds, dist.device.type)
    with (
        open_loggers(quiet, run_dir, total_steps=0, params=parts.num_parameters, may_write=writer.check) as metrics,
        hardware,
    ):
        checkpoints = Checkpoints(
            run_dir.checkpoints,
            keep=config.checkpoint.keep,
            dist=dist,
            may_write=writer.check,
            asynchronous=config.checkpoint.asynchronous,
        )
        with closing(checkpoints):
            yield checkpoints, metrics
            checkpoints.settle()

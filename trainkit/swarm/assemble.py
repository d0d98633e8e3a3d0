"""One peer's place, and everything that a peer is made of, built and taken down in order."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit import plugins
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.distributed.process_group import distributed
from trainkit.errors import RunFailedError
from trainkit.models import build_model
from trainkit.monitor.hardware import sample_hardware
from trainkit.monitor.loggers import Logger, open_loggers
from trainkit.ranks.env import NO_SECRET, RankEnv, Secret
from trainkit.run.events import Writer
from trainkit.run.folder import RunDir
from trainkit.swarm import rounds
from trainkit.swarm.average import Averaging
from trainkit.swarm.averager import open_averager, patience
from trainkit.swarm.bans import Sentry, banned_with
from trainkit.swarm.dht import SwarmDHT, Watch
from trainkit.swarm.link import Link
from trainkit.swarm.messages import RoundClock, UpdateClock
from trainkit.swarm.rounds import Ending, Peer
from trainkit.swarm.sync_diloco import CommonState, OuterState
from trainkit.swarm.sync_gradients import GatheringParts, GradientState
from trainkit.swarm.team import PATIENCE, Team, data_seed, spread
from trainkit.training.build import TrainState, wants_gpu
from trainkit.training.recorder import Progress

# A peer that has lost the swarm waits for it, and goes on when it is back.

PATIENCE_SECONDS = 24 * 3600.0
"""How long a peer waits for a swarm that does not answer."""
_SAY_EVERY = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Waiting:
    """How to wait."""

    look: Callable[[Sequence[str]], int]
    """Look for peers at addresses; how many answer."""
    goes_on: Callable[[], bool]
    """Whether they go on with this peer; who has just come back may not be ready for that."""
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    patience: float = PATIENCE_SECONDS
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until_back(self, addresses: Sequence[str]) -> bool:
        """Ask for the swarm at ``addresses``, less and less often. False when told to leave.

        Raises RunFailedError when nobody has answered for so long that nobody will.
        """
        began, said, pause, there = self.now(), self.now(), _FIRST_PAUSE, False
        self.say(
            f"Nobody of the swarm answers. Waiting for it for up to {_in_words(self.patience)}; Ctrl-C leaves for good."
        )
        while not self.stop_requested():
            if self.look(addresses):
                if self.goes_on():
                    return True
                if not there:  # it has just come back, and will be ready soon
                    there, pause = True, _FIRST_PAUSE
            waited = self.now() - began
            if waited >= self.patience:
                raise RunFailedError(
                    f"The swarm has not answered for {_in_words(self.patience)}.",
                    why="Its creator has gone without a word, or this machine has lost its network.",
                    fix="Ask whoever runs `python -m jobs.swarm create`, and join again.",
                )
            if self.now() - said >= _SAY_EVERY:
                said = self.now()
                self.say(f"Still waiting for the swarm, since {_in_words(waited)}.")
            self._rest(min(pause, self.patience - waited))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return False

    def _rest(self, seconds: float) -> None:
        until = self.now() + seconds
        while (left := until - self.now()) > 0 and not self.stop_requested():
            self.sleep(min(left, _LOOK_SECONDS))


def _in_words(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class PeerSpec:
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
    spec: PeerSpec,
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
    ranks = spec.env if spec.team else replace(spec.env, rank=0, world_size=1)
    with (
        open_averager(dht, common, config.collaborative, run_id) as averager,
        distributed(ranks, use_gpu=wants_gpu(config), secret=spec.secret, collective_timeout=PATIENCE) as dist,
        spread(config, dist, splits, common, dht.peer_id) as team,
    ):
        if isinstance(common, GradientState):
            team = replace(team, parts=GatheringParts.of(team.parts, common.gathered))
        agreed = config.collaborative
        link = Link(
            common.theta.numel(), agreed.compression, agreed.round_seconds, patience(agreed), spec.max_upload, measured
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
    return rounds.train_by_samples(peer) if isinstance(peer.common, GradientState) else rounds.train_by_time(peer)


def peer_at(
    spec: PeerSpec,
    team: Team,
    common: CommonState,
    averaging: Averaging,
    dht: SwarmDHT,
    clock: RoundClock,
    watch: Watch,
    progress: Progress,
) -> Peer:
    """The peer of a spec; its creator adds what only a creator does."""
    return Peer(
        name=spec.name,
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
            say=spec.say,
            enforce=lambda banned: _shut_out(dht, banned),
            invitation_of=lambda peer: banned_with(dht.member(peer), peer, dht.peer_id),
            judges_reducers=dht.own.grant.role == "owner",
        ),
        data_seed=data_seed(team.parts.config, dht.peer_id),
        stop_requested=spec.stop_requested,
        progress=progress,
        beat=spec.beat,
        trains=spec.trains,
        addresses=() if spec.host is None else tuple(dht.addresses()),
    )


def _shut_out(dht: SwarmDHT, banned: Collection[str]) -> None:
    dht.admission.ban(banned)
    dht.publish_excluded()


@contextmanager
def kept(config: Config, writer: Writer, parts: TrainState, *, judges: bool) -> Iterator[tuple[Checkpoints, Logger]]:
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

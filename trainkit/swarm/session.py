"""What every peer of a swarm is made of: built step by step, and taken down in reverse."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit import plugins
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.distributed.process_group import distributed
from trainkit.models import build_model
from trainkit.monitor.hardware import sample_hardware
from trainkit.monitor.loggers import open_loggers
from trainkit.run.events import Remark, Writer
from trainkit.swarm import access
from trainkit.swarm.access import Identity
from trainkit.swarm.address import Memory, SavedPeer, keep_identity
from trainkit.swarm.admission import Admission
from trainkit.swarm.agreement import facts_of, meeting_place
from trainkit.swarm.average import Averaging, open_averager
from trainkit.swarm.bans import Sentry, banned_with
from trainkit.swarm.dht import SwarmDHT, Watch, open_dht
from trainkit.swarm.invitations import Pass
from trainkit.swarm.link import Link, patience
from trainkit.swarm.messages import RoundClock, UpdateClock
from trainkit.swarm.records import PeerRound, Role, RoundRecorder
from trainkit.swarm.spec import Hooks, PeerSpec
from trainkit.swarm.sync_diloco import CommonState, OuterState
from trainkit.swarm.sync_gradients import GatheringParts, GradientState
from trainkit.swarm.team import PATIENCE, Team, data_seed, spread
from trainkit.training.build import wants_gpu
from trainkit.training.recorder import Progress, Recorder

# Rounds without an average and without news of anybody after which the swarm is lost.
LOST_AFTER = 3


@dataclass
class Pace:
    """How a peer gets on; it outlives a loss of the swarm."""

    step_seconds: float = 0.0
    """How long an update takes, on average over the last few; 0: not known yet."""
    exchange_seconds: float = 0.0
    """How long the last exchange took."""
    rounds_alone: int = 0
    round_seconds: float = 0.0
    """How long the last round was, where it is not the clock that says so."""


class Session:
    """One peer's part in one run: all that the training loop works on.

    Each step needs those before it; what a step opens, ``held`` closes.
    """

    may_be_alone = False
    """A peer that others can reach waits for them where it is; to anybody else silence means that the swarm is gone."""

    config: Config
    identity: Identity
    dht: SwarmDHT
    splits: Splits
    common: CommonState
    facts: dict[str, str]
    clock: RoundClock
    watch: Watch
    memory: Memory
    team: Team
    averaging: Averaging
    sentry: Sentry
    data_seed: int
    """Every peer has a data order of its own, so that together they see more than each alone."""
    writer: Writer
    checkpoints: Checkpoints
    recorder: Recorder

    def __init__(self, held: ExitStack, spec: PeerSpec, hooks: Hooks) -> None:
        self.held, self.spec, self.hooks = held, spec, hooks
        self.progress, self.pace = Progress(), Pace()
        self.rounds: RoundRecorder | None = None

    def open_node(self, own: Pass, admission: Admission, identity: Path | None, peers: Sequence[str] = ()) -> None:
        """Come into the DHT of the swarm at ``peers``; of a new one without any."""
        spec = self.spec
        self.identity = self.held.enter_context(access.identity(identity, own, admission))
        node = open_dht(
            self.identity,
            peers=peers,
            host=spec.host,
            port=spec.port,
            announce=spec.announce,
            proven=not spec.must_prove,
        )
        self.dht = self.held.enter_context(node)

    def build_model(self, splits: Splits) -> None:
        """A model on the CPU, and what the peers have in common of it."""
        config, self.splits = self.config, splits
        model = build_model(config.model, splits.info, config.seed)
        if config.collaborative.sync == "gradients":
            self.common = GradientState(model, config)
        else:
            outer = config.collaborative
            self.common = OuterState(model, lr=outer.outer_lr, momentum=outer.outer_momentum)
        self.facts = facts_of(config, splits, model)

    def clock_from(self, first_round: int) -> RoundClock:
        """The clock of a run that began with that round."""
        agreed = self.config.collaborative
        if agreed.sync == "gradients":
            return UpdateClock(agreed.round_seconds, first_round, agreed.rounds, lambda: self.common.round)
        return RoundClock(agreed.round_seconds, first_round, agreed.rounds)

    def open_training(self, run_id: str, measured: float | None = None) -> None:
        """What trains here, and what agrees with the others.

        In this order: the averager's process is forked, which must be before CUDA is used for the first time.

        Args:
            measured: bytes per second that this peer can send, where that is too slow for all that there is to send.
        """
        config, spec, common, dht, enter = self.config, self.spec, self.common, self.dht, self.held.enter_context
        agreed = config.collaborative
        averager = enter(open_averager(dht, common, agreed, meeting_place(run_id, self.facts)))
        ranks = spec.env if spec.team else replace(spec.env, rank=0, world_size=1)
        joined = distributed(ranks, use_gpu=wants_gpu(config), secret=spec.secret, collective_timeout=PATIENCE)
        self.team = enter(spread(config, enter(joined), self.splits, common, dht.peer_id))
        if isinstance(common, GradientState):
            self.team = replace(self.team, parts=GatheringParts.of(self.team.parts, common.gathered))
        link = Link(
            common.theta.numel(), agreed.compression, agreed.round_seconds, patience(agreed), spec.max_upload, measured
        )
        self.averaging = Averaging(averager, dht, common, agreed, link)
        self.sentry = Sentry(
            self.averaging.averager,
            dht.excluded.bans,
            say=self.hooks.say,
            enforce=self._shut_out,
            invitation_of=lambda peer: banned_with(dht.member(peer), peer, dht.peer_id),
            judges_reducers=dht.own.grant.role == "owner",
        )
        self.data_seed = data_seed(config, dht.peer_id)

    def open_records(self, *, judges: bool) -> None:
        """Where checkpoints and metrics go.

        Loggers say which peers open them: a volunteer's machine writes no accounts of a service.
        """
        config, writer, parts = self.config, self.writer, self.team.judge
        wanted = ("all", "judge") if judges else ("all",)
        stated = {name: plugins.stated("trainkit.monitor", name) for name in config.monitor.loggers}
        names = tuple(name for name in stated if stated[name].get("PEERS", "all") in wanted)
        quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"loggers": names})})
        run, dist, every = writer.run, parts.dist, config.monitor.hardware_every_seconds
        metrics = self.held.enter_context(
            open_loggers(quiet, run, total_steps=0, params=parts.num_parameters, may_write=writer.check)
        )
        self.held.enter_context(sample_hardware(run, socket.gethostname(), every, dist.device.type))
        self.checkpoints = Checkpoints(
            run.checkpoints,
            keep=config.checkpoint.keep,
            dist=dist,
            may_write=writer.check,
            asynchronous=config.checkpoint.asynchronous,
        )
        self.held.enter_context(closing(self.checkpoints))
        self.held.push(self._settle)
        self.recorder = Recorder(parts, writer, self.checkpoints, metrics, self.progress, self.hooks.beat)

    def _settle(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:  # what was saved last must be on the disk before this peer says that it is done
            self.checkpoints.settle()

    def keep_place(self, run_id: str, addresses: list[str], *, is_anchor: bool = False) -> None:
        """Keep in the run folder how this peer comes back as the same one; then others may join through it."""
        spec = self.spec
        assert spec.host is not None
        keep_identity(self.writer.run, self.identity.path)
        place = SavedPeer(run_id, self.clock.first, spec.host, self.dht.port, spec.announce, spec.name, is_anchor)
        self.memory.keep_in(self.writer.run, place)
        self.hooks.opened(self.writer.run, addresses)

    def record(self, role: Role) -> RoundRecorder:
        """From now on keep records of the rounds, and of bans."""
        self.rounds = RoundRecorder(self, role)
        self.sentry = self.sentry.keeping(self.writer.run, self.rounds.remark)
        return self.rounds

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event."""
        if self.rounds is not None:
            self.rounds.remark(kind, **facts)

    def before_round(self) -> None:
        """Remember the peers that can be reached."""
        self.memory.note(self.watch.reachable())

    def after_round(self, done: PeerRound) -> None:
        """Take note of a round."""
        if self.rounds is not None:
            self.rounds.after_round(done)

    def _shut_out(self, banned: Collection[str]) -> None:
        self.dht.admission.ban(banned)
        self.dht.publish_excluded()

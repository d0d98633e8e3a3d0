"""Session of a peer: all that it is made of.

A *session* is built step by step, and taken down in reverse. Its ranks, if it has several GPUs, are one peer to the
swarm: rank 0 speaks for it, and alone knows the swarm, watches the clock, hears the signals and keeps the records.
Before every update it tells the others that there is one, and with which learning rate; they train with it by DDP, and
know nothing of rounds. Where the swarm has changed rank 0's weights, they get the very same bits before they go on.

What peers must have alike beyond the settings, or their averages would mean nothing, the creator publishes with the
run; a peer that joins compares it with its own before it averages with anybody.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.checkpoint.save import Checkpoints
from trainkit.common import terminal
from trainkit.config import plugins
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.distributed.process_group import distributed
from trainkit.models.library import build_model
from trainkit.monitor.base import open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.run.contributions import Counted
from trainkit.run.events import Attempt, Remark
from trainkit.swarm.identity.admission import remember
from trainkit.swarm.identity.bans import STRIKES, Ban, Bans, banned_with
from trainkit.swarm.identity.invitations import Pass, Role, credited
from trainkit.swarm.network import processes, signed_records, tunnel, wall_clock
from trainkit.swarm.network.dht import check_listening, open_dht
from trainkit.swarm.network.watch import PeerWatch
from trainkit.swarm.peer.averaging import Averaging, open_averager
from trainkit.swarm.peer.link import Link
from trainkit.swarm.peer.peer_ranks import data_seed, spread
from trainkit.swarm.peer.place import Hooks, PeerSpec, SavedPeer, keep_identity, write_addresses
from trainkit.swarm.peer.records import PeerRound, RoundRecorder, RoundRole
from trainkit.swarm.peer.same_run import facts_of, meeting_place
from trainkit.swarm.peer.trial import AverageTrial
from trainkit.swarm.protocol.addresses import known_of, peer_of
from trainkit.swarm.protocol.messages import RoundClock
from trainkit.swarm.protocol.outer_step import OuterState
from trainkit.swarm.trust.accounts import Journal, is_large
from trainkit.swarm.trust.reducers import Round
from trainkit.swarm.trust.screening import Action, Verdict
from trainkit.training.placement import wants_gpu
from trainkit.training.progress import Progress
from trainkit.training.recorder import Instruments, Recorder

PATIENCE = timedelta(hours=1)
"""Time for which ranks wait for rank 0, which validates, saves and meets others meanwhile. A death is noticed at
once.
"""
ASK_SECONDS = 10.0
"""Seconds for which a peer is asked for a state that does not begin or go on to arrive."""


# Rounds without an average and without news of anybody after which the swarm is lost.
LOST_AFTER = 3


class Session:
    """One peer's part in one run: all that the training loop works on.

    Each step needs those before it; what a step opens, ``held`` closes.
    """

    may_be_alone = False
    """A peer that others can reach waits for them where it is; to anybody else silence means that the swarm is gone."""

    config: Config
    clock: RoundClock
    watch: PeerWatch
    writer: Attempt
    others: tuple[str, ...] = ()
    """Addresses of peers to turn to when the swarm is lost, those that were reached last before the others."""
    place: SavedPeer | None = None
    """Place by which this peer comes back as the same one, as its run folder has it."""

    def __init__(self, held: ExitStack, spec: PeerSpec, hooks: Hooks) -> None:
        self.held = held
        self.spec = spec
        self.hooks = hooks
        self.say = hooks.say
        self.progress = Progress()
        self.rounds: RoundRecorder | None = None
        self.wall_clock = wall_clock.WallClock()
        # How it gets on, also when it has lost the swarm meanwhile.
        self.step_seconds = 0.0
        """Time that an update takes, on average over the last few; 0: not known yet."""
        self.exchange_seconds = 0.0
        """Time that the last exchange took."""
        self.rounds_alone = 0
        self.tunnel: tunnel.Tunnel | None = None
        """Tunnel to a creator behind a router: its own, or the one that an anchor carries."""
        self.journal: Journal | None = None
        """Journal of a volunteer, also when it has lost the swarm meanwhile."""

    def open_node(self, own: Pass, identity: Path | None, peers: Sequence[str] = ()) -> None:
        """Come into the DHT of the swarm at ``peers``; of a new one without any."""
        spec = self.spec
        # The file of a new key is needed while the node starts, and would stay behind a peer that is killed.
        with signed_records.identity(identity, own) as me:
            node = open_dht(me, spec.host, spec.port, spec.announce, peers=peers, proven=not spec.team)
            self.dht = self.held.enter_context(node)
        self.identity = me
        self.peer_id = self.dht.peer_id
        self.role: Role = own.grant.role
        self.bans: Bans = self.dht.excluded.bans
        """Bans, as far as this peer knows of them."""

    def open_tunnel(self, own: Pass) -> None:
        """Be reached through an anchor, or carry a creator that is."""
        spec = self.spec
        side: tunnel.Caller | tunnel.Carrier
        if spec.carries:
            check_listening("0.0.0.0", spec.carries)
            side = tunnel.Carrier(own.grant.owner, spec.carries)
        elif spec.is_carried:
            assert spec.announce is not None
            side = tunnel.Caller(spec.announce, own, spec.port)
        else:
            return
        self.tunnel = self.held.enter_context(tunnel.opened(side))

    def build_model(self, splits: Splits) -> None:
        """A model on the CPU, and what the peers have in common of it."""
        agreed = self.config.collaborative
        self.splits = splits
        model = build_model(self.config.model, splits.info, self.config.seed)
        self.common = OuterState(model, lr=agreed.outer_lr, momentum=agreed.outer_momentum)
        self.facts = facts_of(self.config, splits, model)

    def clock_from(self, first_round: int) -> RoundClock:
        """The clock of a run that began with that round."""
        agreed = self.config.collaborative
        return RoundClock(agreed.round_seconds, first_round, agreed.rounds)

    def open_training(self, run_id: str) -> None:
        """Open what trains here, and what agrees with the others.

        In this order: the averager's process is forked, which must be before a GPU is used for the first time.
        """
        config = self.config
        spec = self.spec
        common = self.common
        enter = self.held.enter_context
        agreed = config.collaborative
        averager = enter(open_averager(self.dht, common, config, meeting_place(run_id, self.facts)))
        ranks = spec.env if spec.team else replace(spec.env, rank=0, world_size=1)
        joined = distributed(ranks, use_gpu=wants_gpu(config), secret=spec.secret, collective_timeout=PATIENCE)
        self.team = enter(spread(config, enter(joined), self.splits, common, self.peer_id))
        link = Link(common.theta.numel(), agreed, spec.max_upload)
        self.averaging = Averaging(averager, self.dht, common, agreed, link)
        self.averaging.stop_requested = self.hooks.stop_requested
        if self.role == "owner" and len(self.splits.val):
            self.averaging.trial = AverageTrial(self.team.judge, common, agreed.round_seconds)
        self.sentry = Sentry(self)
        self.data_seed = data_seed(config, self.peer_id)

    def open_records(self, role: RoundRole) -> RoundRecorder:
        """Return where checkpoints, metrics and bans go; what keeps records of the rounds from now on.

        Loggers say which peers open them: a volunteer's machine writes no accounts of a service.
        """
        config = self.config
        may_write = self.writer.may_write
        run = self.writer.run
        judge = self.team.judge
        monitor = config.monitor
        who = {name: plugins.stated("trainkit.monitor", name).get("PEERS") for name in monitor.loggers}
        named = tuple(name for name in monitor.loggers if who[name] in (None, "all", role))
        quiet = config.model_copy(update={"monitor": monitor.model_copy(update={"loggers": named})})
        loggers = open_loggers(quiet, run, total_steps=0, params=judge.num_parameters, may_write=may_write)
        metrics = self.held.enter_context(loggers)
        host = socket.gethostname()
        self.held.enter_context(sample_hardware(run, host, monitor.hardware_every_seconds, judge.dist.device.type))
        # Behind training it would be three vectors more; this way it may take a tenth of the time.
        asynchronous = config.checkpoint.asynchronous and not is_large(self.common.theta.numel())
        saving = partial(Checkpoints, keep=config.checkpoint.keep, asynchronous=asynchronous)
        self.checkpoints = saving(run.checkpoints, dist=judge.dist, may_write=may_write)
        self.held.enter_context(closing(self.checkpoints))
        self.held.push(self._settle)
        tools = Instruments(self.hooks.beat)
        recorder = Recorder(judge, self.writer, self.checkpoints, metrics, self.progress, tools)
        self.rounds = RoundRecorder(self, recorder, self.common, role)
        self.bans.keep_in(run.path)
        return self.rounds

    def _settle(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:  # what was saved last must be on the disk before this peer says that it is done
            self.checkpoints.settle()

    def keep_place(self, run_id: str, addresses: list[str]) -> None:
        """Keep in the run folder how this peer comes back as the same one, and where others join through it."""
        spec = self.spec
        run = self.writer.run
        assert spec.host is not None
        keep_identity(run, self.identity.content)
        where = (spec.host, spec.port or self.dht.port, spec.announce, spec.name)
        self.place = SavedPeer(run_id, self.clock.first, *where, self.others, spec.is_carried)
        self.place.write(run)
        write_addresses(run, addresses)

    def remember(self, reachable: Sequence[str]) -> None:
        """Turn to these first when the swarm is lost. Those of before stay, for they may come back."""
        before = self.others
        self.others = known_of([*reachable, *self.others])
        if self.place is not None and set(self.others) != set(before):
            self.place = replace(self.place, others=self.others)
            with suppress(OSError):  # a full disk: what was known before is still there
                self.place.write(self.writer.run)

    def adopt(self, seconds: float, *, newer_than: int = -1, fits: Callable[[], bool] = lambda: True) -> bool:
        """Take over the state of the run; asks again for so long, until told to leave. False if nobody has given one.

        Args:
            newer_than: a state is of no use that is not of a later round.
            fits: whether one that was taken over will do.
        """
        deadline = time.monotonic() + seconds
        pause = 0.5
        while not self.hooks.stop_requested() and time.monotonic() < deadline:
            left = deadline - time.monotonic()
            patience = min(left, processes.at_load(ASK_SECONDS))
            if self.averaging.adopt(patience, newer_than=newer_than) and fits():
                return True
            # Asked by everybody at once, the few peers that give it away would do nothing else.
            time.sleep(min(pause, max(0.0, left)))
            pause = min(2 * pause, 8.0, self.clock.seconds / 4)
        return False

    def name_of(self, peer_id: str) -> str:
        """Return how another peer calls itself, or the end of its id."""
        known = self.watch.peers.get(peer_id)
        return terminal.name(known.name) if known is not None else f"..{peer_id[-6:]}"

    def undo(self, peers: Sequence[str]) -> None:
        """Take out of the weights what these have put into them; the best model so far has it, too."""
        if self.averaging.undo(peers):
            self.progress.forget_best()
            if self.rounds is not None:
                self.rounds.note_undone()

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event."""
        if self.rounds is not None:
            self.rounds.remark(kind, **facts)

    def hear(self) -> None:
        """Take in what the others say.

        Raises UserError when this machine's clock was set, and is not the swarm's any more.
        """
        self.averaging.require_helpers()
        if self.tunnel is not None:
            self.tunnel.require()
        jumped = self.wall_clock.jumped()
        if jumped:
            agrees = wall_clock.require_same_time(self.dht, self.others)
            if not agrees and self.may_be_alone:  # the others have gone by this clock as it was
                raise wall_clock.wrong_clock(f"was set {'forward' if jumped > 0.0 else 'back'} by {abs(jumped):,.1f} s")
        self.watch.poll()

    @property
    def has_moved(self) -> bool:
        """The run goes on by another clock. Clocks move on only, so that an old manifest moves nobody back."""
        return self.watch.first_round > self.clock.first

    def before_round(self) -> None:
        """Remember the peers that can be reached, and look for those of them that are silent.

        hivemind has forgotten them: the halves of a swarm whose network was cut for a while would stay two for ever.
        """
        self.remember(self.watch.reachable())
        heard = self.watch.others(time.time() - LOST_AFTER * self.clock.seconds)
        silent = [item for item in self.others if peer_of(item) not in heard]
        if silent:
            self.dht.look_for(silent)  # this does not wait

    def after_round(self, done: PeerRound) -> None:
        """Take note of a round."""
        if self.rounds is not None:
            self.rounds.after_round(done)

    def credit(self, counted: Collection[Counted]) -> None:
        """Take note of who has contributed to a round."""

    def withdraw(self, name: str) -> None:
        """Take back all that was noted of a name."""

    def shut_out(self, banned: Collection[str]) -> None:
        """Shut the door on exactly these ids, of peers or of invitations."""
        self.dht.admission.ban(banned)
        self.dht.publish_excluded()


# Of one round; a flood of liars must not become a flood of records.
_MOST_EVENTS = 20
_EVENTS: Mapping[Action, Remark] = {
    "dropped": "peer_dropped", "left out": "peer_left_out", "clipped": "peer_clipped", "audited": "peer_audited",
}  # fmt: skip


class Strikes:
    """Rounds in a row in which each peer's contribution was dropped."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, verdicts: Sequence[Verdict], took_part: Iterable[str]) -> dict[str, str]:
        """Take in a round. Peer id -> why, of those for whom it was one too many.

        Args:
            took_part: ids of all peers in the round; one that was not in it neither gains nor loses by it.
        """
        dropped = {verdict.peer: verdict.why for verdict in verdicts if verdict.action == "dropped"}
        left_out = {verdict.peer for verdict in verdicts if verdict.action == "left out"}
        for peer in {*took_part} - left_out - dropped.keys():
            self.counts.pop(peer, None)
        out = dict[str, str]()
        for peer, why in dropped.items():
            remember(self.counts, peer, self.counts.get(peer, 0) + 1)
            if self.counts[peer] >= STRIKES:
                del self.counts[peer]
                out[peer] = why
        return out


class Sentry:
    """Keeps watch over the rounds of one peer: events, strikes, bans, credit.

    Also who has averaged wrongly is banned, by the owner, who has trusted them.
    """

    def __init__(self, peer: Session) -> None:
        self._peer = peer
        self._began = time.time()
        self._as_senders = Strikes()
        self._as_reducers = Strikes()
        self._as_culprits = Strikes()
        """The last of refused rounds alone, so that nobody has better ones in between."""
        self._enforced: set[str] = set()
        self._invited: dict[str, str] = {}
        self._banned_with: dict[str, str] = {}
        """Invitations of peers in the rounds so far: of one that is shut out nobody knows its invitation any more."""

    def after_round(self, index: int, result: Round) -> None:
        """Take note of what the averager has found out in the round, and of what this peer makes of its ``result``."""
        self._invited = {}
        for found in self._peer.averaging.averager.findings():
            for peer in {*found.members} - self._banned_with.keys():
                remember(self._banned_with, peer, self._goes_with(peer))
            self._invited |= found.names
            counted = list[Counted]()
            for peer, samples in found.counted.items() if not result.refused else ():
                counted.append(Counted(self._name(peer), samples, found.received.get(peer, 0)))
            self._peer.credit(counted)
            self._tell(index, found.verdicts, "{} was left out of round {}")
            self._ban(index, self._as_senders.note(found.verdicts, found.members))
            if result.harmful is not None:
                self._tell(index, result.harmful, "{} has harmed round {}")
                self._ban(index, self._as_culprits.note(result.harmful, found.members))
        self._tell(index, result.untrue, "What {} has averaged in round {} is not used")
        untrue = self._as_reducers.note(result.untrue, result.outcome.sources)
        if self._peer.role == "owner":
            self._ban(index, untrue)
        self.look()

    def _goes_with(self, peer: str) -> str:
        return banned_with(self._peer.dht.member(peer), peer, self._peer.peer_id)

    def note_audit(self, index: int, verdict: Verdict) -> None:
        """Draw the consequences of an audit, of that round: what a peer has put into the weights that counts no more is
        taken out again; who has been false is out, and has contributed nothing."""
        self._tell(index, [verdict], "The audit of {} in round {}")
        if verdict.action == "left out":
            self._peer.undo([verdict.peer])
        elif verdict.action == "dropped":
            self._peer.withdraw(self._name(verdict.peer))
            self._ban(index, {verdict.peer: verdict.why}, "")

    def look(self) -> None:
        """Enforce the bans as they are by now: others pronounce them too, and a command lifts them. Cheap."""
        banned = self._peer.bans.read()
        if banned.keys() == self._enforced:
            return
        for ban in banned.values():
            if ban.id not in self._enforced and ban.time >= self._began:
                name = terminal.name(ban.name)
                why = terminal.one_line(ban.why, 200)
                self._peer.remark("peer_banned", peer=ban.id, name=name, why=why)
                self._peer.say(f"  {name} is banned by another peer of the owner's side: {why}")
        self._enforce(banned)

    def _enforce(self, banned: Collection[str]) -> None:
        self._peer.shut_out(banned)
        self._enforced = set(banned)

    def _name(self, peer: str) -> str:
        return terminal.name(credited(self._invited.get(peer, ""), self._peer.name_of(peer)))

    def _tell(self, index: int, verdicts: Sequence[Verdict], what: str) -> None:
        for verdict in verdicts[:_MOST_EVENTS]:
            name = self._name(verdict.peer)
            self._peer.remark(_EVENTS[verdict.action], peer=verdict.peer, name=name, why=verdict.why, round=index + 1)
            if verdict.action in ("dropped", "left out"):
                self._peer.say(f"  {what.format(name, index + 1)}: {verdict.why}")

    def _ban(self, index: int, out: Mapping[str, str], times: str = f" after {STRIKES} such rounds in a row") -> None:
        # First of all: of one that is shut out nobody knows its invitation.
        bans = {peer: self._banned_with.get(peer) or self._goes_with(peer) for peer in out}
        for peer, banned in bans.items():
            name = self._name(peer)
            why = out[peer]
            if not banned or banned in self._peer.bans.read():
                continue  # nobody can be banned with it; or it is, with another peer of its invitation
            self._peer.bans.add(Ban(banned, name, why))
            self._enforce(self._enforced | {banned})  # others' bans are told of by `look`
            self._peer.undo([one for one, its in self._banned_with.items() if its == banned])
            self._peer.remark("peer_banned", peer=peer, name=name, why=why, round=index + 1)
            self._peer.say(f"  {name} is banned{times}. To lift it: {terminal.command('swarm', 'unban', name)}")

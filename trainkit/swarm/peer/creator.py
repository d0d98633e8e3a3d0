"""The creator of a swarm, from its first message to its last. It also comes back after it was killed."""

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial

from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data.registry import build_data
from trainkit.run.contributions import Contributions, Counted
from trainkit.run.folder import SWARM_IDENTITY, RunDir
from trainkit.swarm.identity.invitations import Key
from trainkit.swarm.network import dht
from trainkit.swarm.network.watch import PeerWatch
from trainkit.swarm.peer import link, owner
from trainkit.swarm.peer.place import Hooks, PeerSpec, SavedPeer, addresses_in, saved_peer
from trainkit.swarm.peer.records import PeerRound, RoundRecorder, take_over
from trainkit.swarm.peer.rounds import NEWS_SECONDS, RoundsEnding, take_part
from trainkit.swarm.peer.same_run import provenance
from trainkit.swarm.peer.session import ASK_SECONDS, LOST_AFTER, Session
from trainkit.swarm.protocol.messages import CREDITS, MANIFEST, MOST_CREDITED, REVOKED, Manifest, RoundClock
from trainkit.training.progress import Progress

_DIAL_SECONDS = 30.0
# For which a creator that leaves a run to another one waits to hear where that is.
_MOVED_SECONDS = 20.0
# Seconds for which a creator that comes back asks what the others have reached without it.
_CATCH_UP_SECONDS = 10.0
_REACHED = "the anchor answers: from now on others reach this machine through it"
_CUT_OFF = "the anchor does not answer: until it does, nobody reaches this machine"


def elsewhere(addresses: Iterable[str], own: Sequence[str], peer_id: str) -> list[str]:
    """The addresses with this peer's own id that are not its own: another process would answer there."""
    here = {item.rpartition("/p2p/")[0] for item in own}
    there = (item for item in addresses if item.endswith(f"/p2p/{peer_id}"))
    return [item for item in there if item.rpartition("/p2p/")[0] not in here]


def require_alone(node: dht.SwarmDHT, known: Sequence[str]) -> None:
    """Refuse to go on with a run whose creator answers at another place.

    Args:
        known: where it has been before.

    Raises UserError.
    """
    before = dict.fromkeys(known)
    told = node.progress().get(node.peer_id)
    if told is not None:
        before |= dict.fromkeys(told.addresses)
    places = elsewhere(before, node.addresses(), node.peer_id)
    there = places and node.in_dht(partial(dht.reached, at=tuple(places)), _DIAL_SECONDS, [])
    if there:
        why = f"Its creator, with the key of this run folder, answers at {there[0]}: one of the folders is a copy."
        fix = "End that one with Ctrl-C, and copy its run folder here: it has the newer checkpoints."
        raise UserError("This run already continues on another machine.", why=why, fix=fix)


class Creator(Session):
    """The peer that starts a run, or goes on with that of ``spec.folder``; it judges, and keeps the records."""

    may_be_alone = True

    def __init__(self, held: ExitStack, config: Config, spec: PeerSpec, hooks: Hooks) -> None:
        super().__init__(held, spec, hooks)
        self.config = config
        self.own_addresses: list[str] = []
        self.since = time.time()
        self.has_unwritten = False
        self.is_reached = False
        """Through an anchor, if it is behind a router."""
        self.back_at = math.inf
        """The round with which it has come back, until somebody has averaged with it; else none."""
        self.saved: SavedPeer | None = None
        self.key = Key.generate()
        if spec.folder is not None:
            self.saved = saved_peer(spec.folder)
            self.key = owner.key_of(spec.folder.path)
        if self.saved is not None:
            self.others = self.saved.others
        self.rounds_alone = LOST_AFTER  # until somebody comes

    def open_swarm(self) -> None:
        """Start the first node, or come back to the others, unless the run goes on elsewhere."""
        folder = self.spec.folder
        file = self.spec.identity
        if file is None and folder is not None:
            file = SWARM_IDENTITY.at(folder.path)
        own = owner.own_pass(self.key, self.spec.name)
        self.open_tunnel(own)
        self.open_node(own, file)
        if folder is not None:
            self.dht.excluded.remember(folder.path, owner.revoked_in(folder.path))
            if self.saved is not None:
                self.dht.reconnect(self.saved.others)
                require_alone(self.dht, addresses_in(folder))

    def open_run(self) -> None:
        """The run folder, with rounds as long as this peer's upload needs, and the owner's key."""
        spec = self.spec
        values = self.common.theta.numel()
        if spec.max_upload is not None:
            agreed = link.fitted(self.config.collaborative, values, spec.max_upload)
            self.config = self.config.model_copy(update={"collaborative": agreed})
            self.say(link.creators_share(agreed, values, spec.max_upload))
        assert self.hooks.open_run is not None
        self.writer = self.hooks.open_run(self.config, "")
        run = self.writer.run
        owner.keep_key(run.path, self.key)
        self.credits = Contributions.of(run)
        # Unguessable, and the same for as long as the run lasts: survivors know by it that this is their swarm.
        self.run_id = f"{run.name}-{os.urandom(4).hex()}".replace(".", "-")
        if self.saved is not None:
            self.run_id = self.saved.run_id

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one. False when no round is left."""
        common = self.common
        accept = partial(take_over, common=common)
        found = self.checkpoints.restore(self.team.judge.model, None, extra=["common"], accept=accept)
        if found:
            self.progress.take_over(Progress.of(found.state))
        if common.round >= self.config.collaborative.rounds:
            return False
        if found:
            # A peer's own AdamW is in no checkpoint: it would be twice the weights in each, and begun anew
            # it made no difference that could be measured (tests/benchmarks/README.md).
            what = "weights, momentum and learning rate are restored; the optimizer within rounds starts fresh"
            self.say(f"Continues after round {common.round}: {what}.")
        return True

    def start_clock(self) -> None:
        """The run's clock.

        One that others have gone on by stays as it is; rounds that nobody trained in are made up.
        """
        agreed = self.config.collaborative
        common = self.common
        done = common.round
        if self.saved is not None:
            self.back_at = done
            if self.dht.reconnect(self.saved.others):
                self.clock = self.clock_from(self.saved.first_round)
                if self.averaging.adopt(_CATCH_UP_SECONDS, newer_than=done):
                    self.say(f"The others continued from round {done} to {common.round}; this peer follows.")
                if done < common.round >= self.clock.index(time.time()):
                    return
        self.clock = RoundClock.starting(time.time(), agreed.round_seconds, agreed.rounds, done=common.round)

    def admit_others(self, opened: Callable[..., None]) -> None:
        """Publish the run, and say where others join it; ``opened``: see `create`."""
        info = self.splits.info
        origin, needs = provenance(self.facts)
        owner.keep_needs(self.writer.run.path, needs)
        self.manifest = Manifest(
            run_id=self.run_id, name=self.writer.run.name, config=to_yaml(self.config), first_round=self.clock.first,
            num_classes=info.num_classes, in_chans=info.in_chans, image_size=info.image_size,
            owner=self.key.public.hex(), since=self.since, trains=self.spec.trains,
            facts=self.facts, origin=origin, needs=needs,
        )  # fmt: skip
        self.averaging.share()
        self.watch = PeerWatch(self.dht, self.dht.peer_id, self.clock.seconds)
        self.own_addresses = self.dht.addresses()
        self.publish(wait=True)
        before = addresses_in(self.writer.run)
        self.keep_place(self.run_id, self.own_addresses)
        opened(self.writer.run, self.own_addresses, moved=bool(before) and self.own_addresses[0] not in before)

    def publish(self, *, stopped: bool = False, wait: bool = False) -> None:
        """Tell the swarm of the run, and of the invitations that `swarm revoke` has ended in its folder."""
        revoked = owner.revoked_in(self.writer.run.path)
        if revoked:
            self.dht.excluded.hear(REVOKED, revoked)
            self.dht.publish_excluded()
        # From now on: a record only replaces one that would expire earlier.
        expires = self.clock.count * self.clock.seconds + 600.0
        self.dht.store(MANIFEST, asdict(replace(self.manifest, stopped=stopped)), expires, wait=wait)

    def hear(self) -> None:
        """Come back to what the others have reached, if somebody has kept it and the run folder has not."""
        super().hear()
        if self.tunnel is not None and self.tunnel.is_up != self.is_reached:
            self.is_reached = self.tunnel.is_up
            self.say(f"  {_REACHED if self.is_reached else _CUT_OFF}")
        if self.back_at == math.inf:
            return
        given = self.averaging.take_back(self.back_at)
        if given is not None:
            self.back_at = given
            self.remark("given_back", round=given)
            self.say(f"  another peer has returned the weights of round {given}; this peer continues from them")

    def after_round(self, done: PeerRound) -> None:
        """Take note of a round; whoever comes back after others is too late to give anything back."""
        super().after_round(done)
        if self.has_unwritten:
            self.keep_credits()
        if self.back_at < math.inf and done.result.used == "average":
            self.back_at = math.inf
            self.averaging.take_back(math.inf)

    def before_round(self) -> None:
        """Publish again, so that the manifest neither expires nor misses on new nodes."""
        super().before_round()
        self.publish()

    @property
    def has_moved(self) -> bool:
        """Another process goes on with this run, and has its key; it was started later, so it counts."""
        return self.watch.since > self.since

    def other_places(self) -> list[str]:
        """Return where another process with the key of this creator is, by what it has said."""
        told = self.watch.peers.get(self.dht.peer_id)
        if told is None:
            return []
        return elsewhere(told.addresses, self.own_addresses, self.dht.peer_id)

    def credit(self, counted: Collection[Counted]) -> None:
        """Count what the averager of this peer has averaged in a round, by name; over restarts of the run."""
        self.credits.add(self.clock.seconds, counted)
        self.keep_credits()
        self.dht.store(CREDITS, self.credits.rows()[:MOST_CREDITED], LOST_AFTER * self.clock.seconds + 60.0)

    def keep_credits(self) -> None:
        """Write the account; on a full disk, again after the next round, even if nobody is there any more."""
        self.writer.may_write()
        self.has_unwritten = True
        with suppress(OSError):
            self.credits.write(self.writer.run)
            self.has_unwritten = False

    def withdraw(self, name: str) -> None:
        """Take back what was counted of a name; written after the round."""
        self.credits.withdraw(name)
        self.has_unwritten = True

    def train(self, rounds: RoundRecorder) -> RoundsEnding:
        """Train until the last round, or until told to leave; keep the account and the results."""
        with rounds.recorded(self.spec.env):
            ending = take_part(self)
            self.leave(ending)
        if ending == "finished":
            rounds.finish("finished")
            self.writer.ended("COMPLETED", step=self.progress.step)
        elif not self.spec.goes_on_later:
            rounds.finish("stopped", test=False)  # a user who presses Ctrl-C does not want to wait
        return ending

    def leave(self, ending: RoundsEnding) -> None:
        """Stay until the others can do without this peer."""
        if ending == "moved":
            # Its manifest comes first; until it has trained a round, this creator's own addresses stand under their id.
            until = time.monotonic() + _MOVED_SECONDS
            while not self.other_places() and time.monotonic() < until:
                time.sleep(NEWS_SECONDS)
                self.watch.poll()
            place = terminal.one_line([*self.other_places(), "another place"][0])
            self.say(f"A creator with the key of this run was started later, at {place}. This one leaves the run.")
        if ending == "finished":
            # The others may still be fetching their part of the last round's average from this peer.
            time.sleep(max(0.0, self.clock.end + 2.0 - time.time()))
        if ending != "stopped":
            return
        self.publish(stopped=True, wait=True)
        # Who has just slept has heard of nobody for a while, and still has others.
        if self.rounds_alone < LOST_AFTER or self.watch.others(time.time() - LOST_AFTER * self.clock.seconds):
            # With this peer the news would vanish; and who takes over the state hears it afterwards.
            deaf = min(self.clock.seconds / 2, ASK_SECONDS)
            time.sleep(4 * NEWS_SECONDS + self.watch.pause + deaf)


def create(config: Config, spec: PeerSpec, hooks: Hooks, opened: Callable[..., None]) -> tuple[RoundsEnding, RunDir]:
    """Start a swarm, or go on with that of ``spec.folder``; train in it until the last round, and keep its records.

    Args:
        opened: called once others can join, with the run folder, the addresses, best first, and whether it has
            ``moved``: others may know another place.
    """
    hooks.step("read the data")
    splits = build_data(config.data)
    with ExitStack() as held:
        creator = Creator(held, config, spec, hooks)
        hooks.step("start the first node of the swarm")
        creator.open_swarm()
        hooks.step("build the model")
        creator.build_model(splits)
        creator.open_run()
        hooks.step("start the averager")
        creator.open_training(creator.run_id)
        rounds = creator.open_records("judge")
        ending: RoundsEnding = "finished"
        if creator.restore():
            creator.start_clock()
            creator.admit_others(opened)
            hooks.step("")
            ending = creator.train(rounds)
    return ending, creator.writer.run

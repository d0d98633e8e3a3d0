"""The creator of a swarm, from its first message to its last; also one that comes back after it was killed."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial

from trainkit import terminal
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Contributions, Counted
from trainkit.swarm import address, admission, dht, link
from trainkit.swarm.invitations import Key
from trainkit.swarm.messages import CREDITS, MANIFEST, MOST_CREDITED, REVOKED, Manifest, PeerProgress, RoundClock
from trainkit.swarm.records import take_over
from trainkit.swarm.rounds import NEWS_SECONDS, Ending, take_part
from trainkit.swarm.session import LOST_AFTER, Session
from trainkit.swarm.spec import Hooks, PeerSpec, check_peer
from trainkit.training.recorder import Progress

_DIAL_SECONDS = 30.0
# Seconds for which a creator that comes back asks what the others have reached without it.
_CATCH_UP_SECONDS = 10.0


def elsewhere(addresses: Iterable[str], own: Sequence[str], peer_id: str) -> list[str]:
    """The addresses with this peer's own id that are not its own: another process would answer there."""
    here = {item.rpartition("/p2p/")[0] for item in own}
    others = [item for item in addresses if address.peer_of(item) == peer_id]
    return [item for item in others if item.rpartition("/p2p/")[0] not in here]


def require_alone(node: dht.SwarmDHT, known: Sequence[str]) -> None:
    """Refuse to go on with a run whose creator answers at another place.

    Args:
        known: where it has been before.

    Raises UserError.
    """
    told = node.progress().get(node.peer_id)
    before = dict.fromkeys([*known, *(told.addresses if told else ())])
    places = elsewhere(before, node.addresses(), node.peer_id)
    there: list[str] = node.in_dht(partial(dht.reached, at=tuple(places)), _DIAL_SECONDS, []) if places else []
    if there:
        why = f"Its creator, with the key of this run folder, answers at {there[0]}: one of the folders is a copy."
        fix = "End that one with Ctrl-C, and copy its run folder here: it has the newer checkpoints."
        raise UserError("This run goes on already, on another machine.", why=why, fix=fix)


class Creator(Session):
    """The peer that starts a run, or goes on with that of ``spec.folder``; it judges, and keeps the records."""

    may_be_alone = True

    def __init__(self, held: ExitStack, config: Config, spec: PeerSpec, hooks: Hooks) -> None:
        super().__init__(held, spec, hooks)
        self.config, folder = config, spec.folder
        self.own_addresses: list[str] = []
        self.since, self.has_warned = 0.0, False
        self.saved = address.saved_peer(folder) if folder is not None else None
        self.memory = address.Memory(self.saved.others if self.saved is not None else ())
        self.key = admission.key_of(folder.path) if folder is not None else Key.generate()

    def open_swarm(self) -> None:
        """Start the first node, or come back to the others, unless the run goes on elsewhere."""
        spec, folder, key = self.spec, self.spec.folder, self.key
        file = spec.identity or (address.identity_in(folder) if folder is not None else None)
        own, is_open = admission.own_pass(key, spec.name), self.config.collaborative.open
        self.open_node(own, admission.Admission(key.public, open_run=is_open), file)
        if folder is not None:
            self.dht.excluded.remember(folder.path)
            if self.saved is not None:
                self.dht.reconnect(self.saved.others)
                require_alone(self.dht, address.addresses_in(folder))

    def open_run(self) -> None:
        """The run folder, with rounds as long as this peer's upload needs, and the owner's key."""
        spec, values = self.spec, self.common.theta.numel()
        if spec.max_upload is not None:
            agreed = link.fitted(self.config.collaborative, values, spec.max_upload)
            self.config = self.config.model_copy(update={"collaborative": agreed})
            self.hooks.say(link.creators_share(agreed, values, spec.max_upload))
        assert self.hooks.open_run is not None
        self.writer = self.hooks.open_run(self.config, "")
        run = self.writer.run
        admission.keep_key(run.path, self.key)
        self.credits = Contributions.of(run)
        # Unguessable, and the same for as long as the run lasts: survivors know by it that this is their swarm.
        new = f"{run.name}-{os.urandom(4).hex()}".replace(".", "-")
        self.run_id = self.saved.run_id if self.saved is not None else new

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one. False when no round is left."""
        common, accept = self.common, partial(take_over, common=self.common)
        found = self.checkpoints.restore(self.team.judge.model, None, extra=["common"], accept=accept)
        if found:
            self.progress.take_over(Progress.of(found.state))
        if common.round >= self.config.collaborative.rounds:
            return False
        if found:
            # A peer's own AdamW, of diloco, is in no checkpoint: it would be twice the weights in each, and begun anew
            # it made no difference that could be measured (tests/benchmarks/README.md).
            anew = "" if common.same_weights else "; the optimizer within rounds begins anew"
            what = "weights, momentum and learning rate as they were"
            self.hooks.say(f"Goes on after round {common.round}: {what}{anew}.")
        return True

    def start_clock(self) -> None:
        """The run's clock.

        One that others have gone on by stays as it is; rounds that nobody trained in are made up.
        """
        agreed, common, saved, done = self.config.collaborative, self.common, self.saved, self.common.round
        if saved is not None and self.dht.reconnect(address.known_of(saved.others)):
            self.clock = self.clock_from(saved.first_round)
            if self.averaging.adopt(_CATCH_UP_SECONDS, newer_than=done):
                self.hooks.say(f"The others have gone on from round {done} to {common.round}; so does this peer.")
            if done < common.round >= self.clock.index(time.time()):
                return
        if agreed.sync == "gradients":  # nothing is agreed by the time
            self.clock = self.clock_from(0)
        else:
            self.clock = RoundClock.starting(time.time(), agreed.round_seconds, agreed.rounds, done=common.round)

    def admit_others(self) -> None:
        """Publish the run, and say where others join it."""
        info, config = self.splits.info, self.config
        self.manifest = Manifest(
            run_id=self.run_id,
            name=self.writer.run.name,
            config=to_yaml(config),
            first_round=self.clock.first,
            owner=self.key.public.hex(),
            num_classes=info.num_classes,
            in_chans=info.in_chans,
            image_size=info.image_size,
            open_run=config.collaborative.open,
            facts=self.facts,
        )
        self.averaging.share()
        self.watch = dht.Watch(self.dht, self.dht.peer_id, self.clock.oldest_news)
        self.own_addresses, self.since = self.dht.addresses(self.spec.prefer_host), time.time()
        self.publish(wait=True)
        self.keep_place(self.run_id, self.own_addresses)

    def publish(self, *, stopped: bool = False, wait: bool = False) -> None:
        """Tell the swarm of the run, and of the invitations that `swarm revoke` has ended in its folder."""
        if revoked := admission.revoked_in(self.writer.run.path):
            self.dht.excluded.hear(REVOKED, revoked)
            self.dht.publish_excluded()
        # From now on: a record only replaces one that would expire earlier.
        expires = self.clock.count * self.clock.seconds + 600.0
        self.dht.store(MANIFEST, asdict(replace(self.manifest, stopped=stopped)), expires, wait=wait)

    def before_round(self) -> None:
        """Publish again, so that the manifest neither expires nor misses on new nodes; look for a duplicate."""
        super().before_round()
        self.publish()
        self.warn_of_duplicate(self.watch.peers.get(self.dht.peer_id))

    def warn_of_duplicate(self, told: PeerProgress | None) -> None:
        """Say it once if another creator, with a copy of the run folder and so its key, leads a swarm of its own.

        Args:
            told: what the swarm knows of this peer; before ``since`` this run said so itself, in another process.
        """
        if self.has_warned or told is None or told.time <= self.since:
            return
        own = self.own_addresses
        if there := elsewhere(told.addresses, own, address.peer_of(own[0])):
            self.has_warned = True
            place = terminal.one_line(there[0])
            self.hooks.say(
                f"  another machine goes on with this run and its key, at {place}: two swarms come of it. "
                "End one of the two with Ctrl-C"
            )

    def credit(self, counted: Iterable[Counted]) -> None:
        """Count what the averager of this peer has averaged in a round, by name; over restarts of the run."""
        seconds = self.clock.seconds
        self.credits.add(self.pace.round_seconds or seconds, counted)
        self.writer.check()
        with suppress(OSError):  # a full disk; the next round writes all of it again
            self.credits.write(self.writer.run)
        self.dht.store(CREDITS, self.credits.rows()[:MOST_CREDITED], LOST_AFTER * seconds + 60.0)

    def train(self) -> Ending:
        """Train until the last round, or until told to leave; keep the account and the results."""
        rounds = self.record("judge")
        self.sentry.credit = self.credit
        with rounds.recorded(self.spec.env):
            ending = take_part(self)
            self.leave(ending)
        if ending == "finished":
            rounds.finish("finished")
            self.writer.attempt.ended("COMPLETED", step=self.progress.step)
        elif not self.spec.goes_on_later:
            rounds.finish("stopped", test=False)  # a user who presses Ctrl-C does not want to wait
        return ending

    def leave(self, ending: Ending) -> None:
        """Stay until the others can do without this peer."""
        if ending != "stopped":
            # The others may still be fetching their part of the last round's average from this peer.
            time.sleep(max(0.0, self.clock.end + 2.0 - time.time()))
            return
        self.publish(stopped=True, wait=True)
        if self.watch.others(time.time() - LOST_AFTER * self.clock.seconds):
            time.sleep(4 * NEWS_SECONDS + self.watch.pause)  # with this peer the news would vanish


def create(config: Config, spec: PeerSpec, hooks: Hooks) -> tuple[Ending, RunDir]:
    """Start a swarm, or go on with that of ``spec.folder``; train in it until the last round, and keep its records."""
    check_peer(config, spec)
    splits = build_data(config.data)
    with ExitStack() as held:
        creator = Creator(held, config, spec, hooks)
        creator.open_swarm()
        creator.build_model(splits)
        creator.open_run()
        creator.open_training(creator.run_id)
        creator.open_records(judges=True)
        ending: Ending = "finished"
        if creator.restore():
            creator.start_clock()
            creator.admit_others()
            ending = creator.train()
    return ending, creator.writer.run

"""The creator of a swarm and the peers that join it, each from its first message to its last.

A creator also comes back after it was killed; a peer that loses the swarm comes back into it.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial

from trainkit import fileio, terminal
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RefusedError, RunFailedError, UserError
from trainkit.run import snapshot
from trainkit.run.events import Attempt
from trainkit.run.folder import SWARM_CODE, SWARM_IDENTITY, RunDir
from trainkit.run.metrics import Contributions, Counted, read_metrics
from trainkit.swarm import address, admission, average, dht, messages, session
from trainkit.swarm.address import Hooks, PeerSpec
from trainkit.swarm.admission import Entry
from trainkit.swarm.exchange import read_digest
from trainkit.swarm.invitations import Key, UntrustedError
from trainkit.swarm.messages import CREDITS, MANIFEST, MOST_CREDITED, REVOKED, Manifest, RoundClock
from trainkit.swarm.records import PeerRound, RoundRecorder, take_over
from trainkit.swarm.rounds import NEWS_SECONDS, Ending, take_part
from trainkit.swarm.session import ASK_SECONDS, LOST_AFTER, TRIED, Session, provenance, require_same, without_data
from trainkit.training.recorder import Progress

_DIAL_SECONDS = 30.0
# For which a creator that leaves a run to another one waits to hear where that is.
_MOVED_SECONDS = 20.0
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
        self.since, self.has_unwritten = time.time(), False
        self.back_at = math.inf
        """The round with which it has come back, until somebody has averaged with it; else none."""
        self.saved = address.saved_peer(folder) if folder is not None else None
        self.others = self.saved.others if self.saved is not None else ()
        self.key = admission.key_of(folder.path) if folder is not None else Key.generate()
        self.rounds_alone = LOST_AFTER  # until somebody comes

    def open_swarm(self) -> None:
        """Start the first node, or come back to the others, unless the run goes on elsewhere."""
        spec, folder, key = self.spec, self.spec.folder, self.key
        file = spec.identity or (SWARM_IDENTITY.at(folder.path) if folder is not None else None)
        self.open_node(admission.own_pass(key, spec.name), admission.Admission(key.public), file)
        if folder is not None:
            self.dht.excluded.remember(folder.path)
            if self.saved is not None:
                self.dht.reconnect(self.saved.others)
                require_alone(self.dht, address.addresses_in(folder))

    def open_run(self) -> None:
        """The run folder, with rounds as long as this peer's upload needs, and the owner's key."""
        spec, values = self.spec, self.common.theta.numel()
        if spec.max_upload is not None:
            agreed = average.fitted(self.config.collaborative, values, spec.max_upload)
            self.config = self.config.model_copy(update={"collaborative": agreed})
            self.hooks.say(average.creators_share(agreed, values, spec.max_upload))
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
            # A peer's own AdamW is in no checkpoint: it would be twice the weights in each, and begun anew
            # it made no difference that could be measured (tests/benchmarks/README.md).
            what = "weights, momentum and learning rate as they were; the optimizer within rounds begins anew"
            self.hooks.say(f"Goes on after round {common.round}: {what}.")
        return True

    def start_clock(self) -> None:
        """The run's clock.

        One that others have gone on by stays as it is; rounds that nobody trained in are made up.
        """
        agreed, common, saved, done = self.config.collaborative, self.common, self.saved, self.common.round
        self.back_at = done if saved is not None else math.inf
        if saved is not None and self.dht.reconnect(saved.others):
            self.clock = self.clock_from(saved.first_round)
            if self.averaging.adopt(_CATCH_UP_SECONDS, newer_than=done):
                self.hooks.say(f"The others have gone on from round {done} to {common.round}; so does this peer.")
            if done < common.round >= self.clock.index(time.time()):
                return
        self.clock = RoundClock.starting(time.time(), agreed.round_seconds, agreed.rounds, done=common.round)

    def admit_others(self, opened: Callable[..., None]) -> None:
        """Publish the run, and say where others join it; ``opened``: see `create`."""
        info, config = self.splits.info, self.config
        origin, needs = provenance(self.facts)
        admission.keep_needs(self.writer.run.path, needs)
        code = self.give_code() if config.collaborative.give_code else ""
        self.manifest = Manifest(
            run_id=self.run_id,
            name=self.writer.run.name,
            config=to_yaml(config),
            first_round=self.clock.first,
            since=self.since,
            owner=self.key.public.hex(),
            num_classes=info.num_classes,
            in_chans=info.in_chans,
            image_size=info.image_size,
            facts=self.facts,
            origin=origin,
            needs=needs,
            code=code,
            trains=self.spec.trains,
        )
        self.averaging.share()
        self.watch = dht.Watch(self.dht, self.dht.peer_id, self.clock.seconds)
        self.own_addresses = self.dht.addresses()
        self.publish(wait=True)
        before = address.addresses_in(self.writer.run)
        self.keep_place(self.run_id, self.own_addresses)
        opened(self.writer.run, self.own_addresses, moved=bool(before) and self.own_addresses[0] not in before)

    def give_code(self) -> str:
        """From now on give members the code of this run; its digest."""
        archive = snapshot.archived(self.writer.run, self.config.plugin_names())
        if len(archive) > dht.LONGEST_CODE:
            why = f"Packed, it has {terminal.size(len(archive))}; {terminal.size(dht.LONGEST_CODE)} can be given."
            fix = "Start it in a folder that has no Python files but those of the run."
            raise UserError("The code of this run is too large to give away.", why=why, fix=fix)
        file = SWARM_CODE.at(self.writer.run.path)
        fileio.write(file, archive, self.writer.run.path)
        self.dht.in_dht(partial(dht.serve_code, file=file), dht.CODE_SECONDS, None)
        return hashlib.sha256(archive).hexdigest()

    def publish(self, *, stopped: bool = False, wait: bool = False) -> None:
        """Tell the swarm of the run, and of the invitations that `swarm revoke` has ended in its folder."""
        if revoked := admission.revoked_in(self.writer.run.path):
            self.dht.excluded.hear(REVOKED, revoked)
            self.dht.publish_excluded()
        # From now on: a record only replaces one that would expire earlier.
        expires = self.clock.count * self.clock.seconds + 600.0
        self.dht.store(MANIFEST, asdict(replace(self.manifest, stopped=stopped)), expires, wait=wait)

    def hear(self) -> None:
        """Come back to what the others have reached, if somebody has kept it and the run folder has not."""
        super().hear()
        if self.back_at < math.inf and (given := self.averaging.take_back(self.back_at)) is not None:
            self.back_at = given
            self.remark("given_back", round=given)
            self.hooks.say(f"  another peer has given back the weights of round {given}; this peer goes on from them")

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
        """Where another process with the key of this creator is, by what it has said."""
        told = self.watch.peers.get(self.dht.peer_id)
        return elsewhere(told.addresses, self.own_addresses, self.dht.peer_id) if told is not None else []

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

    def train(self, rounds: RoundRecorder) -> Ending:
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

    def leave(self, ending: Ending) -> None:
        """Stay until the others can do without this peer."""
        if ending == "moved":
            # Its manifest comes first; until it has trained a round, this creator's own addresses stand under their id.
            until = time.monotonic() + _MOVED_SECONDS
            while not (there := self.other_places()) and time.monotonic() < until:
                time.sleep(NEWS_SECONDS)
                self.watch.poll()
            place = terminal.one_line(there[0]) if there else "another place"
            self.hooks.say(
                f"A creator with the key of this run was started later, at {place}. This one leaves the run."
            )
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


def create(config: Config, spec: PeerSpec, hooks: Hooks, opened: Callable[..., None]) -> tuple[Ending, RunDir]:
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
        hooks.step("start what averages with others")
        creator.open_training(creator.run_id)
        rounds = creator.open_records("judge")
        ending: Ending = "finished"
        if creator.restore():
            creator.start_clock()
            creator.admit_others(opened)
            hooks.step("")
            ending = creator.train(rounds)
    return ending, creator.writer.run


# A peer that joins.

_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
_LOOK_SECONDS = 0.5
# Seconds for which a newcomer asks for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0
_MOST_SIGNED = 8
_TRIED = "What this peer learns waits until the creator has trained some of it again, and agrees."
_ASK_THE_CREATOR = "Ask whoever runs `python -m jobs.swarm create`, and join again."


class Guest(Session):
    """A peer that has come into the swarm by ``entry``, and comes back into it."""

    manifest: Manifest

    def __init__(self, held: ExitStack, entry: Entry, spec: PeerSpec, hooks: Hooks) -> None:
        super().__init__(held, spec, hooks)
        self.entry, self.may_be_alone = entry, not spec.trains
        self.others = address.known_of(entry.addresses)
        self.signed: dict[str, bytes] = {}
        """Hash of a state -> what the owner's side has said of it; the newest."""
        self.other = ""
        """In which libraries it differs from the run, in words."""
        self.counts = False
        """Though they differ: an audit has agreed."""

    def hear(self) -> None:
        """Keep what proves to a creator that comes back what the run's state is; and take note of what audits say of
        other libraries.

        Raises RefusedError if those train otherwise.
        """
        super().hear()
        standing = self.averaging.averager.standing
        if self.other and standing == "differs":
            why = f"{self.other}: what this peer has trained, the creator has trained twice to something else."
            fix = self.manifest.way_to(TRIED) or "Install the creator's versions."
            raise RefusedError("The libraries of this peer train otherwise than the run's.", why=why, fix=fix)
        if self.other and self.counts != (standing == "counts"):
            self.counts = not self.counts
            self.hooks.say("  an audit agrees with this peer: from now on it counts" if self.counts else f"  {_TRIED}")
        for statement in {told.signed for told in self.watch.peers.values()} - {b"", *self.signed.values()}:
            with suppress(UntrustedError):
                digest = read_digest(self.dht.admission, statement, run_id=self.averaging.averager.run_id)
                admission.remember(self.signed, digest.sha256, statement, _MOST_SIGNED)

    def prove_reachable(self) -> None:
        """Have this peer dialled back; one that cannot be reached only calls out.

        Raises UserError for a peer that would be of no use so.
        """
        spec, say, seen = self.spec, self.hooks.say, self.dht.prove(self.entry.addresses)
        if seen.reached:
            say(f"Others reach this machine: it was dialled back at {', '.join(seen.reached)}.")
            return
        what, fix = "Others cannot reach this machine", address.FORWARD.format(port=self.dht.port)
        why = f"it was dialled at {', '.join(seen.tried)}, in vain" if seen.tried else "nobody could dial it back"
        if not spec.trains:
            raise UserError(f"{what}, so it cannot be an anchor.", why=f"{why[0].upper()}{why[1:]}.", fix=fix)
        say(f"{what}: {why}. It takes part as a peer that only calls out.\n  {fix}")
        self.spec = replace(spec, host=None)

    def read_manifest(self, adapt: Callable[[Manifest], Config]) -> None:
        """What the run is; ``adapt`` makes this machine's configuration of it."""
        self.creator, manifest = dht.read_manifest(self.dht, self.entry.addresses)
        self.manifest = manifest
        address.require_same_time(self.dht, self.entry.addresses)
        self.config = adapt(manifest)
        messages.require_going_on(manifest, self.config.collaborative)
        self.clock = self.clock_from(manifest.first_round)

    def require_same_run(self) -> None:
        """Refuse to train something else than the run does, once there is a model."""
        theirs, values, limit = self.manifest.facts, self.common.theta.numel(), self.spec.max_upload
        if limit is not None:
            self.hooks.say(average.in_words(average.load_for(limit, values, self.config.collaborative), limit))
        if not self.spec.trains:
            self.facts = without_data(self.facts, theirs, self.config)
        is_volunteer = self.spec.trains and self.entry.own.grant.role == "volunteer"
        why_not = session.untried(self.manifest, values, is_volunteer=is_volunteer)
        if other := require_same(theirs, self.facts, self.manifest, why_not):
            self.hooks.say(f"{other}. {_TRIED}")
        self.other, self.facts = other, theirs  # by which peers find each other

    def train(self, writer: Attempt) -> Ending:
        """Train until the run is over, and keep this peer's own records."""
        self.writer, progress = writer, self.progress
        if records := read_metrics(writer.run, "train"):  # a guest has no checkpoint: its records say where it was
            progress.step = progress.position = records[-1]["step"]
            progress.images = round(records[-1].get("epoch", 0.0) * len(self.splits.train))
        self.hooks.say(f"Run: {writer.run.path}")
        if not self.spec.trains and self.spec.host is not None:
            here = self.dht.addresses()
            self.keep_place(self.manifest.run_id, here)
            # Not the token itself: this goes into the log.
            lines = [terminal.command("join", "TOKEN", item) for item in here]
            self.hooks.say("\n  ".join(["Others join through this machine, too:", *lines]))
        rounds = self.open_records("guest" if self.spec.trains else "anchor")
        with rounds.recorded(self.spec.env):
            ending = self.take_part()
        if ending != "stopped":
            if progress.step:
                rounds.finish("finished" if ending == "finished" else "stopped")
            writer.ended("COMPLETED", step=progress.step)
        return ending

    def take_part(self) -> Ending:
        """Train until the run is over; wait for a swarm that is lost, and go on by the clock that it then has."""
        # Last of all: the state of a round is of use until that round ends.
        self.hooks.step("fetch the weights of the run")
        if not self._adopt(self.clock, _ADOPT_SECONDS) and not self.hooks.stop_requested():
            self.hooks.step("")
            self.hooks.say("No peer gives away the weights of the run: those that could are gone, or overloaded.")
            if not self.wait_until_back() or self.watch.stopped:
                return "ended" if self.watch.stopped else "stopped"
        self.hooks.step("")
        self._say_round("Joined {}")
        self.averaging.share()
        while (ending := take_part(self)) in ("lost", "moved"):
            rounds = self.rounds if ending == "lost" else None
            if rounds is not None:
                rounds.lost()
            is_back = self.wait_until_back()
            if self.watch.stopped or not is_back:
                return "ended" if self.watch.stopped else "stopped"
            if rounds is not None:
                rounds.remark("swarm_back", round=self.common.round)
            self._say_round("Back in {},")
        # This machine's clock alone may say so.
        if ending == "finished" and self.common.round < self.clock.count - LOST_AFTER:
            address.require_same_time(self.dht, self.others)
        return ending

    def wait_until_back(self) -> bool:
        """Look for the swarm, less and less often, until it goes on with this peer or has ended. False when told to
        leave.

        Who answers may not be ready yet: a creator that has just come back.

        Raises RunFailedError when nobody has answered for as long as this peer is patient.
        """
        patience, pause, ask_at = self.spec.patience, _FIRST_PAUSE, 0.0
        deadline = time.monotonic() + patience
        while not self.hooks.stop_requested():
            if (now := time.monotonic()) >= ask_at:
                if self.dht.reconnect(self.others):
                    address.require_same_time(self.dht, self.others)
                    if self.finds_run() or self.watch.stopped:
                        return True
                if now >= deadline:
                    what = f"The swarm has not answered for {terminal.age(patience)}."
                    why = "Its creator has gone without a word, or this machine has lost its network."
                    kept = f"Round {self.common.round} is kept in {self.writer.run.path}. " if self.rounds else ""
                    raise RunFailedError(what, why=why, fix=f"{kept}{_ASK_THE_CREATOR}")
                if not ask_at:
                    until = f"Waiting for it for up to {terminal.age(patience)}; Ctrl-C leaves for good."
                    self.hooks.say(f"Nobody of the swarm answers. {until}")
                ask_at, pause = min(now + pause, deadline), min(1.5 * pause, _LONGEST_PAUSE)
            time.sleep(_LOOK_SECONDS)
        return False

    def finds_run(self) -> bool:
        """Take over the clock and the state of the peers that answer; False if they have none to give, yet.

        Raises RefusedError when this peer is out of it, or the run is not what it was when this peer has joined it.
        """
        self.dht.require_welcome()
        # It has been silent meanwhile, and a creator that has come back gives nothing to strangers.
        self.dht.introduce_myself(dht.INTRODUCED_SECONDS, wait=True)
        self.watch.poll()
        manifest = max(self.dht.manifests().values(), key=lambda one: one.first_round, default=None)
        if self.watch.stopped or manifest is None or manifest.first_round < self.clock.first:
            return False
        require_same(manifest.facts, self.manifest.facts, manifest)
        clock = self.clock_from(manifest.first_round)
        if clock.first > self.clock.first:  # its creator has come back, maybe with an older folder
            self.averaging.give_back(self.watch.creator, self.signed)
        if not self._adopt(clock):
            return False
        self.clock = clock
        return True

    def _say_round(self, where: str) -> None:
        number = self.clock.index(time.time()) + 1
        self.hooks.say(f"{where.format(self.manifest.name)} in round {number}/{self.clock.count}.")

    def _adopt(self, clock: RoundClock, seconds: float = 0.0) -> bool:
        """Take over the state of the present round, for the next one ends it; waits two rounds for it at least."""
        return self.adopt(max(seconds, 2 * clock.seconds), fits=lambda: self.common.round >= clock.index(time.time()))


def join(
    entry: Entry, spec: PeerSpec, hooks: Hooks, adapt: Callable[[Manifest], Config]
) -> tuple[Ending, RunDir | None]:
    """Join the swarm that ``entry`` leads to, and train in it until it ends.

    Args:
        adapt: the configuration for this machine, from the manifest's.
    """
    with ExitStack() as held:
        guest = Guest(held, entry, spec, hooks)
        hooks.step("look for the swarm")
        guest.open_node(entry.own, entry.admission(), spec.identity, entry.addresses)
        if spec.team and spec.host is not None:
            hooks.step("ask others whether they reach this machine")
            guest.prove_reachable()
        hooks.step("ask what the run is")
        guest.read_manifest(adapt)
        config, manifest = guest.config, guest.manifest
        hooks.step("read the data and build the model")
        try:
            guest.build_model(build_data(config.data) if spec.trains else messages.no_data(config.data.name, manifest))
        except UserError as error:
            if error.what.startswith("No module") and (way := manifest.way_to([messages.CODE])):
                error.fix = f"{error.fix} Or: {way}"
            raise
        guest.require_same_run()
        hooks.step("start what averages with others")
        guest.open_training(manifest.run_id)
        guest.averaging.tried = bool(guest.other)
        guest.watch = dht.Watch(guest.dht, guest.creator, guest.clock.seconds)
        if hooks.open_run is None:
            return guest.take_part(), None
        writer = hooks.open_run(config, manifest.name)
        return guest.train(writer), writer.run

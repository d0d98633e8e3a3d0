"""A peer that joins a swarm, and comes back into it when it has lost it."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from trainkit.common import terminal
from trainkit.common.errors import RefusedError, RunFailedError, UserError
from trainkit.config.schema import Config
from trainkit.data.registry import build_data
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.swarm.identity import admission
from trainkit.swarm.identity.invitations import Entry, UntrustedError
from trainkit.swarm.network import dht, wall_clock
from trainkit.swarm.network.states import read_digest
from trainkit.swarm.network.watch import PeerWatch
from trainkit.swarm.peer import link, same_run
from trainkit.swarm.peer.place import Hooks, PeerSpec
from trainkit.swarm.peer.rounds import RoundsEnding, take_part
from trainkit.swarm.peer.same_run import TRIED, require_same, without_data
from trainkit.swarm.peer.session import LOST_AFTER, Session
from trainkit.swarm.protocol import addresses, messages
from trainkit.swarm.protocol.messages import Manifest, RoundClock

_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 30.0
_LOOK_SECONDS = 0.5
# Seconds for which a newcomer asks for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0
_MOST_SIGNED = 8
_TRIED = "What this peer learns counts once the creator has repeated a part of its training and agrees."
_AGREED = "  an audit agrees with this peer: from now on it counts"


class Guest(Session):
    """A peer that has come into the swarm by ``entry``, and comes back into it."""

    manifest: Manifest

    def __init__(self, held: ExitStack, entry: Entry, spec: PeerSpec, hooks: Hooks) -> None:
        super().__init__(held, spec, hooks)
        self.entry = entry
        self.may_be_alone = not spec.trains
        self.others = addresses.known_of(entry.addresses)
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
            why = f"{self.other}: the creator has twice repeated this peer's training with another result."
            fix = self.manifest.way_to(TRIED) or "Install the creator's versions."
            raise RefusedError("The libraries of this peer compute something else than the run's.", why=why, fix=fix)
        if self.other and self.counts != (standing == "counts"):
            self.counts = not self.counts
            self.say(_AGREED if self.counts else f"  {_TRIED}")
        for statement in {told.signed for told in self.watch.peers.values()} - {b"", *self.signed.values()}:
            with suppress(UntrustedError):
                digest = read_digest(self.dht.admission, statement, run_id=self.averaging.averager.run_id)
                admission.remember(self.signed, digest.sha256, statement, _MOST_SIGNED)

    def wait_for_creator(self) -> None:
        """At an anchor that carries the creator: without it there is no swarm yet, or none any more."""
        if self.tunnel is None:
            return
        until = time.monotonic() + self.spec.patience
        self.hooks.step("wait for the creator, which calls this machine")
        while not (self.tunnel.is_up or self.hooks.stop_requested() or time.monotonic() > until):
            self.tunnel.require()
            time.sleep(_LOOK_SECONDS)

    def prove_reachable(self) -> None:
        """Have this peer dialled back; one that cannot be reached only calls out.

        Raises UserError for a peer that would be of no use so.
        """
        seen = self.dht.prove(self.entry.addresses)
        if seen.reached:
            self.say(f"Others can reach this machine: it was dialled back at {', '.join(seen.reached)}.")
            return
        what = "Others cannot reach this machine"
        fix = addresses.FORWARD.format(port=self.dht.port)
        why = "nobody could dial it back"
        if seen.tried:
            why = f"connecting to it at {', '.join(seen.tried)} failed"
        if not self.spec.trains:
            raise UserError(f"{what}, so it cannot be an anchor.", why=f"{why[0].upper()}{why[1:]}.", fix=fix)
        self.say(f"{what}: {why}. It takes part as a peer that only connects to others.\n  {fix}")
        self.spec = replace(self.spec, host=None)

    def read_manifest(self, adapt: Callable[[Manifest], Config]) -> None:
        """Ask what the run is; ``adapt`` makes this machine's configuration of it."""
        self.creator, self.manifest = dht.read_manifest(self.dht, self.entry.addresses)
        wall_clock.require_same_time(self.dht, self.entry.addresses)
        self.config = adapt(self.manifest)
        messages.require_going_on(self.manifest, self.config.collaborative)
        self.clock = self.clock_from(self.manifest.first_round)

    def require_same_run(self) -> None:
        """Refuse to train something else than the run does, once there is a model."""
        theirs = self.manifest.facts
        limit = self.spec.max_upload
        if limit is not None:
            load = link.load_for(limit, self.common.theta.numel(), self.config.collaborative)
            self.say(link.upload_in_words(load, limit))
        if not self.spec.trains:
            self.facts = without_data(self.facts, theirs, self.config)
        is_volunteer = self.spec.trains and self.role == "volunteer"
        why_not = same_run.untried(self.manifest, is_volunteer=is_volunteer)
        self.other = require_same(theirs, self.facts, self.manifest, why_not)
        if self.other:
            self.say(f"{self.other}. {_TRIED}")
        self.facts = theirs  # by which peers find each other

    def train(self, writer: Attempt) -> RoundsEnding:
        """Train until the run is over, and keep this peer's own records."""
        self.writer = writer
        progress = self.progress
        records = read_metrics(writer.run, "train")
        if records:  # a guest has no checkpoint: its records say where it was
            progress.step = progress.position = records[-1]["step"]
            progress.images = round(records[-1].get("epoch", 0.0) * len(self.splits.train))
        self.say(f"Run: {writer.run.path}")
        if not self.spec.trains and self.spec.host is not None:
            here = self.dht.addresses()
            self.keep_place(self.manifest.run_id, here)
            # Not the token itself: this goes into the log.
            lines = [terminal.command("join", "TOKEN", item) for item in here]
            self.say("\n  ".join(["Others join through this machine, too:", *lines]))
        rounds = self.open_records("guest" if self.spec.trains else "anchor")
        with rounds.recorded(self.spec.env):
            ending = self.take_part()
        if ending != "stopped":
            if progress.step:
                rounds.finish("finished" if ending == "finished" else "stopped")
            writer.ended("COMPLETED", step=progress.step)
        return ending

    def take_part(self) -> RoundsEnding:
        """Train until the run is over; wait for a swarm that is lost, and go on by the clock that it then has."""
        # Last of all: the state of a round is of use until that round ends.
        self.hooks.step("fetch the weights of the run")
        left: RoundsEnding | None = None
        if not self._adopt(self.clock, _ADOPT_SECONDS) and not self.hooks.stop_requested():
            self.hooks.step("")
            self.say(self._why_no_weights())
            left = self.wait_until_back()
        self.hooks.step("")
        where = "Joined {}"
        ending: RoundsEnding = "lost"
        while not left and ending in ("lost", "moved"):
            self.averaging.share()
            number = self.clock.index(time.time()) + 1
            self.say(f"{where.format(self.manifest.name)} in round {number}/{self.clock.count}.")
            where = "Back in {},"
            ending = take_part(self)
            if ending == "lost" and self.rounds is not None:
                self.rounds.lost()
            if ending in ("lost", "moved"):
                left = self.wait_until_back()
            if ending == "lost" and not left:
                self.remark("swarm_back", round=self.common.round)
        if left:
            return left
        # This machine's clock alone may say so.
        if ending == "finished" and self.common.round < self.clock.count - LOST_AFTER:
            wall_clock.require_same_time(self.dht, self.others)
        return ending

    def wait_until_back(self) -> RoundsEnding | None:
        """Look for the swarm, less and less often, until it goes on with this peer. Why to leave, if it does not: it
        has ended, or this peer was told to.

        Who answers may not be ready yet: a creator that has just come back.

        Raises RunFailedError when nobody has answered for as long as this peer is patient.
        """
        age = terminal.age(self.spec.patience)
        pause = _FIRST_PAUSE
        ask_at = 0.0
        deadline = time.monotonic() + self.spec.patience
        while not self.hooks.stop_requested():
            now = time.monotonic()
            if now >= ask_at:
                if self.dht.reconnect(self.others):
                    wall_clock.require_same_time(self.dht, self.others)
                    if self.finds_run():
                        return None
                    if self.watch.stopped:
                        return "ended"
                if now >= deadline:
                    why = "Its creator has left without a message, or this machine has lost its network."
                    fix = "Ask whoever runs `python -m jobs.swarm create`, and join again."
                    if self.rounds:
                        fix = f"Round {self.common.round} is kept in {self.writer.run.path}. {fix}"
                    raise RunFailedError(f"The swarm has not answered for {age}.", why=why, fix=fix)
                if not ask_at:
                    self.say(f"No peer of the swarm answers. Waiting for it for up to {age}; Ctrl-C leaves for good.")
                ask_at = min(now + pause, deadline)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
            time.sleep(_LOOK_SECONDS)
        return "stopped"

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

    def _why_no_weights(self) -> str:
        arrived = self.averaging.fetched
        if not 0.0 < arrived < 1.0:
            return "No peer provides the weights of the run: those that could are gone or overloaded."
        size = 4e-6 * (self.common.theta.numel() + self.common.momentum.numel())
        what = f"Of the weights of the run, {size:,.0f} MB, {arrived:.0%} arrived."
        need = f"{size * 8 / self.clock.seconds:,.0f} Mbit/s here, and as much at its creator for each newcomer"
        return f"{what} They must arrive within a round ({self.clock.seconds:g} s): that takes {need}."

    def _adopt(self, clock: RoundClock, seconds: float = 0.0) -> bool:
        """Take over the state of the present round, for the next one ends it; waits two rounds for it at least."""
        return self.adopt(max(seconds, 2 * clock.seconds), fits=lambda: self.common.round >= clock.index(time.time()))


def join(
    entry: Entry, spec: PeerSpec, hooks: Hooks, adapt: Callable[[Manifest], Config]
) -> tuple[RoundsEnding, RunDir | None]:
    """Join the swarm that ``entry`` leads to, and train in it until it ends.

    Args:
        adapt: the configuration for this machine, from the manifest's.
    """
    with ExitStack() as held:
        guest = Guest(held, entry, spec, hooks)
        hooks.step("look for the swarm")
        guest.open_tunnel(entry.own)
        guest.wait_for_creator()
        guest.open_node(entry.own, spec.identity, entry.addresses)
        if spec.team and spec.host is not None:
            hooks.step("ask others whether they reach this machine")
            guest.prove_reachable()
        hooks.step("ask what the run is")
        guest.read_manifest(adapt)
        config = guest.config
        manifest = guest.manifest
        hooks.step("read the data and build the model")
        guest.build_model(build_data(config.data) if spec.trains else same_run.no_data(config.data.name, manifest))
        guest.require_same_run()
        hooks.step("start the averager")
        guest.open_training(manifest.run_id)
        guest.averaging.tried = bool(guest.other)
        guest.watch = PeerWatch(guest.dht, guest.creator, guest.clock.seconds)
        if hooks.open_run is None:
            return guest.take_part(), None
        writer = hooks.open_run(config, manifest.name)
        return guest.train(writer), writer.run

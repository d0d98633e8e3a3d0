"""A peer that joins a swarm, from its first message to its last; if it loses the swarm, it comes back."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from trainkit import terminal
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RunFailedError, UserError
from trainkit.run.events import Writer
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.swarm import address, link, messages
from trainkit.swarm.admission import Entry
from trainkit.swarm.dht import INTRODUCED_SECONDS, Watch, read_manifest
from trainkit.swarm.messages import Manifest, RoundClock
from trainkit.swarm.rounds import Ending, take_part
from trainkit.swarm.session import Session, require_same, without_data
from trainkit.swarm.spec import Hooks, PeerSpec, check_peer

_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
_LOOK_SECONDS = 0.5
# Seconds for which a newcomer asks for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0
_ASK_THE_CREATOR = "Ask whoever runs `python -m jobs.swarm create`, and join again."


def wait_until_back(look: Callable[[], int], goes_on: Callable[[], bool], hooks: Hooks, patience: float) -> bool:
    """Wait for a swarm that has been lost, asking less and less often. False when told to leave.

    Args:
        look: looks for peers; how many answer.
        goes_on: whether they go on with this peer; a creator that has just come back may not be ready yet.
        patience: seconds.

    Raises RunFailedError when nobody has answered for ``patience`` seconds.
    """
    deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
    hooks.say(
        f"Nobody of the swarm answers. Waiting for it for up to {terminal.age(patience)}; Ctrl-C leaves for good."
    )
    while not hooks.stop_requested():
        if look() and goes_on():
            return True
        if (now := time.monotonic()) >= deadline:
            why, fix = "Its creator has gone without a word, or this machine has lost its network.", _ASK_THE_CREATOR
            raise RunFailedError(f"The swarm has not answered for {terminal.age(patience)}.", why=why, fix=fix)
        until = min(now + pause, deadline)
        while (left := until - time.monotonic()) > 0 and not hooks.stop_requested():
            time.sleep(min(left, _LOOK_SECONDS))
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return False


class Guest(Session):
    """A peer that has come into the swarm by ``entry``, and comes back into it."""

    manifest: Manifest

    def __init__(self, held: ExitStack, entry: Entry, spec: PeerSpec, hooks: Hooks) -> None:
        super().__init__(held, spec, hooks)
        self.entry, self.may_be_alone = entry, not spec.trains
        self.memory = address.Memory(entry.addresses)

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
        self.manifest = manifest = read_manifest(self.dht, self.entry.addresses)
        address.require_same_time(self.dht, self.entry.addresses)
        self.config = adapt(manifest)
        check_peer(self.config, self.spec)
        messages.require_going_on(manifest, self.config.collaborative)
        self.clock = self.clock_from(manifest.first_round)

    def require_same_run(self) -> None:
        """Refuse to train something else than the run does, once there is a model."""
        theirs, values, limit = self.manifest.facts, self.common.theta.numel(), self.spec.max_upload
        if limit is not None:
            self.hooks.say(link.in_words(link.load_for(limit, values, self.config.collaborative), limit))
        if not self.spec.trains:
            self.facts = without_data(self.facts, theirs, self.config)
        require_same(theirs, self.facts)

    def slow_upload(self) -> float | None:
        """Bytes per second that this peer can send; None if they are enough, or not known.

        With ``sync: gradients`` there is nothing that could be sent later.
        """
        agreed, values = self.config.collaborative, self.common.theta.numel()
        if not self.spec.trains or agreed.sync == "gradients":
            return None
        needed = link.enough(values, agreed)
        measured = self.dht.upload(self.entry.addresses, enough=needed)
        if not 0.0 < measured < needed:
            return None
        self.hooks.say(link.in_words(link.load_for(measured, values, agreed), measured))
        return measured

    def follow_creator(self) -> None:
        """Hear the news of the run's creator."""
        known = self.dht.manifests()
        creator = next((peer for peer, own in known.items() if own.run_id == self.manifest.run_id), "")
        self.watch = Watch(self.dht, creator, self.clock.oldest_news)

    def train(self, writer: Writer) -> Ending:
        """Train until the run is over, and keep this peer's own records."""
        self.writer, progress = writer, self.progress
        if records := read_metrics(writer.run, "train"):  # a guest has no checkpoint: its records say where it was
            progress.step = progress.position = records[-1]["step"]
            progress.images = round(records[-1].get("epoch", 0.0) * len(self.splits.train))
        self.hooks.say(f"Run: {writer.run.path}")
        if not self.spec.trains and self.spec.host is not None:
            self.keep_place(self.manifest.run_id, self.dht.addresses(), is_anchor=True)
        self.open_records(judges=False)
        rounds = self.record("guest" if self.spec.trains else "anchor")
        with rounds.recorded(self.spec.env):
            ending = self.take_part()
        if ending != "stopped":
            if progress.step:
                rounds.finish("finished" if ending == "finished" else "stopped")
            writer.attempt.ended("COMPLETED", step=progress.step)
        return ending

    def take_part(self) -> Ending:
        """Train until the run is over; wait for a swarm that is lost, and go on by the clock that it then has."""
        # Last of all: the state of a round is of use until that round ends.
        self._adopt(self.clock, _ADOPT_SECONDS)
        self._say_round("Joined {}")
        self.averaging.share()
        while (ending := take_part(self)) in ("lost", "moved"):
            rounds = self.rounds if ending == "lost" else None
            if rounds is not None:
                rounds.lost()
            is_back = (ending == "moved" and self.goes_on()) or wait_until_back(
                lambda: self.dht.reconnect(self.memory.others), self.goes_on, self.hooks, self.spec.patience
            )
            if self.watch.stopped or not is_back:
                return "ended" if self.watch.stopped else "stopped"
            if rounds is not None:
                rounds.remark("swarm_back", round=self.common.round)
            self._say_round("Back in {},")
        return ending

    def goes_on(self) -> bool:
        """Whether the peers that answer go on with this one, or have ended the run."""
        return self.finds_run() or self.watch.stopped

    def finds_run(self) -> bool:
        """Take over the clock and the state of the peers that answer; False if they have none to give, yet.

        Raises UserError when another run answers, and RefusedError when this peer is out of it, or the run is not what
        it was when this peer has joined it.
        """
        self.dht.require_welcome()
        # It has been silent meanwhile, and a creator that has come back gives nothing to strangers.
        self.dht.introduce_myself(INTRODUCED_SECONDS, wait=True)
        self.watch.poll()
        found = list(self.dht.manifests().values())
        same = [one for one in found if one.run_id == self.manifest.run_id]
        if found and not same:
            why = f"It was {self.manifest.name}; its creator has started a new one, {found[0].name}."
            fix = "Join that one, if it is meant."
            raise UserError(f"Another run is at {self.entry.addresses[0]} now.", why=why, fix=fix)
        manifest = max(same, key=lambda one: one.first_round, default=None)
        if self.watch.stopped or manifest is None or manifest.first_round < self.clock.first:
            return False
        messages.require_same_version(manifest)
        require_same(manifest.facts, self.manifest.facts)
        clock = self.clock_from(manifest.first_round)
        try:
            self._adopt(clock)
        except RunFailedError:
            return False
        if self.hooks.stop_requested():
            return False
        self.clock = clock
        return True

    def _say_round(self, where: str) -> None:
        number = self.clock.index(time.time()) + 1
        self.hooks.say(f"{where.format(self.manifest.name)} in round {number}/{self.clock.count}.")

    def _adopt(self, clock: RoundClock, seconds: float = 0.0) -> None:
        """Take over the state of the run; it must be that of the present round, for the next one ends it.

        Raises RunFailedError when no peer gives it in ``seconds``, or two rounds.
        """
        stopped = self.hooks.stop_requested
        deadline, pause = time.monotonic() + max(seconds, 2 * clock.seconds), 0.5
        while time.monotonic() < deadline and not stopped():
            if self.averaging.adopt(10.0) and self.common.round >= clock.index(time.time()):
                return
            # Asked by everybody at once, the few peers that give it away would do nothing else.
            time.sleep(pause)
            pause = min(2 * pause, 8.0, clock.seconds / 4)
        if not stopped():
            why, fix = "The peers that could are gone, unreachable from here, or overloaded.", _ASK_THE_CREATOR
            raise RunFailedError("No peer gives away the state of the run.", why=why, fix=fix)


def join(
    entry: Entry, spec: PeerSpec, hooks: Hooks, adapt: Callable[[Manifest], Config]
) -> tuple[Ending, RunDir | None]:
    """Join the swarm that ``entry`` leads to, and train in it until it ends.

    Args:
        adapt: the configuration for this machine, from the manifest's.
    """
    with ExitStack() as held:
        guest = Guest(held, entry, spec, hooks)
        guest.open_node(entry.own, entry.admission(), spec.identity, entry.addresses)
        if spec.must_prove:
            guest.prove_reachable()
        guest.read_manifest(adapt)
        config, manifest = guest.config, guest.manifest
        guest.build_model(build_data(config.data) if spec.trains else messages.no_data(config.data.name, manifest))
        guest.require_same_run()
        guest.open_training(manifest.run_id, guest.slow_upload())
        guest.follow_creator()
        if hooks.open_run is None:
            return guest.take_part(), None
        writer = hooks.open_run(config, manifest.name)
        return guest.train(writer), writer.run

"""A peer that joins a swarm, from its first message to its last; if it loses the swarm, it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RunFailedError, UserError
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.swarm import access
from trainkit.swarm.address import FORWARD, Memory, SavedPeer, keep_identity, require_same_time
from trainkit.swarm.admission import Entry
from trainkit.swarm.agreement import facts_of, meeting_place, require_same, without_data
from trainkit.swarm.assemble import PeerSpec, Waiting, averaged, clock_at, common_state, kept, peer_at, take_part
from trainkit.swarm.average import Averaging
from trainkit.swarm.dht import INTRODUCED_SECONDS, SwarmDHT, Watch, open_dht, read_manifest
from trainkit.swarm.link import enough, in_words, load_for, volunteers_share
from trainkit.swarm.messages import Manifest, RoundClock, no_data, require_going_on, require_same_version
from trainkit.swarm.records import Role, RoundKeeper
from trainkit.swarm.rounds import Ending, Peer
from trainkit.swarm.settings import check_peer
from trainkit.swarm.sync_diloco import CommonState
from trainkit.training.recorder import Progress, Recorder

# A newcomer asks so long for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0


def join(
    entry: Entry,
    spec: PeerSpec,
    *,
    adapt: Callable[[Manifest], Config],
) -> tuple[Ending, RunDir | None]:
    """Join the swarm that ``entry`` leads to, and train in it until it ends.

    Args:
        adapt: the configuration for this machine, from the manifest's.
    """
    with (
        access.identity(spec.identity, entry.own, entry.admission()) as identity,
        open_dht(
            identity,
            peers=entry.addresses,
            host=spec.host,
            port=spec.port,
            announce=spec.announce,
            proven=not spec.must_prove,
        ) as dht,
    ):
        if spec.must_prove:
            spec = proven(dht, entry.addresses, spec)
        manifest = read_manifest(dht, entry.addresses)
        require_going_on(manifest)
        require_same_time(dht, entry.addresses)
        config = adapt(manifest)
        check_peer(config, ranks=spec.env.world_size if spec.team else 1, max_upload=spec.max_upload)
        if _is_over(manifest, config):
            raise UserError(
                f"The run {manifest.name} is over.",
                why=f"All of its {config.collaborative.rounds} rounds are done.",
                fix="Join another.",
            )
        splits = build_data(config.data) if spec.trains else no_data(config.data.name, manifest)
        common = common_state(config, splits)
        clock = clock_at(config, common, manifest.first_round)
        if spec.max_upload is not None:
            spec.say(volunteers_share(config.collaborative, common.theta.numel(), spec.max_upload))
        facts = facts_of(config, splits, common.model)
        if not spec.trains:
            facts = without_data(facts, manifest.facts, config)
        require_same(manifest.facts, facts)
        place = meeting_place(manifest.run_id, facts)
        measured = _slow_upload(dht, entry, config, common, spec)
        with averaged(config, spec, splits, common, dht, place, measured=measured) as (team, averaging):
            parts = team.judge
            watch, progress = Watch(dht, _creator_of(dht, manifest), clock.oldest_news), Progress()
            memory = Memory(entry.addresses)
            guest = _Guest(manifest, config, entry, spec, dht, averaging, common, memory)
            peer = replace(
                peer_at(spec, team, common, averaging, dht, clock, watch, progress),
                before_round=lambda: memory.note(watch.reachable()),
                may_be_alone=not spec.trains,
                look_around=lambda: dht.look_for(memory.others),
            )
            if spec.open_run is None:
                return guest.take_part(peer), None
            writer = spec.open_run(config)
            _go_on(progress, writer.run, len(splits.train))
            spec.say(f"Run: {writer.run.path}")
            if not spec.trains and spec.host is not None:
                keep_identity(writer.run, identity.path)
                home = SavedPeer(manifest.run_id, clock.first, spec.host, dht.port, spec.announce, spec.name, True)
                memory.keep_in(writer.run, home)
                spec.opened(writer.run, dht.addresses())
            # A volunteer's machine writes no accounts of a service.
            with kept(config, writer, parts, judges=False) as (checkpoints, metrics):
                keeper = Recorder(parts, writer, checkpoints, metrics, progress, spec.beat)
                role: Role = "guest" if spec.trains else "anchor"
                rounds = RoundKeeper(keeper, common, clock, watch, role=role, say=spec.say)
                sentry = peer.sentry.keeping(writer.run, rounds.remark)
                peer = replace(peer, sentry=sentry, after_round=rounds.after_round, remark=rounds.remark)
                with rounds.recorded(spec.env):
                    ending = guest.take_part(peer, lost=rounds.lost, back=rounds.back)
                if progress.step and ending != "stopped":
                    rounds.finish("finished" if ending == "finished" else "stopped")
                if ending != "stopped":
                    writer.attempt.ended("COMPLETED", step=progress.step)
    return ending, writer.run


def proven(dht: SwarmDHT, addresses: Sequence[str], spec: PeerSpec) -> PeerSpec:
    """The spec of a peer that wants to be reached: of one that only calls out, if it cannot be.

    Raises UserError for a peer that would be of no use so.
    """
    seen = dht.prove(addresses)
    if seen.reached:
        spec.say(f"Others reach this machine: it was dialled back at {', '.join(seen.reached)}.")
        return replace(spec, must_prove=False)
    why = f"it was dialled at {', '.join(seen.tried)}, in vain" if seen.tried else "nobody could dial it back"
    if not spec.trains:
        raise UserError(
            "Others cannot reach this machine, so it cannot be an anchor.",
            why=f"{why[0].upper()}{why[1:]}.",
            fix=FORWARD.format(port=dht.port),
        )
    spec.say(f"Others cannot reach this machine: {why}. It takes part as a peer that only calls out.")
    spec.say(f"  {FORWARD.format(port=dht.port)}")
    return replace(spec, must_prove=False, host=None)


def _slow_upload(dht: SwarmDHT, entry: Entry, config: Config, common: CommonState, spec: PeerSpec) -> float | None:
    """Bytes per second that this peer can send; None if they are enough, or not known.

    With ``sync: gradients`` there is nothing that could be sent later.
    """
    agreed, values = config.collaborative, common.theta.numel()
    needed = enough(values, agreed.compression, agreed.round_seconds)
    if not spec.trains or agreed.sync == "gradients":
        return None
    measured = dht.upload(entry.addresses, enough=needed).rate
    if not 0.0 < measured < needed:
        return None
    spec.say(in_words(load_for(measured, values, agreed.compression, agreed.round_seconds), measured))
    return measured


@dataclass(frozen=True)
class _Guest:
    """What a peer needs to come into the swarm, and to come back."""

    manifest: Manifest
    config: Config
    entry: Entry
    spec: PeerSpec
    dht: SwarmDHT
    averaging: Averaging
    common: CommonState
    memory: Memory

    def take_part(
        self, peer: Peer, *, lost: Callable[[], None] = lambda: None, back: Callable[[], None] = lambda: None
    ) -> Ending:
        """Train until the run is over, by the clock of whoever answers for it.

        Args:
            lost: called when nobody of the swarm answers any more.
            back: called when somebody does again.
        """
        # Last of all: the state of a round is of use until that round ends.
        self._adopt(peer.clock)
        self.spec.say(f"Joined {self.manifest.name} in round {peer.clock.index(time.time()) + 1}/{peer.clock.count}.")
        self.averaging.share()
        while True:
            ending = take_part(peer)
            if ending not in ("lost", "moved"):
                return ending
            if ending == "lost":
                lost()
            clock = self._found_again(peer, must_wait=ending == "lost")
            if clock is None:
                return "ended" if peer.watch.stopped else "stopped"
            if ending == "lost":
                back()
            self.spec.say(f"Back in {self.manifest.name}, in round {clock.index(time.time()) + 1}/{clock.count}.")
            peer = replace(peer, clock=clock)

    def _found_again(self, peer: Peer, *, must_wait: bool) -> RoundClock | None:
        """The clock to go on by, with the state of its present round; None when it is time to leave."""
        back: list[RoundClock] = []

        def goes_on() -> bool:
            back.extend(self._present_clock(peer))
            return bool(back) or peer.watch.stopped

        spec = self.spec
        if must_wait or not goes_on():
            waiting = Waiting(self.dht.reconnect, goes_on, spec.stop_requested, spec.say, spec.patience)
            waiting.until_back(self.memory.others)
        return back[0] if back else None

    def _present_clock(self, peer: Peer) -> list[RoundClock]:
        """That of those who answer, whose state has then been taken over; none if they have none to give, yet.

        Raises UserError when another run answers, and RefusedError when this peer is out of it, or the run is not what
        it was when this peer has joined it.
        """
        self.dht.require_welcome()
        # Meanwhile it has said nothing of itself, and whoever has come back gives nothing to strangers.
        self.dht.introduce_myself(INTRODUCED_SECONDS, wait=True)
        peer.watch.poll()
        manifest = self._manifest()
        if peer.watch.stopped or manifest is None or manifest.first_round < peer.clock.first:
            return []
        require_same_version(manifest)
        require_same(manifest.facts, self.manifest.facts)
        clock = clock_at(self.config, self.common, manifest.first_round)
        with suppress(RunFailedError):
            self._adopt(clock, seconds=2 * clock.seconds)
            return [] if self.spec.stop_requested() else [clock]
        return []

    def _manifest(self) -> Manifest | None:
        """The run's; None if whoever answers does not know it yet.

        Raises UserError when it is another run's by now.
        """
        found = list(self.dht.manifests().values())
        same = [one for one in found if one.run_id == self.manifest.run_id]
        if found and not same:
            raise UserError(
                f"Another run is at {self.entry.addresses[0]} now.",
                why=f"It was {self.manifest.name}; its creator has started a new one, {found[0].name}.",
                fix="Join that one, if it is meant.",
            )
        return max(same, key=lambda one: one.first_round, default=None)

    def _adopt(self, clock: RoundClock, *, seconds: float = _ADOPT_SECONDS) -> None:
        """Take over the state of the run; it must be that of the present round, for the next one ends it.

        Raises RunFailedError when no peer gives it in time.
        """
        spec, deadline, pause = self.spec, time.monotonic() + max(seconds, 2 * clock.seconds), 0.5
        while time.monotonic() < deadline and not spec.stop_requested():
            if self.averaging.adopt(10.0) and self.common.round >= clock.index(time.time()):
                return
            # Asked by everybody at once, the few peers that give it away would do nothing else.
            time.sleep(pause)
            pause = min(2 * pause, 8.0, clock.seconds / 4)
        if spec.stop_requested():
            return
        raise RunFailedError(
            "No peer gives away the state of the run.",
            why="The peers that could are gone, unreachable from here, or overloaded.",
            fix="Ask whoever runs `python -m jobs.swarm create`, and join again.",
        )


def _go_on(progress: Progress, run: RunDir, images: int) -> None:
    """Count on from where an earlier attempt of this peer was: a guest's records say that, it has no checkpoint."""
    if records := read_metrics(run, "train"):
        progress.step = progress.position = records[-1]["step"]
        progress.images = round(records[-1].get("epoch", 0.0) * images)


def _is_over(manifest: Manifest, config: Config) -> bool:
    """By the time, where it says so; else a newcomer learns it from the state that it is given."""
    rounds = config.collaborative
    clock = RoundClock(rounds.round_seconds, manifest.first_round, rounds.rounds)
    return rounds.sync == "diloco" and clock.is_over(time.time())


def _creator_of(dht: SwarmDHT, manifest: Manifest) -> str:
    for peer, own in dht.manifests().items():
        if own.run_id == manifest.run_id:
            return peer
    return ""

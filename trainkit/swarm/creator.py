"""The creator of a swarm, from its first message to its last; also one that comes back after it was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from trainkit import terminal
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import UserError
from trainkit.run.events import Writer
from trainkit.run.folder import RunDir
from trainkit.swarm import access, address, dialback
from trainkit.swarm.access import REVOKED
from trainkit.swarm.address import Memory, SavedPeer, addresses_in, identity_in, keep_identity, known_of, saved_peer
from trainkit.swarm.admission import Admission, Owner, keep_key, key_of, own_pass
from trainkit.swarm.agreement import facts_of, meeting_place
from trainkit.swarm.assemble import PeerSpec, averaged, clock_at, common_state, kept, peer_at, take_part
from trainkit.swarm.average import Averaging
from trainkit.swarm.dht import SwarmDHT, Watch, open_dht
from trainkit.swarm.invitations import Key
from trainkit.swarm.link import creators_share, fitted
from trainkit.swarm.messages import Manifest, PeerProgress, RoundClock
from trainkit.swarm.records import Credits, RoundKeeper, take_over
from trainkit.swarm.rounds import LOST_AFTER, NEWS_SECONDS, Ending, Peer
from trainkit.swarm.settings import check_peer
from trainkit.swarm.sync_diloco import CommonState
from trainkit.training.recorder import Progress, Recorder

_DIAL_SECONDS = 30.0


def elsewhere(addresses: Sequence[str], own: Sequence[str]) -> list[str]:
    """Those at which this peer would be another process: its own id, and not its own place."""
    here = {item.rpartition("/p2p/")[0] for item in own}
    me = address.peer_of(own[0]) if own else ""
    return [item for item in addresses if address.peer_of(item) == me and item.rpartition("/p2p/")[0] not in here]


def require_alone(dht: SwarmDHT, known: Sequence[str]) -> None:
    """Refuse to go on with a run whose creator answers at another place.

    Args:
        known: where it has been before.

    Raises UserError.
    """
    told = dht.progress().get(dht.peer_id)
    places = elsewhere([*known, *(told.addresses if told is not None else ())], dht.addresses())
    if not places:
        return
    there: list[str] = dht.in_dht(partial(dialback.reached, at=tuple(dict.fromkeys(places))), _DIAL_SECONDS, [])
    if there:
        raise UserError(
            "This run goes on already, on another machine.",
            why=f"Its creator, with the key of this run folder, answers at {there[0]}: one of the folders is a copy.",
            fix="End that one with Ctrl-C, and copy its run folder here: it has the newer checkpoints.",
        )


@dataclass
class DuplicateCreator:
    """Finds another creator with the key of this run: from copies of one run folder, two of them lead two swarms."""

    own: Sequence[str]
    """This peer's addresses."""
    since: float
    """Of what was told before, this peer may have been another process itself."""
    say: Callable[[str], None]
    _said: set[str] = field(default_factory=set)

    def look(self, told: PeerProgress | None) -> None:
        """``told``: what the swarm knows of this peer."""
        if told is None or told.time <= self.since:
            return
        for item in elsewhere(told.addresses, self.own)[:1]:
            if item not in self._said:
                self._said.add(item)
                self.say(
                    f"  another machine goes on with this run and its key, at {terminal.one_line(item)}: "
                    "two swarms come of it. End one of the two with Ctrl-C"
                )


# A creator that comes back asks so long for what the others have reached without it.
_CATCH_UP_SECONDS = 10.0


@dataclass(frozen=True)
class _Creator:
    """What a creator does besides training."""

    manifest: Manifest
    owner: Owner
    dht: SwarmDHT
    clock: RoundClock
    watch: Watch
    memory: Memory
    duplicate: DuplicateCreator

    def publish(self, *, stopped: bool = False, wait: bool = False) -> None:
        """Tell the swarm of the run, and of the invitations that `swarm revoke` has ended in its folder."""
        if revoked := self.owner.revoked():
            self.dht.excluded.hear(REVOKED, revoked)
            self.dht.publish_excluded()
        # From now on: a record only replaces one that would expire earlier.
        expires = self.clock.count * self.clock.seconds + 600.0
        self.dht.publish_manifest(replace(self.manifest, stopped=stopped), expires, wait=wait)

    def before_round(self) -> None:
        """Publish again, and note who can be reached and whether another machine leads this run."""
        self.publish()
        self.memory.note(self.watch.reachable())
        self.duplicate.look(self.watch.peers.get(self.dht.peer_id))

    def peer(self, peer: Peer, writer: Writer, rounds: RoundKeeper) -> Peer:
        """``peer`` as a creator: it keeps the records and the account, and waits for the others where it is."""
        seconds = self.clock.seconds
        credits = Credits(
            writer,
            lambda: peer.pace.round_seconds or seconds,
            lambda known: self.dht.publish_credits(known, LOST_AFTER * seconds + 60.0),
        )
        return replace(
            peer,
            sentry=replace(peer.sentry.keeping(writer.run, rounds.remark), credit=credits.count),
            after_round=rounds.after_round,
            remark=rounds.remark,
            may_be_alone=True,
            before_round=self.before_round,
            look_around=lambda: self.dht.look_for(self.memory.others),
        )

    def leave(self, ending: Ending) -> None:
        """Stay until the others can do without this peer."""
        if ending == "stopped":
            self.publish(stopped=True, wait=True)
            if self.watch.others(time.time() - LOST_AFTER * self.clock.seconds):
                time.sleep(4 * NEWS_SECONDS + self.watch.pause)  # with this peer the news would vanish
        else:
            # The others may still be fetching their part of the last round's average from this peer.
            time.sleep(max(0.0, self.clock.end + 2.0 - time.time()))


def create(
    config: Config,
    spec: PeerSpec,
    *,
    announce: Callable[[RunDir, list[str]], None],
    prefer_host: str | None = None,
) -> tuple[Ending, RunDir]:
    """Start a swarm, or go on with that of ``spec.folder``; train in it until the last round, and keep its records.

    Args:
        announce: called once others can join, with the addresses, best first.
        prefer_host: IP address by which others know this machine.
    """
    assert spec.open_run is not None
    assert spec.host is not None
    check_peer(config, ranks=1, max_upload=spec.max_upload)
    splits, folder = build_data(config.data), spec.folder
    saved = saved_peer(folder) if folder is not None else None
    memory = Memory(saved.others if saved is not None else ())
    file = spec.identity or (identity_in(folder) if folder is not None else None)
    key = key_of(folder.path) if folder is not None else Key.generate()
    admission = Admission(key.public, open_run=config.collaborative.open)
    with (
        access.identity(file, own_pass(key, spec.name), admission) as identity,
        open_dht(identity, host=spec.host, port=spec.port, announce=spec.announce) as dht,
    ):
        if folder is not None:
            dht.excluded.remember(folder.path)
        if folder is not None and saved is not None:
            dht.reconnect(saved.others)
            require_alone(dht, addresses_in(folder))
        common = common_state(config, splits)
        if spec.max_upload is not None:
            values = common.theta.numel()
            rounds_as_fit = fitted(config.collaborative, values, spec.max_upload)
            config = config.model_copy(update={"collaborative": rounds_as_fit})
            spec.say(creators_share(rounds_as_fit, values, spec.max_upload))
        facts = facts_of(config, splits, common.model)
        writer = spec.open_run(config)
        run_dir = writer.run
        owner = keep_key(run_dir.path, key)
        keep_identity(run_dir, identity.path)
        # Unguessable, and the same for as long as the run lasts: survivors know by it that this is their swarm.
        run_id = saved.run_id if saved is not None else f"{run_dir.name}-{os.urandom(4).hex()}".replace(".", "-")
        with (
            averaged(config, spec, splits, common, dht, meeting_place(run_id, facts)) as (team, averaging),
            kept(config, writer, team.judge, judges=True) as (checkpoints, metrics),
        ):
            found = checkpoints.restore(
                team.judge.model, None, extra=["common"], accept=lambda found: take_over(found, common)
            )
            progress = Progress.of(found.state) if found else Progress()
            if common.round >= config.collaborative.rounds:
                return "finished", run_dir
            if found:
                spec.say(_goes_on(common))
            clock = _clock(config, common, saved, dht, averaging, spec)
            averaging.share()
            manifest = Manifest(
                run_id=run_id,
                name=run_dir.name,
                config=to_yaml(config),
                first_round=clock.first,
                owner=key.public.hex(),
                num_classes=splits.info.num_classes,
                in_chans=splits.info.in_chans,
                image_size=splits.info.image_size,
                open_run=config.collaborative.open,
                facts=facts,
            )
            watch, addresses = Watch(dht, dht.peer_id, clock.oldest_news), dht.addresses(prefer_host)
            duplicate = DuplicateCreator(addresses, time.time(), spec.say)
            creator = _Creator(manifest, owner, dht, clock, watch, memory, duplicate)
            creator.publish(wait=True)
            memory.keep_in(run_dir, SavedPeer(run_id, clock.first, spec.host, dht.port, spec.announce, spec.name))
            announce(run_dir, addresses)
            keeper = Recorder(team.judge, writer, checkpoints, metrics, progress, spec.beat)
            rounds = RoundKeeper(keeper, common, clock, watch, role="judge", say=spec.say)
            peer = peer_at(spec, team, common, averaging, dht, clock, watch, progress)
            with rounds.recorded(spec.env):
                ending = take_part(creator.peer(peer, writer, rounds))
                creator.leave(ending)
            if ending == "finished":
                rounds.finish("finished")
                writer.attempt.ended("COMPLETED", step=progress.step)
            elif not spec.goes_on_later:
                rounds.finish("stopped", test=False)  # whoever presses Ctrl-C does not want to wait
    return ending, run_dir


def _goes_on(common: CommonState) -> str:
    """What a run that was interrupted goes on with.

    A peer's own AdamW, of diloco, is in no checkpoint: it would be twice the weights in each, and begun anew it made no
    difference that could be measured (tests/benchmarks/README.md).
    """
    words = f"Goes on after round {common.round}: weights, momentum and learning rate as they were"
    return f"{words}." if common.same_weights else f"{words}; the optimizer within rounds begins anew."


def _clock(
    config: Config,
    common: CommonState,
    saved: SavedPeer | None,
    dht: SwarmDHT,
    averaging: Averaging,
    spec: PeerSpec,
) -> RoundClock:
    """The run's clock. One that others have gone on by stays as it is; rounds that nobody trained in are made up."""
    settings = config.collaborative
    if saved is not None and dht.reconnect(known_of(saved.others)):
        clock, done = clock_at(config, common, saved.first_round), common.round
        if averaging.adopt(_CATCH_UP_SECONDS, newer_than=done):
            spec.say(f"The others have gone on from round {done} to {common.round}; so does this peer.")
        if done < common.round >= clock.index(time.time()):
            return clock
    if settings.sync == "gradients":  # nothing is agreed by the time
        return clock_at(config, common, 0)
    return RoundClock.starting(time.time(), settings.round_seconds, settings.rounds, done=common.round)

"""A peer from its first message to its last: as the creator of a swarm, or as one who joins."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainkit.collaborative import trust
from trainkit.collaborative.averaging import Averaging
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.dht import SwarmDHT, Watch, open_dht, read_manifest
from trainkit.collaborative.keeping import RoundKeeper, take_over
from trainkit.collaborative.messages import Manifest
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.rounds import NEWS_SECONDS, Ending, Peer, train
from trainkit.collaborative.seat import Seat, averaged, common_state, kept, peer_at
from trainkit.collaborative.settings import in_words, installed
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RunFailedError, UserError
from trainkit.records.rundir import RunDir
from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress

# A newcomer asks so long for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0


def create(
    config: Config,
    seat: Seat,
    *,
    announce: Callable[[RunDir, list[str]], None],
    prefer_host: str | None = None,
) -> tuple[Ending, RunDir]:
    """Start a swarm, train in it until the last round, and keep its records.

    Args:
        announce: called once others can join, with the addresses, best first.
        prefer_host: IP address by which others know this machine.
    """
    assert seat.open_run is not None
    splits = build_data(config.data)
    with trust.identity(seat.identity) as identity, open_dht(identity, host=seat.host, port=seat.port) as dht:
        outer = common_state(config, splits)
        writer = seat.open_run(config)
        run_dir = writer.run
        # Unguessable, and anew for each start: peers of an earlier attempt must not be taken for this one's.
        run_id = f"{run_dir.name}-{os.urandom(4).hex()}".replace(".", "-")
        with (
            averaged(config, seat, splits, outer, dht, run_id) as (parts, averaging),
            kept(config, writer, parts, judges=True) as (checkpoints, metrics),
        ):
            found = checkpoints.restore(
                parts.model, None, extra=["outer"], accept=lambda found: take_over(found, outer)
            )
            progress = Progress.of(found.state) if found else Progress()
            collaborative = config.collaborative
            if outer.round >= collaborative.rounds:
                return "finished", run_dir
            averaging.share()
            clock = RoundClock.starting(
                time.time(), collaborative.round_seconds, collaborative.rounds, done=outer.round
            )
            yaml = to_yaml(config)
            manifest = Manifest(
                run_id=run_id,
                name=run_dir.name,
                config=yaml,
                config_sha256=hashlib.sha256(yaml.encode()).hexdigest(),
                num_parameters=outer.num_parameters,
                first_round=clock.first,
                versions=installed(),
            )

            def publish(manifest: Manifest, *, wait: bool = False) -> None:
                # From now on: a record only replaces one that would expire earlier.
                dht.publish_manifest(manifest, clock.count * clock.seconds + 600.0, wait=wait)

            publish(manifest, wait=True)
            announce(run_dir, dht.addresses(prefer_host))
            watch = Watch(dht, dht.peer_id)
            keeper = Keeper(parts, writer, checkpoints, metrics, progress, seat.beat)
            rounds = RoundKeeper(keeper, outer, clock, watch, judges=True, say=seat.say)
            peer = replace(
                peer_at(seat, parts, outer, averaging, dht, clock, watch, progress),
                after_round=rounds.after_round,
                remark=keeper.remark,
                may_be_alone=True,
                republish=lambda: publish(manifest),
            )
            with rounds.recorded(seat.env):
                ending = train(peer)
                if ending == "stopped":
                    publish(replace(manifest, stopped=True), wait=True)
                    if watch.others(time.time() - clock.seconds):
                        time.sleep(4 * NEWS_SECONDS)  # with this peer the news would vanish
                else:
                    # The others may still be fetching their part of the last round's average from this peer.
                    time.sleep(max(0.0, clock.end + 2.0 - time.time()))
            if ending == "finished":
                rounds.finish("finished")
            elif not seat.goes_on_later:
                rounds.finish("stopped", test=False)  # whoever presses Ctrl-C does not want to wait
            if ending == "finished":
                writer.attempt.ended("COMPLETED", step=progress.step)
    return ending, run_dir


def join(
    addresses: Sequence[str],
    seat: Seat,
    *,
    adapt: Callable[[Manifest], Config],
) -> tuple[Ending, RunDir | None]:
    """Join the swarm at ``addresses``, and train in it until it ends.

    Args:
        adapt: the configuration for this machine, from the manifest's.
    """
    with (
        trust.identity(seat.identity) as identity,
        open_dht(identity, peers=addresses, host=seat.host, port=seat.port) as dht,
    ):
        manifest = read_manifest(dht, addresses)
        if manifest.stopped:
            raise UserError(f"The run {manifest.name} is over.", why="Its creator has ended it.", fix="Join another.")
        config = adapt(manifest)
        clock = RoundClock(config.collaborative.round_seconds, manifest.first_round, config.collaborative.rounds)
        if clock.index(time.time()) >= clock.count:
            raise UserError(
                f"The run {manifest.name} is over.",
                why=f"All of its {clock.count} rounds are done.",
                fix="Join another.",
            )
        splits = build_data(config.data)
        outer = common_state(config, splits)
        if outer.num_parameters != manifest.num_parameters:
            raise UserError(
                f"The model has {outer.num_parameters:,} parameters here, not {manifest.num_parameters:,}.",
                why=f"The model's code or a library differs: the creator has {in_words(manifest.versions)}; here are "
                f"{in_words(installed())}.",
                fix="Install the creator's versions.",
            )
        with averaged(config, seat, splits, outer, dht, manifest.run_id) as (parts, averaging):
            watch, progress = Watch(dht, _creator_of(dht, manifest)), Progress()
            peer = peer_at(seat, parts, outer, averaging, dht, clock, watch, progress)

            def take_part(peer: Peer) -> Ending:
                # Last of all: the state of a round is of use until that round ends.
                _adopt(averaging, outer, clock, seat)
                seat.say(f"Joined {manifest.name} in round {clock.index(time.time()) + 1}/{clock.count}.")
                averaging.share()
                return train(peer)

            if seat.open_run is None:
                return take_part(peer), None
            writer = seat.open_run(config)
            seat.say(f"Run: {writer.run.path}")
            # A volunteer's machine writes no accounts of a service.
            with kept(config, writer, parts, judges=False) as (checkpoints, metrics):
                keeper = Keeper(parts, writer, checkpoints, metrics, progress, seat.beat)
                rounds = RoundKeeper(keeper, outer, clock, watch, judges=False, say=seat.say)
                with rounds.recorded(seat.env):
                    ending = take_part(replace(peer, after_round=rounds.after_round, remark=keeper.remark))
                if progress.step and ending != "stopped":
                    rounds.finish("finished" if ending == "finished" else "stopped")
                if ending != "stopped":
                    writer.attempt.ended("COMPLETED", step=progress.step)
    return ending, writer.run


def _adopt(averaging: Averaging, outer: OuterState, clock: RoundClock, seat: Seat) -> None:
    """Take over the state of the run; it must be that of the present round, for the next one ends it.

    Raises RunFailedError when no peer gives it in time.
    """
    deadline, pause = time.monotonic() + max(_ADOPT_SECONDS, 2 * clock.seconds), 0.5
    while time.monotonic() < deadline and not seat.stop_requested():
        if averaging.adopt(10.0) and outer.round == clock.index(time.time()):
            return
        # Asked by everybody at once, the few peers that give it away would do nothing else.
        time.sleep(pause)
        pause = min(2 * pause, 8.0, clock.seconds / 4)
    if seat.stop_requested():
        return
    raise RunFailedError(
        "No peer gives away the state of the run.",
        why="The peers that could are gone, unreachable from here, or overloaded.",
        fix="Ask whoever runs `python -m jobs.swarm create`, and join again.",
    )


def _creator_of(dht: SwarmDHT, manifest: Manifest) -> str:
    for peer, own in dht.manifests().items():
        if own.run_id == manifest.run_id:
            return peer
    return ""

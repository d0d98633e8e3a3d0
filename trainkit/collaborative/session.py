"""A peer from its first message to its last: everything that a peer is made of, built and taken down in order."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainkit.collaborative import trust
from trainkit.collaborative.averaging import Averaging, open_averaging
from trainkit.collaborative.clock import RoundClock
from trainkit.collaborative.dht import Manifest, SwarmDHT, Watch, open_dht, read_manifest
from trainkit.collaborative.keeping import NoKeeper, RunKeeper, restore
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.rounds import NEWS_SECONDS, Ending, Peer, train
from trainkit.collaborative.settings import in_words, installed
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Splits
from trainkit.data.loader import resolve_workers
from trainkit.data.order import mix
from trainkit.distributed.device import cpus_of_rank, device_name, intra_op_threads
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, UserError
from trainkit.experiment import wants_gpu
from trainkit.models import build_model
from trainkit.monitor.base import open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.ranks.env import RankEnv, device_index
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import Precision, choose_precision

# A newcomer asks so long for the state of the run, less and less often.
_ADOPT_SECONDS = 60.0


@dataclass(frozen=True)
class Seat:
    """One peer's place: who it is, its device, and what it is asked to do besides training."""

    name: str
    env: RankEnv
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    open_run: Callable[[Config], RunDir] | None
    """Makes or opens this peer's run folder; None for a rank whose rank 0 keeps the records."""
    attempt: int = 0
    goes_on_later: bool = False
    """A stopped run will be started again from its last checkpoint, so it has no results yet."""
    identity: Path | None = None
    host: str | None = None
    """Address to listen on; None: call out only."""
    port: int = 0


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
        body = _Body(config, splits)
        run_dir = seat.open_run(config)
        yaml = to_yaml(config)
        with _keeper(run_dir, config, seat, judges=True, params=body.outer.num_parameters) as keeper:
            assert isinstance(keeper, RunKeeper)
            done = restore(run_dir, body.outer, keeper)
            if done >= config.collaborative.rounds:
                return "finished", run_dir
            collaborative = config.collaborative
            # Unguessable, and anew for each start: peers of an earlier attempt must not be taken for this one's.
            run_id = f"{run_dir.name}-{os.urandom(4).hex()}".replace(".", "-")
            with open_averaging(dht, body.outer, collaborative, run_id) as averaging:
                averaging.share()
                clock = RoundClock.starting(time.time(), collaborative.round_seconds, collaborative.rounds, done=done)
                manifest = Manifest(
                    run_id=run_id,
                    name=run_dir.name,
                    config=yaml,
                    config_sha256=hashlib.sha256(yaml.encode()).hexdigest(),
                    num_parameters=body.outer.num_parameters,
                    first_round=clock.first,
                    versions=installed(),
                )

                def publish(manifest: Manifest, *, wait: bool = False) -> None:
                    # From now on: a record only replaces one that would expire earlier.
                    dht.publish_manifest(manifest, clock.count * clock.seconds + 600.0, wait=wait)

                publish(manifest, wait=True)
                announce(run_dir, dht.addresses(prefer_host))
                peer = _peer(config, seat, body, clock, dht, dht.peer_id, averaging, keeper)
                peer.may_be_alone = True
                peer.republish = lambda: publish(manifest)
                peer.step = keeper.progress.step
                with _recorded(run_dir, seat, peer):
                    ending = train(peer)
                    if ending == "stopped":
                        publish(replace(manifest, stopped=True), wait=True)
                        if peer.watch.others(time.time() - clock.seconds):
                            time.sleep(4 * NEWS_SECONDS)  # with this peer the news would vanish
                    else:
                        # The others may still be fetching their part of the last round's average from this peer.
                        time.sleep(max(0.0, clock.end + 2.0 - time.time()))
            if ending == "finished":
                keeper.finish("finished")
            elif not seat.goes_on_later:
                keeper.finish("stopped", test=False)  # whoever presses Ctrl-C does not want to wait
            if ending == "finished" or not seat.goes_on_later:
                append_event(run_dir, "finished", attempt=seat.attempt, step=peer.step)
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
        body = _Body(config, build_data(config.data))
        if body.outer.num_parameters != manifest.num_parameters:
            raise UserError(
                f"The model has {body.outer.num_parameters:,} parameters here, not {manifest.num_parameters:,}.",
                why=f"The model's code or a library differs: the creator has {in_words(manifest.versions)}; here are "
                f"{in_words(installed())}.",
                fix="Install the creator's versions.",
            )
        with open_averaging(dht, body.outer, config.collaborative, manifest.run_id) as averaging:
            run_dir = seat.open_run(config) if seat.open_run else None
            if run_dir is not None:
                seat.say(f"Run: {run_dir.path}")
            with _keeper(run_dir, config, seat, judges=False, params=body.outer.num_parameters) as keeper:
                creator = _creator_of(dht, manifest)
                peer = _peer(config, seat, body, clock, dht, creator, averaging, keeper)
                with _recorded(run_dir, seat, peer):
                    # Last of all: the state of a round is of use until that round ends.
                    _adopt(averaging, body.outer, clock, seat)
                    seat.say(f"Joined {manifest.name} in round {clock.index(time.time()) + 1}/{clock.count}.")
                    averaging.share()
                    ending = train(peer)
                if run_dir is not None and isinstance(keeper, RunKeeper) and peer.step and ending != "stopped":
                    keeper.finish("finished" if ending == "finished" else "stopped")
                if run_dir is not None:
                    append_event(run_dir, "finished", attempt=seat.attempt, step=peer.step)
    return ending, run_dir


class _Body:
    """Model and common state, on the CPU: the averager is forked before CUDA is used for the first time."""

    def __init__(self, config: Config, splits: Splits) -> None:
        self.splits = splits
        self.model = build_model(config.model, splits.info, config.seed)
        collaborative = config.collaborative
        self.outer = OuterState(self.model, lr=collaborative.outer_lr, momentum=collaborative.outer_momentum)


def _peer(
    config: Config,
    seat: Seat,
    body: _Body,
    clock: RoundClock,
    dht: SwarmDHT,
    creator: str,
    averaging: Averaging,
    keeper: RunKeeper | NoKeeper,
) -> Peer:
    device = torch.device("cpu")
    if wants_gpu(config):
        device = torch.device("cuda", device_index(seat.env.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(intra_op_threads(seat.env))
    dist = Distributed(replace(seat.env, rank=0, world_size=1), device)  # a peer is a whole of its own
    body.model.to(device)
    peer = Peer(
        name=seat.name,
        config=config,
        clock=clock,
        dht=dht,
        watch=Watch(dht, creator),
        outer=body.outer,
        averaging=averaging,
        model=body.model,
        optimizer=build_optimizer(body.model, config.optim),
        precision=Precision(choose_precision(config.train.precision, device), dist),
        dist=dist,
        splits=body.splits,
        workers=resolve_workers(config.data.workers, body.splits, cpus_of_rank(seat.env)),
        data_seed=mix(config.seed, int(hashlib.sha256(dht.peer_id.encode()).hexdigest(), 16)),
        stop_requested=seat.stop_requested,
        keeper=keeper,
    )
    if isinstance(keeper, RunKeeper):
        keeper.peer = peer
    return peer


@contextmanager
def _keeper(
    run_dir: RunDir | None, config: Config, seat: Seat, *, judges: bool, params: int
) -> Iterator[RunKeeper | NoKeeper]:
    if run_dir is None:
        yield NoKeeper()
        return
    # Lines a round are said by the keeper; a volunteer's machine writes no accounts of a service.
    left_out = ("console",) if judges else ("console", "wandb")
    names = tuple(name for name in config.monitor.loggers if name not in left_out)
    quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"loggers": names})})
    hardware = sample_hardware(
        run_dir, socket.gethostname(), config.monitor.hardware_every_seconds, "cuda" if wants_gpu(config) else "cpu"
    )
    with open_loggers(quiet, run_dir, total_steps=0, params=params) as metrics, hardware:
        yield RunKeeper(run_dir, config, metrics, judges=judges, say=seat.say)


@contextmanager
def _recorded(run_dir: RunDir | None, seat: Seat, peer: Peer) -> Iterator[None]:
    """The events of a peer's start, and of its failure."""
    if run_dir is None:
        yield
        return
    append_event(
        run_dir,
        "started",
        attempt=seat.attempt,
        step=peer.step,
        world_size=seat.env.world_size,
        hosts=[socket.gethostname()],
        device=device_name(peer.dist.device),
        precision=peer.precision.name,
        params=peer.outer.num_parameters,
    )
    try:
        yield
    except Exception as error:
        what = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
        append_event(run_dir, "failed", rank=seat.env.rank, host=socket.gethostname(), error=what)
        raise


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

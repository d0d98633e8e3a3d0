"""Collaborative runs as the commands see them: create a swarm, join one, be one rank of a submitted one.

Nothing heavy is imported before it is clear that there is something to do.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from trainkit import terminal
from trainkit.collaborative import address, processes
from trainkit.collaborative.home import home_of
from trainkit.collaborative.reachability import how_to_be_reached
from trainkit.collaborative.settings import adapted, check_own, require_collaborative, same_settings
from trainkit.config.schema import Config
from trainkit.distributed.stop import StopFlag, hand_back
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.ranks.env import RankEnv
from trainkit.ranks.secret import NO_SECRET, Secret
from trainkit.records.attempts import Attempt
from trainkit.records.replacing import replacing
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer

if TYPE_CHECKING:
    from trainkit.collaborative.messages import Manifest
    from trainkit.collaborative.rounds import Ending
    from trainkit.collaborative.seat import Seat

Outcome = Literal["finished", "preempted"]

# Beside config.yaml: the addresses of a running swarm, one a line.
ADDRESS_FILE = "swarm_address"


def create_swarm(
    config: Config,
    *,
    open_run: Callable[[Config], Writer],
    name: str,
    host: str,
    port: int,
    identity: Path | None,
    stop: StopFlag,
    say: Callable[[str], None] = print,
    announce: str | None = None,
    trains: bool = True,
    folder: RunDir | None = None,
) -> tuple[str, RunDir]:
    """Create a swarm on this machine and train in it. How it ended (finished, stopped), and the run folder.

    Args:
        announce: the address that others are told, where it is not this machine's own.
        trains: else it only reduces, judges and keeps the records.
        folder: of the run, if it goes on.
    """
    require_collaborative(config)
    if config.collaborative.initial_peers:
        raise UserError(
            "collaborative.initial_peers is set, so there is a swarm already.",
            why="`create` starts a new one.",
            fix="Join that one: python -m jobs.join ADDRESS. Or remove collaborative.initial_peers.",
        )
    processes.require_hivemind()
    from trainkit.collaborative import session
    from trainkit.collaborative.seat import Seat

    def tell(run_dir: RunDir, addresses: list[str]) -> None:
        _write_addresses(run_dir, addresses)
        say(f"Run: {run_dir.path}")
        say("Others join with one of these lines, the first that reaches this machine:")
        for item in addresses:
            say(f"  {address.join_command([item])}")
        for line in how_to_be_reached(addresses):
            say(line)
        say(f"Look at it: {terminal.command('swarm', 'status', run_dir.path)}")

    seat = Seat(
        name,
        RankEnv.single(),
        lambda: stop.requested,
        say,
        open_run,
        identity=identity,
        host=host,
        port=port,
        announce=announce,
        folder=folder,
        trains=trains,
    )
    ending, run_dir = session.create(config, seat, announce=tell)
    return ending, run_dir


def resume_swarm(
    run_dir: RunDir,
    config: Config,
    *,
    open_run: Callable[[Config], Writer],
    name: str,
    trains: bool,
    stop: StopFlag,
    say: Callable[[str], None] = print,
) -> tuple[str, RunDir]:
    """Go on with a swarm that this machine has created: under the same addresses, from its newest checkpoint.

    Raises UserError when the run folder does not say where it was.
    """
    home = home_of(run_dir)
    if home is None:
        raise UserError(
            f"{run_dir.name} has not been a swarm that others could join.",
            why="It was ended before it was ready, or was created by an older trainkit.",
            fix=f"Start a new one: {terminal.command('swarm', 'create', run_dir.path)}",
        )
    return create_swarm(
        config,
        open_run=open_run,
        name=name,
        host=home.host,
        port=home.port,
        identity=None,
        stop=stop,
        say=say,
        announce=home.announce,
        trains=trains,
        folder=run_dir,
    )


def join_swarm(
    addresses: Sequence[str],
    *,
    overrides: Sequence[str],
    open_run: Callable[[Config, str], Writer],
    name: str,
    host: str | None,
    port: int,
    identity: Path | None,
    allow_code: bool,
    stop: StopFlag,
    say: Callable[[str], None] = print,
) -> tuple[str, RunDir | None]:
    """Join a swarm as a volunteer. How it ended (finished, stopped, ended by its creator), and the run folder.

    Args:
        open_run: makes the run folder, from the configuration and the name of the creator's run.
        host: address to listen on, for a machine that others reach; None to call out only.
        allow_code: build a model or data set by code of the user's own, that the manifest names.
    """
    for item in addresses:
        address.check(item)
    check_own(overrides)
    processes.require_hivemind()
    from trainkit.collaborative import joining
    from trainkit.collaborative.seat import Seat

    run_name = ""

    def adapt(manifest: Manifest) -> Config:
        nonlocal run_name
        run_name = manifest.name
        return adapted(manifest.config, overrides, allow_code=allow_code)

    seat = Seat(
        name,
        RankEnv.single(),
        lambda: stop.requested,
        say,
        lambda config: open_run(config, run_name),
        identity=identity,
        host=host,
        port=port,
    )
    return joining.join(addresses, seat, adapt=adapt)


def run_swarm_rank(
    config: Config,
    rank_env: RankEnv,
    stop: StopFlag,
    *,
    writer: Writer | None,
    node: Attempt | None = None,
    secret: Secret = NO_SECRET,
    beat: Callable[[], None] = lambda: None,
) -> Outcome:
    """One rank of a submitted swarm; each rank is a peer of its own.

    Rank 0 creates the swarm and the others join it. They meet by a store at ``MASTER_ADDR:MASTER_PORT``, so they need
    no folder in common; rank 0's addresses are also written to ``swarm_address`` in the run folder, for volunteers from
    outside. With ``collaborative.initial_peers`` all ranks join the swarm that is there.

    Args:
        writer: of the run folder; on rank 0 only, which keeps the records.
        node: the attempt as it was begun on this node, which need not share rank 0's folder; None: by nobody.
        secret: what the ranks of this run know and nobody else.
        beat: called whenever this rank has made progress.
    """
    require_collaborative(config)
    processes.require_hivemind()
    from trainkit.collaborative import joining
    from trainkit.collaborative.seat import Seat

    assert writer is not None or not rank_env.is_main
    seat = Seat(
        name=f"{socket.gethostname()}/{rank_env.rank}",
        env=rank_env,
        stop_requested=lambda: stop.requested,
        say=lambda line: print(line, flush=True),
        open_run=None if writer is None else lambda _: writer,
        goes_on_later=bool(config.launch.requeue),
        beat=beat,
        folder=writer.run if writer is not None else None,
    )
    ending: str
    if config.collaborative.initial_peers:
        for item in config.collaborative.initial_peers:
            address.check(item)
        ending, _ = joining.join(
            config.collaborative.initial_peers, seat, adapt=lambda manifest: same_settings(config, manifest.config)
        )
    else:
        ending = _rank_of_new_swarm(config, seat, secret)
    if ending == "stopped":
        hand_back(writer.attempt if writer is not None else node, rank_env, stop.signals, step=None)
        return "preempted"
    return "finished"


def _rank_of_new_swarm(config: Config, seat: Seat, secret: Secret) -> Ending:
    from trainkit.collaborative import joining, session
    from trainkit.distributed.meeting import meet

    env = seat.env
    several_machines = env.num_nodes > 1 and env.launcher != "submitit-local"
    # Ranks of one job reach each other, so every one of them serves the others.
    seat = replace(
        seat,
        host="0.0.0.0" if several_machines or config.collaborative.port else "127.0.0.1",
        port=config.collaborative.port if env.is_main else 0,
        # Without rank 0 there is nothing to wait for: whoever looks after the ranks starts them all again.
        patience=0.0,
    )
    store = meet(env, secret, timedelta(minutes=5), wait_for_all=False) if env.world_size > 1 else None
    if not env.is_main:
        return joining.join(_addresses_from(store), seat, adapt=lambda _: config)[0]

    def announce(run_dir: RunDir, addresses: list[str]) -> None:
        _write_addresses(run_dir, addresses)
        if store is not None:
            store.set("swarm", "\n".join(addresses))
        seat.say(f"Volunteers join with: {address.join_command(addresses)}")

    try:
        return session.create(config, seat, announce=announce, prefer_host=_ip_of(env.master_addr))[0]
    except TrainkitError as error:
        if store is not None:
            store.set("swarm", f"failed: {error.what}")  # or the others would wait for an address
        raise


@contextmanager
def leave_on_interrupt(stop: StopFlag, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C asks the peer to leave after the round's exchange; a second one ends it at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        stop.signals.append("SIGINT")
        say("Leaving the swarm; Ctrl-C once more to leave at once.")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _write_addresses(run_dir: RunDir, addresses: Sequence[str]) -> None:
    with replacing(run_dir.path / ADDRESS_FILE) as partial:
        partial.write_text("".join(f"{item}\n" for item in addresses), encoding="utf-8")


def _addresses_from(store: Any) -> list[str]:
    text = store.get("swarm").decode()  # waits for rank 0
    if text.startswith("failed: "):
        why = text.removeprefix("failed: ")
        raise RunFailedError("Rank 0 could not create the swarm.", why=why, fix="See its log.")
    return list(text.splitlines())


def _ip_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None

"""One rank of a submitted swarm: a peer of its own, that meets the others by the job's own means."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from trainkit import terminal
from trainkit.collaborative import processes
from trainkit.collaborative.entry import Entry, entry_of, with_token
from trainkit.collaborative.handing import hide, reveal
from trainkit.collaborative.home import write_addresses
from trainkit.collaborative.invitation import RANKS, write_token
from trainkit.collaborative.owner import own_pass, owner_of
from trainkit.collaborative.ranks import follow_rank_0
from trainkit.collaborative.settings import require_collaborative, same_settings
from trainkit.config.schema import Config
from trainkit.distributed.stop import StopFlag, hand_back
from trainkit.errors import RunFailedError, TrainkitError
from trainkit.ranks.env import RankEnv
from trainkit.ranks.secret import NO_SECRET, Secret
from trainkit.records.attempts import Attempt
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer

if TYPE_CHECKING:
    from trainkit.collaborative.loop import Ending
    from trainkit.collaborative.seat import Seat

Outcome = Literal["finished", "preempted"]
_TOKEN = "token of the ranks"


def run_swarm_rank(
    config: Config,
    rank_env: RankEnv,
    stop: StopFlag,
    *,
    writer: Writer | None,
    node: Attempt | None = None,
    secret: Secret = NO_SECRET,
    token: str = "",
    beat: Callable[[], None] = lambda: None,
) -> Outcome:
    """One rank of a submitted swarm; each rank of a new one is a peer of its own.

    Rank 0 creates the swarm and the others join it. They meet by a store at ``MASTER_ADDR:MASTER_PORT``, so they need
    no folder in common; rank 0's addresses are also written to ``swarm_address`` in the run folder, for volunteers from
    outside. With ``collaborative.initial_peers`` the swarm is there: all ranks join it, as one peer that rank 0 speaks
    for.

    Args:
        writer: of the run folder; on rank 0 only, which keeps the records.
        node: the attempt as it was begun on this node, which need not share rank 0's folder; None: by nobody.
        secret: what the ranks of this run know and nobody else.
        token: by which they join the swarm at ``collaborative.initial_peers``; without one it must be open to all.
        beat: called whenever this rank has made progress.
    """
    require_collaborative(config)
    processes.require_hivemind()
    from trainkit.collaborative import joining
    from trainkit.collaborative.seat import Seat
    from trainkit.distributed.device import gpu_is_here

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
    if config.collaborative.initial_peers and writer is None:
        follow_rank_0(rank_env, secret, use_gpu=config.launch.gpus_per_node != 0 and gpu_is_here(), beat=beat)
        ending = "stopped" if stop.requested else "finished"
    elif config.collaborative.initial_peers:
        assert writer is not None
        # Back from the queue it is who it was before.
        name, identity = f"{socket.gethostname()}/{writer.run.name}", writer.run.path / "identity"
        seat = replace(seat, name=name[-terminal.LONGEST_NAME :], identity=identity, team=True, secret=secret)
        entry = entry_of([token] if token else config.collaborative.initial_peers, {}, name=seat.name)
        ending, _ = joining.join(entry, seat, adapt=lambda manifest: same_settings(config, manifest.config))
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
        return joining.join(_entry_from(store, secret), seat, adapt=lambda _: config)[0]

    def announce(run_dir: RunDir, addresses: list[str]) -> None:
        write_addresses(run_dir, addresses)
        if store is not None:
            # A rank is as good as rank 0: it averages for others and gives away the state.
            ranks = own_pass(owner_of(run_dir.path).key, RANKS, "reducer")
            store.set("swarm", hide(secret, _TOKEN, write_token(ranks, addresses)))
        # Not a token: this goes into a log.
        seat.say(f"Invite volunteers: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")

    try:
        return session.create(config, seat, announce=announce, prefer_host=_ip_of(env.master_addr))[0]
    except TrainkitError as error:
        if store is not None:
            store.set("swarm", hide(secret, _TOKEN, f"failed: {error.what}"))  # or the others would wait for an address
        raise


def _entry_from(store: Any, secret: Secret) -> Entry:
    text = reveal(secret, _TOKEN, store.get("swarm"))  # waits for rank 0
    if text.startswith("failed: "):
        why = text.removeprefix("failed: ")
        raise RunFailedError("Rank 0 could not create the swarm.", why=why, fix="See its log.")
    return with_token(text)


def _ip_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None

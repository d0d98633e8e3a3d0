"""Collaborative runs as the commands see them: create a swarm, join one, be one rank of a submitted one.

Nothing heavy is imported before it is clear that there is something to do.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from trainkit import fileio, terminal
from trainkit.config.schema import Config
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.ranks.env import NO_SECRET, ForgedError, RankEnv, Secret
from trainkit.ranks.signals import StopFlag, hand_back
from trainkit.run.events import Attempt, Writer, history_of, submitted, writing
from trainkit.run.folder import RunDir, as_open_as
from trainkit.run.lease import ProcessId
from trainkit.swarm import address, processes
from trainkit.swarm.address import addresses_in, announced, how_to_be_reached, saved_peer, write_addresses
from trainkit.swarm.admission import KEY_FILE, SEEN, Entry, entry_of, invited, own_pass, owner_of, with_token
from trainkit.swarm.invitations import GUESTS, RANKS, write_token
from trainkit.swarm.local_ranks import follow_rank_0
from trainkit.swarm.settings import adapted, check_own, require_collaborative, same_settings

if TYPE_CHECKING:
    from trainkit.swarm.assemble import PeerSpec
    from trainkit.swarm.messages import Manifest
    from trainkit.swarm.rounds import Ending


# How long the token is good that `create` prints.
_FIRST_SECONDS = 7 * 86400.0


def _to_terminal(line: str) -> None:
    print(line, flush=True)


def create_swarm(
    config: Config,
    *,
    open_run: Callable[[Config], Writer],
    name: str,
    host: str,
    port: int,
    identity: Path | None,
    stop: StopFlag,
    max_upload: float | None = None,
    say: Callable[[str], None] = print,
    whisper: Callable[[str], None] = _to_terminal,
    announce: str | None = None,
    trains: bool = True,
    folder: RunDir | None = None,
) -> tuple[str, RunDir]:
    """Create a swarm on this machine and train in it. How it ended (finished, stopped), and the run folder.

    Args:
        whisper: prints what must not be kept in the run's log, such as a token.
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
    from trainkit.swarm import creator
    from trainkit.swarm.assemble import PeerSpec

    def tell(run_dir: RunDir, addresses: list[str]) -> None:
        before = addresses_in(run_dir)
        write_addresses(run_dir, addresses)
        say(f"Run: {run_dir.path}")
        if before and not {*before} & {*addresses[:1]}:
            say("It has moved. Who trains finds it through an anchor; without one, and with a token of before:")
            say(f"  {terminal.command('join', 'TOKEN', addresses[0])}")
        if config.collaborative.open:
            say("Open to all: whoever has one of these lines may join, and may see the model and spoil its rounds:")
            for item in addresses:
                say(f"  {address.join_command([item])}")
        elif folder is None:
            for line in invited(owner_of(run_dir.path), tuple(addresses), GUESTS, _FIRST_SECONDS, "volunteer"):
                whisper(line)
        say(f"Invite by name: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")
        for line in how_to_be_reached(addresses):
            say(line)
        say(f"Look at it: {terminal.command('swarm', 'status', run_dir.path)}")

    spec = PeerSpec(
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
        max_upload=max_upload,
    )
    ending, run_dir = creator.create(config, spec, announce=tell)
    return ending, run_dir


def resume_swarm(
    run_dir: RunDir,
    config: Config,
    *,
    open_run: Callable[[Config], Writer],
    name: str,
    trains: bool,
    stop: StopFlag,
    host: str | None = None,
    port: int = 0,
    announce: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[str, RunDir]:
    """Go on with a swarm that this machine has created: under the same addresses, from its newest checkpoint.

    Args:
        name: where it had none.
        host: to listen on instead, on another machine; so are ``port`` and ``announce``.

    Raises UserError when the run folder does not say where it was, or has no owner's key any more.
    """
    home = saved_peer(run_dir)
    if home is None:
        raise UserError(
            f"{run_dir.name} has not created a swarm that others could join.",
            why="It has joined one, or was ended before it was ready.",
            fix=f"Join again; or start a new one: {terminal.command('swarm', 'create', run_dir.path)}",
        )
    if not (run_dir.path / KEY_FILE).is_file():
        raise UserError(
            f"{run_dir.name} has lost its {KEY_FILE}.",
            why="Whoever was invited believes what this key has signed, and nothing else.",
            fix=f"Copy it back into that folder, or start anew: {terminal.command('swarm', 'create', run_dir.path)}",
        )
    return create_swarm(
        config,
        open_run=open_run,
        name=home.name or name,
        host=host or home.host,
        port=port or home.port,
        identity=None,
        stop=stop,
        say=say,
        announce=announced(announce, port or home.port) or home.announce,
        trains=trains,
        folder=run_dir,
    )


def join_swarm(
    entry: Entry,
    *,
    overrides: Sequence[str],
    open_run: Callable[[Config, str], Writer],
    name: str,
    host: str | None,
    port: int,
    identity: Path | None,
    allow_code: bool,
    stop: StopFlag,
    max_upload: float | None = None,
    say: Callable[[str], None] = print,
    ranks: RankEnv | None = None,
    secret: Secret = NO_SECRET,
    announce: str | None = None,
    trains: bool = True,
) -> tuple[str, RunDir | None]:
    """Join a swarm as a volunteer. How it ended (finished, stopped, ended by its creator), and the run folder.

    Args:
        ranks: this is rank 0 of them, and the others, who know ``secret``, call `follow_rank_0`; None: there are none.
        open_run: makes the run folder, from the configuration and the name of the creator's run.
        host: address to listen on, for a machine that others reach; None to call out only.
        announce: the address that others are told, where it is not this machine's own.
        trains: else it is an anchor: it reduces, keeps the common weights, and others join through it.
        allow_code: build a model or data set by code of the user's own, that the manifest names.
    """
    check_own(overrides)
    if host is not None and entry.own.grant.role == "volunteer":
        raise UserError(
            "Only those whom the owner trusts can be reached by others.",
            why="This peer is a volunteer: it calls out only, and averages for nobody.",
            fix="Leave --public out, or ask for a token of `python -m jobs.swarm invite NAME --reduce`.",
        )
    if entry.seen:
        say(SEEN)
    processes.require_hivemind()
    from trainkit.swarm import guest
    from trainkit.swarm.assemble import PeerSpec

    def opened(run_dir: RunDir, addresses: list[str]) -> None:
        write_addresses(run_dir, addresses)
        say("Others join through this machine, too:")
        for item in addresses:
            # Not the token itself: this goes into the log.
            say(f"  {terminal.command('join', *(['TOKEN'] if entry.invited else []), item)}")

    run_name = ""

    def adapt(manifest: Manifest) -> Config:
        nonlocal run_name
        run_name = manifest.name
        return adapted(manifest.config, overrides, allow_code=allow_code)

    spec = PeerSpec(
        name,
        ranks or RankEnv.single(),
        lambda: stop.requested,
        say,
        lambda config: open_run(config, run_name),
        identity=identity,
        host=host,
        port=port,
        team=True,
        secret=secret,
        announce=announce,
        must_prove=host is not None,
        trains=trains,
        max_upload=max_upload,
        opened=opened,
    )
    return guest.join(entry, spec, adapt=adapt)


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


# What the ranks of one job hand each other that nobody else may read: sealed with the run's secret.
#
# A meeting of ranks keeps strangers from writing, not from reading: its store speaks in the clear.

_NONCE = 12  # bytes; ChaCha20-Poly1305, RFC 8439


def hide(secret: Secret, purpose: str, text: str) -> bytes:
    """``text`` for those who know ``secret``."""
    nonce = os.urandom(_NONCE)
    return nonce + _cipher(secret, purpose).encrypt(nonce, text.encode(), None)


def reveal(secret: Secret, purpose: str, hidden: bytes) -> str:
    """What `hide` was given. Raises ForgedError when it was hidden with another secret or for another purpose."""
    try:
        return _cipher(secret, purpose).decrypt(hidden[:_NONCE], hidden[_NONCE:], None).decode()
    except (InvalidTag, ValueError) as error:
        raise ForgedError(purpose) from error


def _cipher(secret: Secret, purpose: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(bytes.fromhex(secret.name(f"key to hide {purpose}")))


# One rank of a submitted swarm: a peer of its own, that meets the others by the job's own means.

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
    from trainkit.distributed.device import gpu_is_here
    from trainkit.swarm import guest
    from trainkit.swarm.assemble import PeerSpec

    assert writer is not None or not rank_env.is_main
    spec = PeerSpec(
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
        spec = replace(spec, name=name[-terminal.LONGEST_NAME :], identity=identity, team=True, secret=secret)
        entry = entry_of([token] if token else config.collaborative.initial_peers, {}, name=spec.name)
        ending, _ = guest.join(entry, spec, adapt=lambda manifest: same_settings(config, manifest.config))
    else:
        ending = _rank_of_new_swarm(config, spec, secret)
    if ending == "stopped":
        hand_back(writer.attempt if writer is not None else node, rank_env, stop.signals, step=None)
        return "preempted"
    return "finished"


def _rank_of_new_swarm(config: Config, spec: PeerSpec, secret: Secret) -> Ending:
    from trainkit.distributed.meeting import meet
    from trainkit.swarm import creator, guest

    env = spec.env
    several_machines = env.num_nodes > 1 and env.launcher != "submitit-local"
    # Ranks of one job reach each other, so every one of them serves the others.
    spec = replace(
        spec,
        host="0.0.0.0" if several_machines or config.collaborative.port else "127.0.0.1",
        port=config.collaborative.port if env.is_main else 0,
        # Without rank 0 there is nothing to wait for: whoever looks after the ranks starts them all again.
        patience=0.0,
    )
    store = meet(env, secret, timedelta(minutes=5), wait_for_all=False) if env.world_size > 1 else None
    if not env.is_main:
        return guest.join(_entry_from(store, secret), spec, adapt=lambda _: config)[0]

    def announce(run_dir: RunDir, addresses: list[str]) -> None:
        write_addresses(run_dir, addresses)
        if store is not None:
            # A rank is as good as rank 0: it averages for others and gives away the state.
            ranks = own_pass(owner_of(run_dir.path).key, RANKS, "reducer")
            store.set("swarm", hide(secret, _TOKEN, write_token(ranks, addresses)))
        # Not a token: this goes into a log.
        spec.say(f"Invite volunteers: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")

    try:
        return creator.create(config, spec, announce=announce, prefer_host=_ip_of(env.master_addr))[0]
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


# A peer that a person has started in a terminal: `status`, `logs` and `cancel` know its run like any submitted one.


class TerminalPeer:
    """What is said goes to the terminal, and into the run's log once there is a run."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        self.attempt: Attempt | None = None

    def say(self, line: str) -> None:
        """Print at once, also into a pipe."""
        print(line, flush=True)
        if self.attempt is not None:
            # A full disk is told of on the terminal, and must not end what goes on in spite of it.
            with suppress(OSError), fileio.append(self.attempt.logs / "rank-0.out", self.attempt.run.path) as log:
                log.write(f"{line}\n".encode())

    def begin(self, run_dir: RunDir) -> Writer:
        """This process is the job of ``run_dir`` from now on, and writes it."""
        self._held.enter_context(as_open_as(run_dir.path))
        me = ProcessId.of(os.getpid())
        submitted(run_dir, "swarm", str(me.pid), me)
        self.attempt = Attempt.begin(run_dir)
        return self._held.enter_context(writing(self.attempt))


@contextmanager
def terminal_peer() -> Iterator[TerminalPeer]:
    """Notes how the run ended, in SLURM's words."""
    with ExitStack() as held:
        peer, state = TerminalPeer(held), "FAILED"
        try:
            yield peer
            came_to_its_end = peer.attempt is not None and history_of(peer.attempt.run).finished
            state = "COMPLETED" if came_to_its_end else "CANCELLED"
        except KeyboardInterrupt:
            state = "CANCELLED"
            raise
        finally:
            if peer.attempt is not None:
                peer.attempt.ended(state, job_id=str(os.getpid()))

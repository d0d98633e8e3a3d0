"""Collaborative runs as the commands see them: create a swarm, join one, be one rank of a submitted one.

Nothing heavy is imported before it is clear that there is something to do.
"""

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Literal

from cryptography.fernet import Fernet, InvalidToken

from trainkit.cluster.pickles import BEGIN, PYTHON_FLAGS
from trainkit.cluster.ranks import NO_SECRET, VARIABLE, ForgedError, RankEnv, Secret
from trainkit.cluster.signals import StopFlag, hand_back, stop_on_signal
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.hosts import free_port
from trainkit.common.process import end_with_parent, python_path
from trainkit.config.schema import Config
from trainkit.run import code_files
from trainkit.run.events import Attempt, submitted, writing
from trainkit.run.folder import SWARM_IDENTITY, RunDir, as_open_as
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId
from trainkit.swarm.identity.invitations import GUESTS, RANKS, Entry, entry_of, with_token, write_token
from trainkit.swarm.network import processes
from trainkit.swarm.peer.owner import ANCHOR, KEY_FILE, invite, own_pass, owner_of
from trainkit.swarm.peer.place import Hooks, PeerSpec, saved_peer
from trainkit.swarm.peer.same_run import adapted, check_own, require_collaborative, same_settings
from trainkit.swarm.protocol.addresses import announced, how_to_be_reached, port_of
from trainkit.swarm.protocol.messages import Manifest
from trainkit.training.startup import Starting

# How long the tokens are good that `create` prints.
_FIRST_SECONDS = 7 * 86400.0
_CARRIED_PORT = 4711


def through(text: str, spec: PeerSpec) -> PeerSpec:
    """Return the place of a creator that others reach at ``text``, HOST or HOST:PORT, where an anchor carries it.

    Raises UserError when that is no address.
    """
    where = announced(text, _CARRIED_PORT, "--through")
    return replace(spec, host="127.0.0.1", announce=where, is_carried=True)


def carrying(entry: Entry, spec: PeerSpec) -> tuple[Entry, PeerSpec]:
    """Return how an anchor takes part that carries the creator of its token: it meets it at its own port, and listens
    for others at the next one, unless its flags name another.
    """
    _, kind, host, _, port, _, peer = entry.addresses[0].split("/")
    at = int(port)
    own = spec.port or at + 1
    here = f"/ip4/127.0.0.1/tcp/{at}/p2p/{peer}"
    spec = replace(spec, port=own, announce=spec.announce or f"/{kind}/{host}/tcp/{own}", carries=at)
    return replace(entry, addresses=(here, *entry.addresses)), spec


def create_swarm(config: Config, spec: PeerSpec, hooks: Hooks) -> tuple[str, RunDir]:
    """Create a swarm on this machine, or go on with that of ``spec.folder``, and train in it.

    How it ended (finished, stopped), and the run folder.
    """
    require_collaborative(config)
    if config.collaborative.initial_peers:
        why = "It names an existing swarm."
        fix = "Join that swarm, or omit the setting."
        raise UserError("collaborative.initial_peers is set.", why=why, fix=fix)
    processes.require_hivemind()
    from trainkit.swarm.peer.creator import create

    if spec.is_carried:
        spec = replace(spec, port=spec.port or free_port())

    def opened(run_dir: RunDir, addresses: list[str], *, moved: bool) -> None:
        lines = [f"Run: {run_dir.path}"]
        if moved:
            lines.append("It has moved. Peers find it through an anchor that stays; without one they join anew:")
            lines.append(f"  {terminal.command('join', 'TOKEN', addresses[0])}")
        lines.append(f"Invite by name: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")
        lines += [*how_to_be_reached(addresses), f"Look at it: {terminal.command('swarm', 'status', run_dir.path)}"]
        hooks.say("\n".join(lines))
        # Tokens must not be kept in the run's log.
        ask = partial(invite, owner_of(run_dir.path), tuple(addresses))
        if spec.is_carried and (spec.folder is None or moved):
            port = port_of(addresses[0])
            ports = f"which needs TCP ports {port} and {port + 1}"
            terminal.say(f"Others reach this machine through an anchor, {ports}. Start it there:")
            terminal.say("\n".join(ask("anchor", _FIRST_SECONDS, "reducer", ANCHOR)))
        if spec.folder is None:
            terminal.say("\n".join(ask(GUESTS, _FIRST_SECONDS, "volunteer")))

    return create(config, spec, hooks, opened)


def resume_swarm(run: RunDir, config: Config, spec: PeerSpec, hooks: Hooks) -> tuple[str, RunDir]:
    """Go on with a swarm that this machine has created: under the same addresses, from its newest checkpoint.

    Args:
        spec: its host, port and announced address replace those of before where they are given.

    Raises UserError when the run folder does not say where it was, or has no owner's key any more.
    """
    place = saved_peer(run)
    anew = terminal.command("swarm", "create", run.path)
    if place is None or not (run.path / KEY_FILE).is_file():
        as_anchor = f"as an anchor by `swarm anchor` with its --port and --identity {SWARM_IDENTITY.at(run.path)}"
        why = f"It joined a swarm, ended before others could join, or has lost its {KEY_FILE}."
        fix = f"Join again, {as_anchor}; or copy the key back; or start a new one: {anew}"
        raise UserError(f"{run.name} cannot continue as the creator of a swarm.", why=why, fix=fix)
    spec = replace(spec, is_carried=spec.is_carried or (place.is_carried and not spec.host))
    port = spec.port or (0 if spec.is_carried else place.port)  # where it listens then is nobody's business
    where = announced(spec.announce, port) or place.announce
    spec = replace(spec, name=place.name or spec.name, host=spec.host or place.host, port=port, announce=where)
    return create_swarm(config, replace(spec, folder=run), hooks)


def join_swarm(
    entry: Entry, spec: PeerSpec, hooks: Hooks, overrides: Sequence[str], *, allow_code: bool
) -> tuple[str, RunDir | None]:
    """Join a swarm. How it ended (finished, stopped, ended by its creator), and the run folder.

    Args:
        allow_code: build a model or data set by code of the user's own, that the manifest names.
    """
    check_own(overrides)
    if spec.host is not None and entry.own.grant.role == "volunteer":
        what = "Others can only connect to peers that the owner trusts."
        why = "This peer is a volunteer: it only connects to others, and averages for nobody."
        fix = "Omit --public, --host, --port and --announce"
        fix = f"{fix}, or ask for a token of `python -m jobs.swarm invite NAME --reduce`."
        raise UserError(what, why=why, fix=fix)
    processes.require_hivemind()
    from trainkit.swarm.peer import guest

    def own(manifest: Manifest) -> Config:
        return adapted(manifest.config, overrides, allow_code=allow_code)

    return guest.join(entry, replace(spec, team=True), hooks, own)


_PROGRAM = (*PYTHON_FLAGS, "-c", f"{BEGIN}from trainkit.__main__ import main; main()", "join")


# The ranks of one peer, one for each of its GPUs.

_MOST_RANKS = 64


@contextmanager
def ranks_of_peer(
    number: int | None, arguments: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[RankEnv, Secret]]:
    """This process's place among the ranks of its peer, and what they know.

    A launcher (torchrun, srun) has started all of them and says so in ``env``; or this process is rank 0 and starts the
    others, by the command that it was started with itself. They end with it, however it ends.

    Args:
        number: of ranks, as the user has asked; None: as many as a launcher has started, else 1.
        arguments: ``python -m jobs.join ARGUMENTS``.

    Raises UserError when user and launcher disagree.
    """
    known = RankEnv.from_mapping(env)
    if number is None or number == known.world_size:
        yield known, Secret.from_mapping(env)
        return
    if known.world_size > 1 or not 0 < number <= _MOST_RANKS:
        why = f"A peer has one rank for each of its GPUs, 1 to {_MOST_RANKS}; torchrun and srun have their own."
        fix = "Use --nproc 2 for two GPUs, or omit it if a launcher has started the ranks."
        raise UserError(f"--nproc {number} is not possible here.", why=why, fix=fix)
    secret = Secret.generate()
    common = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "NODE_RANK": "0", VARIABLE: secret.text}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, *others = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for own in others:
            process = subprocess.Popen(
                [sys.executable, *_PROGRAM, *arguments], stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
                env={**env, **own, "PYTHONPATH": python_path(code_files.INSTALLED, env)},
                start_new_session=True,  # Ctrl-C is rank 0's
            )  # fmt: skip
            started.append(process)
        yield RankEnv.from_mapping(first), secret
    finally:
        for process in started:
            process.kill()
            process.wait()


def follow_rank_0(env: RankEnv, secret: Secret, *, use_gpu: bool, beat: Callable[[], None] = lambda: None) -> None:
    """Be another rank of a peer: train with rank 0, as it says, and leave when it does.

    Raises RunFailedError when rank 0 has died.
    """
    from trainkit.distributed.process_group import distributed
    from trainkit.swarm.peer.peer_ranks import follow
    from trainkit.swarm.peer.session import PATIENCE

    with distributed(env, use_gpu=use_gpu, secret=secret, collective_timeout=PATIENCE) as dist:
        follow(dist, beat=beat)


# One rank of a submitted swarm: a peer of its own, that meets the others by the job's own means.

Outcome = Literal["finished", "preempted"]


def run_swarm_rank(
    config: Config, rank_env: RankEnv, stop: StopFlag, *, writer: Attempt | None, node: Attempt | None = None,
    env: Mapping[str, str], beat: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """One rank of a submitted swarm; each rank of a new one is a peer of its own.

    Rank 0 creates the swarm and the others join it. They meet by a store at ``MASTER_ADDR:MASTER_PORT``, so they need
    no folder in common; rank 0's addresses are also written to ``swarm_address`` in the run folder, for volunteers from
    outside. With ``collaborative.initial_peers`` the swarm is there: all ranks join it, as one peer that rank 0 speaks
    for.

    Args:
        writer: of the run folder; on rank 0 only, which keeps the records.
        node: the attempt as it was begun on this node, which need not share rank 0's folder; None: by nobody.
        env: the secret of the ranks, and the token by which they join the swarm at ``collaborative.initial_peers``.
        beat: called whenever this rank has made progress.
    """
    require_collaborative(config)
    processes.require_hivemind()
    from trainkit.distributed.device import gpu_is_here
    from trainkit.swarm.peer import guest

    assert writer is not None or not rank_env.is_main
    hooks = Hooks(lambda: stop.requested, terminal.say, beat=beat)
    host = socket.gethostname()
    secret = Secret.from_mapping(env)
    spec = PeerSpec(f"{host}/{rank_env.rank}", rank_env, goes_on_later=bool(config.launch.requeue), secret=secret)
    if writer is not None:
        spec = replace(spec, folder=writer.run)
        hooks = replace(hooks, open_run=lambda config, name: writer)
    if not config.collaborative.initial_peers:
        ending = _rank_of_new_swarm(config, spec, hooks)
    elif writer is None:
        follow_rank_0(rank_env, secret, use_gpu=config.launch.gpus_per_node != 0 and gpu_is_here(), beat=beat)
        ending = "stopped" if stop.requested else "finished"
    else:
        # Back from the queue it has the name and the key that it had before.
        name = f"{host}/{writer.run.name}"[-terminal.LONGEST_NAME :]
        entry = entry_of([], env)
        spec = replace(spec, name=name, identity=writer.run.path / "identity", team=True)
        ending, _ = guest.join(entry, spec, hooks, lambda manifest: same_settings(config, manifest.config))
    if ending == "stopped":
        hand_back(writer or node, rank_env, stop.signals, step=None)
        return "preempted"
    return "finished"


def hidden(secret: Secret) -> Fernet:
    """Return what hides the token: the store by which ranks meet keeps strangers from writing, not from reading."""
    return Fernet(base64.urlsafe_b64encode(bytes.fromhex(secret.name("key to hide the token of the ranks"))))


def _rank_of_new_swarm(config: Config, spec: PeerSpec, hooks: Hooks) -> str:
    from trainkit.distributed.rendezvous import meet
    from trainkit.swarm.peer import guest
    from trainkit.swarm.peer.creator import create

    env = spec.env
    secret = spec.secret
    several_machines = env.num_nodes > 1 and env.launcher != "submitit-local"
    # Ranks of one job reach each other, so every one of them serves the others.
    host = "0.0.0.0" if several_machines or config.collaborative.port else "127.0.0.1"
    port = config.collaborative.port if env.is_main else 0
    # Without rank 0 there is nothing to wait for: the launcher starts all ranks again. Each rank is a peer of its own.
    spec = replace(spec, host=host, port=port, patience=0.0, secret=NO_SECRET)
    store = meet(env, secret, timedelta(minutes=5), wait_for_all=False) if env.world_size > 1 else None
    cipher = hidden(secret)
    if not env.is_main:
        assert store is not None
        try:
            text = cipher.decrypt(store.get("swarm")).decode()  # waits for rank 0
        except InvalidToken as error:
            raise ForgedError("token of the ranks") from error
        return guest.join(with_token(text), spec, hooks, lambda _: config)[0]

    def opened(run_dir: RunDir, addresses: list[str], *, moved: bool) -> None:
        if store is not None:
            # A rank is as good as rank 0: it averages for others and gives away the state.
            token = write_token(own_pass(owner_of(run_dir.path).key, RANKS, "reducer"), addresses)
            store.set("swarm", cipher.encrypt(token.encode()))
        # Not a token: this goes into a log.
        hooks.say(f"Invite volunteers: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")

    return create(config, spec, hooks, opened)[0]


# Until a person is told what a peer does before it trains, and is told again.
_TELL_SECONDS = 1.5, 5.0
# A peer whose helpers die sooner than this after its start would not do better the next time.
_WORTH_ANOTHER_SECONDS = 30.0


@contextmanager
def terminal_peer(make: Callable[[Config, str], RunDir], comes_back: Sequence[str] | None = None) -> Iterator[Hooks]:
    """A peer that a person has started in a terminal: `status`, `logs` and `cancel` know its run like a submitted one.

    It leaves on Ctrl-C and on signals. What is said goes to the terminal, and into the run's log once there is a run;
    how that ended is noted in SLURM's words.

    Args:
        make: makes or opens its run folder.
        comes_back: of a creator, flags of ``swarm create --resume``: when a helper of hivemind's has died, this process
            becomes that command, for without a creator nobody trains. Not in the same process: it has used a GPU.
    """
    attempts: list[Attempt] = []  # one, once there is a run
    began = time.monotonic()

    def say(line: str) -> None:
        terminal.say(line)
        for attempt in attempts:
            # A full disk is told of on the terminal, and must not end what goes on in spite of it.
            with suppress(OSError), fileio.append(attempt.logs / "rank-0.out", attempt.run.path) as log:
                log.write(f"{line}\n".encode())

    def open_run(config: Config, name: str) -> Attempt:
        run_dir = make(config, name)
        me = ProcessId.of(os.getpid())
        held.enter_context(as_open_as(run_dir.path))
        submitted(run_dir, "swarm", str(me.pid), me)
        attempts.append(Attempt.begin(run_dir))
        return held.enter_context(writing(attempts[0]))

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        say("Leaving the swarm; press Ctrl-C again to leave at once.")

    try:
        with ExitStack() as held, stop_on_signal() as stop:
            state = "FAILED"
            before = signal.signal(signal.SIGINT, interrupt)
            starting = Starting(speaks=True, attempt=None, say=say, seconds=_TELL_SECONDS)
            held.callback(starting.stop)
            starting.at("load PyTorch and hivemind")
            try:
                yield Hooks(lambda: stop.requested, say, open_run, step=starting.at)
                came_to_its_end = any(history_of(attempt.run).finished for attempt in attempts)
                state = "COMPLETED" if came_to_its_end else "CANCELLED"
            except KeyboardInterrupt:
                state = "CANCELLED"
                raise
            finally:
                signal.signal(signal.SIGINT, before)
                for attempt in attempts:
                    attempt.ended(state, job_id=str(os.getpid()))
    except processes.HelperDiedError as error:
        lasted = time.monotonic() - began
        if comes_back is None or not attempts or lasted < _WORTH_ANOTHER_SECONDS or stop.requested:
            raise
        say(f"{error.what} This peer restarts by itself.")
        words = ["trainkit", "swarm", "create", "--resume", str(attempts[0].run.path), *comes_back]
        os.execv(sys.executable, [sys.executable, "-m", *words])

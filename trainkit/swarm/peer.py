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
from typing import Literal, NoReturn

from cryptography.fernet import Fernet, InvalidToken

from trainkit import fileio, terminal
from trainkit.config.schema import Config
from trainkit.errors import RefusedError, UserError
from trainkit.monitor.starting import Starting
from trainkit.process import end_with_parent, python_path
from trainkit.ranks import NO_SECRET, VARIABLE, ForgedError, RankEnv, Secret, free_port
from trainkit.ranks.signals import StopFlag, hand_back, stop_on_signal
from trainkit.run import snapshot
from trainkit.run.events import Attempt, ProcessId, history_of, submitted, writing
from trainkit.run.folder import SWARM_IDENTITY, RunDir, as_open_as
from trainkit.schedulers.base import BEGIN
from trainkit.swarm import admission, processes
from trainkit.swarm.address import Hooks, PeerSpec, announced, how_to_be_reached, saved_peer
from trainkit.swarm.admission import KEY_FILE, Entry, entry_of, invite, own_pass, owner_of, with_token
from trainkit.swarm.invitations import GUESTS, RANKS, write_token
from trainkit.swarm.messages import Manifest, adapted, check_own, require_collaborative, same_settings

# How long the token is good that `create` prints.
_FIRST_SECONDS = 7 * 86400.0


def create_swarm(config: Config, spec: PeerSpec, hooks: Hooks) -> tuple[str, RunDir]:
    """Create a swarm on this machine, or go on with that of ``spec.folder``, and train in it.

    How it ended (finished, stopped), and the run folder.
    """
    require_collaborative(config)
    if config.collaborative.initial_peers:
        why, fix = "It names a swarm that is there already.", "Join that one, or leave the setting out."
        raise UserError("collaborative.initial_peers is set.", why=why, fix=fix)
    processes.require_hivemind()
    from trainkit.swarm import roles

    def opened(run_dir: RunDir, addresses: list[str], *, moved: bool) -> None:
        lines = [f"Run: {run_dir.path}"]
        if moved:
            lines += [
                "It has moved. Who trains finds it through an anchor; without one, and with a token of before:",
                f"  {terminal.command('join', 'TOKEN', addresses[0])}",
            ]
        lines += [f"Invite by name: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}"]
        lines += [*how_to_be_reached(addresses), f"Look at it: {terminal.command('swarm', 'status', run_dir.path)}"]
        hooks.say("\n".join(lines))
        if spec.folder is None:  # a token must not be kept in the run's log
            told = invite(owner_of(run_dir.path), tuple(addresses), GUESTS, _FIRST_SECONDS, "volunteer")
            print("\n".join(told), flush=True)

    return roles.create(config, spec, hooks, opened)


def resume_swarm(run: RunDir, config: Config, spec: PeerSpec, hooks: Hooks) -> tuple[str, RunDir]:
    """Go on with a swarm that this machine has created: under the same addresses, from its newest checkpoint.

    Args:
        spec: its host, port and announced address replace those of before where they are given.

    Raises UserError when the run folder does not say where it was, or has no owner's key any more.
    """
    place, anew = saved_peer(run), terminal.command("swarm", "create", run.path)
    if place is None or not (run.path / KEY_FILE).is_file():
        as_anchor = f"as an anchor by `swarm anchor` with its --port and --identity {SWARM_IDENTITY.at(run.path)}"
        raise UserError(
            f"{run.name} cannot go on as the creator of a swarm.",
            why=f"It has joined one, was ended before others could join, or has lost its {KEY_FILE}.",
            fix=f"Join again, {as_anchor}; or copy the key back; or start a new one: {anew}",
        )
    name, host, port = place.name or spec.name, spec.host or place.host, spec.port or place.port
    where = announced(spec.announce, port) or place.announce
    return create_swarm(config, replace(spec, name=name, host=host, port=port, announce=where, folder=run), hooks)


def join_swarm(
    entry: Entry, spec: PeerSpec, hooks: Hooks, overrides: Sequence[str], *, allow_code: bool
) -> tuple[str, RunDir | None]:
    """Join a swarm. How it ended (finished, stopped, ended by its creator), and the run folder.

    Args:
        allow_code: build a model or data set by code of the user's own, that the manifest names.
    """
    check_own(overrides)
    if spec.host is not None and entry.own.grant.role == "volunteer":
        listening = "--public, --host, --port and --announce"
        raise UserError(
            "Only those whom the owner trusts can be reached by others.",
            why="This peer is a volunteer: it calls out only, and averages for nobody.",
            fix=f"Leave {listening} out, or ask for a token of `python -m jobs.swarm invite NAME --reduce`.",
        )
    processes.require_hivemind()
    from trainkit.swarm import roles

    def own(manifest: Manifest) -> Config:
        return adapted(manifest.config, overrides, allow_code=allow_code)

    return roles.join(entry, replace(spec, team=True), hooks, own)


# Python puts the current folder, which may be a checkout, before PYTHONPATH.
_PROGRAM = ("-u", "-c", f"{BEGIN}from trainkit.__main__ import main; main()", "join")


def join_with_code(entry: Entry, arguments: Sequence[str], env: Mapping[str, str], *, allow_code: bool) -> NoReturn:
    """Show the code that the run's owner gives away, and in what it differs from this one; and join with it.

    Args:
        arguments: of ``python -m jobs.join``, without the way in.
        allow_code: run it; else the person at this terminal is asked, if there is one.

    Raises RefusedError unless it may be run, UserError when there is none that the owner has signed.
    """
    processes.require_hivemind()
    from trainkit.swarm import access, dht

    with access.identity(None, entry.own, entry.admission()) as me, dht.open_dht(me, peers=entry.addresses) as node:
        # Only the owner's side writes manifests, so that the digest in it is the owner's word.
        creator, manifest = dht.read_manifest(node, entry.addresses, any_version=True)
        ask = partial(dht.fetch_code, of=creator, digest=manifest.code)
        archive = node.in_dht(ask, dht.CODE_SECONDS, b"") if manifest.code else b""
    if not archive:
        why = "It has none to give, cannot be reached, or gives something else."
        fix = "Ask whoever runs it for the commit, or to start it with collaborative.give_code=true."
        raise UserError("The creator of the run gives no code away.", why=why, fix=fix)
    kept, told = snapshot.received(archive, manifest.code)
    signed = f"signed by its owner (key {manifest.owner[:16]})"
    print(f"Code of {terminal.one_line(manifest.name)}, {signed}: {told}", flush=True)
    if not allow_code and sys.stdin is not None and sys.stdin.isatty():
        print("Run it here, with your rights? Type yes: ", end="", flush=True)
        allow_code = sys.stdin.readline().strip() == "yes"
    if not allow_code:
        why = "Whoever has invited you would decide what this machine does, with your rights."
        raise RefusedError("Nothing of it was run.", why=why, fix="If you trust them, add --allow-code.")
    own = {**env, admission.VARIABLE: entry.text, "PYTHONPATH": python_path(kept, env)}
    os.execve(sys.executable, [sys.executable, *_PROGRAM, "--allow-code", *arguments], own)


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
        fix = "Use --nproc 2 for two GPUs, or leave it out where a launcher has started the ranks."
        raise UserError(f"--nproc {number} is not possible here.", why=why, fix=fix)
    secret, size, port = Secret.generate(), str(number), str(free_port())
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"NODE_RANK": "0", VARIABLE: secret.text}
    first, *others = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for own in others:
            process = subprocess.Popen(
                [sys.executable, *_PROGRAM, *arguments],
                env={**env, **own, "PYTHONPATH": python_path(snapshot.INSTALLED, env)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is rank 0's
                preexec_fn=end_with_parent,
            )
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
    from trainkit.swarm.session import PATIENCE, follow

    with distributed(env, use_gpu=use_gpu, secret=secret, collective_timeout=PATIENCE) as dist:
        follow(dist, beat=beat)


# One rank of a submitted swarm: a peer of its own, that meets the others by the job's own means.

Outcome = Literal["finished", "preempted"]


def run_swarm_rank(
    config: Config,
    rank_env: RankEnv,
    stop: StopFlag,
    *,
    writer: Attempt | None,
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
        token: by which they join the swarm at ``collaborative.initial_peers``.
        beat: called whenever this rank has made progress.
    """
    require_collaborative(config)
    processes.require_hivemind()
    from trainkit.distributed.device import gpu_is_here
    from trainkit.swarm import roles

    assert writer is not None or not rank_env.is_main
    open_run = None if writer is None else lambda config, name: writer
    hooks = Hooks(lambda: stop.requested, partial(print, flush=True), open_run, beat=beat)
    host, ending = socket.gethostname(), "finished"
    spec = PeerSpec(f"{host}/{rank_env.rank}", rank_env, goes_on_later=bool(config.launch.requeue), secret=secret)
    if not config.collaborative.initial_peers:
        folder = writer.run if writer is not None else None
        ending = _rank_of_new_swarm(config, replace(spec, folder=folder), hooks)
    elif writer is None:
        follow_rank_0(rank_env, secret, use_gpu=config.launch.gpus_per_node != 0 and gpu_is_here(), beat=beat)
        ending = "stopped" if stop.requested else "finished"
    else:
        # Back from the queue it has the name and the key that it had before.
        name = f"{host}/{writer.run.name}"[-terminal.LONGEST_NAME :]
        entry = entry_of([], {admission.VARIABLE: token})
        spec = replace(spec, name=name, folder=writer.run, identity=writer.run.path / "identity", team=True)
        ending, _ = roles.join(entry, spec, hooks, lambda manifest: same_settings(config, manifest.config))
    if ending == "stopped":
        hand_back(writer if writer is not None else node, rank_env, stop.signals, step=None)
        return "preempted"
    return "finished"


def hidden(secret: Secret) -> Fernet:
    """What hides the token: the store by which ranks meet keeps strangers from writing, not from reading."""
    return Fernet(base64.urlsafe_b64encode(bytes.fromhex(secret.name("key to hide the token of the ranks"))))


def _rank_of_new_swarm(config: Config, spec: PeerSpec, hooks: Hooks) -> str:
    from trainkit.distributed.meeting import meet
    from trainkit.swarm import roles

    env, secret = spec.env, spec.secret
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
        return roles.join(with_token(text), spec, hooks, lambda _: config)[0]

    def opened(run_dir: RunDir, addresses: list[str], *, moved: bool) -> None:
        if store is not None:
            # A rank is as good as rank 0: it averages for others and gives away the state.
            token = write_token(own_pass(owner_of(run_dir.path).key, RANKS, "reducer"), addresses)
            store.set("swarm", cipher.encrypt(token.encode()))
        # Not a token: this goes into a log.
        hooks.say(f"Invite volunteers: {terminal.command('swarm', 'invite', 'NAME', run_dir.path)}")

    return roles.create(config, spec, hooks, opened)[0]


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
        print(line, flush=True)  # at once, also into a pipe
        for attempt in attempts:
            # A full disk is told of on the terminal, and must not end what goes on in spite of it.
            with suppress(OSError), fileio.append(attempt.logs / "rank-0.out", attempt.run.path) as log:
                log.write(f"{line}\n".encode())

    def open_run(config: Config, name: str) -> Attempt:
        run_dir, me = make(config, name), ProcessId.of(os.getpid())
        held.enter_context(as_open_as(run_dir.path))
        submitted(run_dir, "swarm", str(me.pid), me)
        attempts.append(Attempt.begin(run_dir))
        return held.enter_context(writing(attempts[0]))

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        say("Leaving the swarm; Ctrl-C once more to leave at once.")

    try:
        with ExitStack() as held, stop_on_signal() as stop:
            state, before = "FAILED", signal.signal(signal.SIGINT, interrupt)
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
        say(f"{error.what} This peer comes back by itself.")
        words = ["trainkit", "swarm", "create", "--resume", str(attempts[0].run.path), *comes_back]
        os.execv(sys.executable, [sys.executable, "-m", *words])

"""Collaborative runs as the commands see them: create a swarm, join one, be one rank of a submitted one.

Nothing heavy is imported before it is clear that there is something to do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.collaborative import address, processes
from trainkit.collaborative.entry import SEEN, Entry
from trainkit.collaborative.home import addresses_in, home_of, write_addresses
from trainkit.collaborative.invitation import GUESTS
from trainkit.collaborative.inviting import invited
from trainkit.collaborative.owner import KEY_FILE, owner_of
from trainkit.collaborative.reachability import announced, how_to_be_reached
from trainkit.collaborative.settings import adapted, check_own, require_collaborative
from trainkit.config.schema import Config
from trainkit.distributed.stop import StopFlag
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.ranks.secret import NO_SECRET, Secret
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer

if TYPE_CHECKING:
    from trainkit.collaborative.messages import Manifest


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
    from trainkit.collaborative import session
    from trainkit.collaborative.seat import Seat

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
        max_upload=max_upload,
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
    home = home_of(run_dir)
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
    from trainkit.collaborative import joining
    from trainkit.collaborative.seat import Seat

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

    seat = Seat(
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
    return joining.join(entry, seat, adapt=adapt)


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

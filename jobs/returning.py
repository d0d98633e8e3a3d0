"""What `swarm create --resume` and `resume` share: a swarm made by hand goes on in this process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jobs import cli
from jobs.peering import peer_name, say_end
from trainkit import terminal
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.run.events import life_of
from trainkit.run.folder import RunDir, find_run
from trainkit.run.ownership import require_own_code
from trainkit.schedulers.states import require_no_job


def is_by_hand(run: RunDir) -> bool:
    """Whether a person has started it in a terminal, by `swarm create` or `join`."""
    submission = life_of(run).submission
    return submission is not None and submission.executor == "swarm"


def resume_by_hand(run: RunDir, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``python -m jobs.resume RUN``, of such a run. Resources are this machine's, so that their flags mean nothing.

    Args:
        argv: as it was typed.
    """
    known = {args.run, "--allow-code", "--force"}
    if extra := [word for word in argv if word not in known]:
        raise UserError(
            f"{extra[0]} means nothing to {run.name}.",
            why="It is a swarm that was created by hand, and goes on in this terminal.",
            fix=f"Leave it out: {terminal.command('resume', run.path)}",
        )
    return _go_on(run, None, allow_code=args.allow_code, force=args.force, trains=True, moved={})


def resume(args: argparse.Namespace, parser: cli.Parser, env: Mapping[str, str]) -> int:
    """``python -m jobs.swarm create --resume RUN``."""
    asked = {"--identity": args.identity, "--run-dir": args.run_dir, "--max-upload": args.max_upload}
    given = [*([args.preset] if args.preset else []), *args.overrides, *(flag for flag in asked if asked[flag])]
    if given:
        parser.error(f"{given[0]} does not go with --resume: the run has its settings, its key and its folder")
    run = find_run(args.resume, env)
    if life_of(run).finished:
        raise UserError(
            f"{run.name} has finished.",
            why="All of its rounds are done.",
            fix=f"Start a new one with its settings: {terminal.command('swarm', 'create', run.path)}",
        )
    moved = {"host": args.host, "port": args.port, "announce": args.announce}
    return _go_on(
        run,
        args.name or peer_name(),
        allow_code=args.allow_code,
        force=args.force,
        trains=not args.no_train,
        moved=moved,
    )


def _go_on(
    run: RunDir, name: str | None, *, allow_code: bool, force: bool, trains: bool, moved: Mapping[str, Any]
) -> int:
    require_no_job(run, force=force)
    loaded = load(str(run.config))
    require_own_code(run.path, loaded, allow_code=allow_code)
    from trainkit.ranks.signals import stop_on_signal
    from trainkit.swarm.address import home_of, identity_in
    from trainkit.swarm.peer import by_hand, leave_on_interrupt, resume_swarm

    home = home_of(run)
    if home is not None and home.is_anchor:
        there = ("--port", home.port, *(("--announce", home.announce) if home.announce else ()))
        again = terminal.command("swarm", "anchor", "TOKEN", *there, "--identity", identity_in(run))
        raise UserError(
            f"{run.name} is an anchor's record, which is not gone on with.",
            why="An anchor takes over the state of the swarm whenever it joins.",
            fix=f"Under the same address: {again}",
        )
    with by_hand() as peer, stop_on_signal() as stop, leave_on_interrupt(stop, peer.say):
        ending, run_dir = resume_swarm(
            run,
            loaded.config,
            open_run=lambda config: peer.begin(run),
            name=name or peer_name(),
            trains=trains,
            stop=stop,
            say=peer.say,
            **moved,
        )
    say_end(ending, run_dir)
    return 0

"""``python -m jobs.swarm create PRESET | invite NAME | revoke NAME | status [TOKEN|RUN]``: collaborative runs.

create   start a swarm on this machine, train in it, and print the line with which others join
invite   print a token, with which one more may join; it ends by itself
revoke   end the invitations of a name: whoever uses them is out at once
anchor   reduce for a swarm on a machine that others reach, keep its weights, let others join through it; no training
doctor   say what keeps this machine from joining a swarm, and what to do about it
unban    let somebody take part again who was left out of three rounds in a row
status   peers, rounds and loss of a swarm: by a token, of a run, or of the newest run here
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jobs import cli
from jobs.join import add_peer_flags, entry_in, make_run, peer_name, place_of, say_end, take_part
from trainkit import terminal
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.run.events import history_of
from trainkit.run.folder import RunDir, find_run
from trainkit.run.ownership import require_own_code
from trainkit.run.secrets import refuse_settings
from trainkit.schedulers.base import require_no_job
from trainkit.swarm.admission import (
    KEY_FILE,
    addresses_of,
    entry_of,
    invite,
    is_setting,
    owner_of,
    revoke,
    run_with,
    seconds_of,
    warned,
)
from trainkit.swarm.spec import PeerSpec

WATCH_SECONDS = 2.0
"""How often ``status --watch`` asks."""


def parser() -> cli.Parser:
    return cli.verb_parser("swarm", __doc__ or "", VERBS)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    return cli.run_verb(parser(), VERBS, argv, env)


def _create_parser() -> cli.Parser:
    parser = cli.Parser("swarm create", "Start a swarm on this machine, train in it, and keep its records.")
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="as a rule hivemind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add_peer_flags(parser, host="0.0.0.0")
    parser.set_defaults(host=None)  # with --resume it matters whether it was given
    parser.add_argument(
        "--announce", metavar="HOST[:PORT]", help="tell others this address: of the router that forwards the port"
    )
    parser.add_argument("--no-train", action="store_true", help="only reduce, judge, and keep the records")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with a swarm of before, where it was or at --host, --port"
    )
    parser.add_argument("--open", action="store_true", help="whoever has an address may join; else only the invited")
    parser.add_argument("--force", action="store_true", help="with --resume: you know that it runs nowhere any more")
    cli.add_allow_code_flag(parser)
    return parser


def _create(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    if args.resume is not None:
        return resume(args, _create_parser(), env)
    if args.force:
        _create_parser().error("--force needs --resume: a new swarm runs nowhere else")
    if args.preset is None:
        _create_parser().error("the following arguments are required: PRESET")
    from trainkit.swarm.peer import create_swarm, terminal_peer

    loaded = load(args.preset, [*args.overrides, *(["collaborative.open=true"] if args.open else [])], env=env)
    require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
    refuse_settings(loaded)
    place = place_of(args, host=args.host or "0.0.0.0", port=loaded.config.collaborative.port)
    with terminal_peer() as peer:
        hooks = peer.hooks(lambda config, _: make_run(config, args.run_dir, loaded.name, env))
        ending, run_dir = create_swarm(loaded.config, replace(place, trains=not args.no_train), hooks)
    say_end(ending, run_dir)
    return 0


def _invite_parser() -> cli.Parser:
    about = "Print a token, with which somebody may join a swarm that was created here."
    parser = _parser_for_a_name("invite", about, "of who is invited; `revoke` takes it")
    parser.add_argument(
        "--expires", default="7d", metavar="7d", help="how long it is good: 30m, 12h, 7d, 4w (default: 7d)"
    )
    parser.add_argument(
        "--reduce",
        action="store_true",
        help="trust them: they average for others, give away and sign the run's weights, ban peers, and stand for you "
        "when you are away. While you train, averages that cannot be true are not used, and after three rounds in a "
        "row ban them; averages a little wrong are believed, and so is everything while you are away",
    )
    return parser


def _invite(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    seconds = seconds_of(args.expires)
    run = run_with(KEY_FILE, args.run, env)
    lines = invite(owner_of(run.path), addresses_of(run), args.name, seconds, "reducer" if args.reduce else "volunteer")
    print("\n".join(lines))
    return 0


def _revoke_parser() -> cli.Parser:
    about = "End the invitations of a name, in a swarm that was created here."
    return _parser_for_a_name("revoke", about, "as `invite` was given it")


def _revoke(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    print(revoke(run_with(KEY_FILE, args.run, env), args.name))
    return 0


def _unban_parser() -> cli.Parser:
    about = "Let a banned peer take part again, in a swarm that was created here."
    return _parser_for_a_name("unban", about, "as the run has printed it")


def _unban(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from trainkit.swarm.access import unban
    from trainkit.swarm.view import run_seen

    run = run_seen(args.run, env)
    count = len(unban(run.path, args.name))
    name = terminal.name(args.name)
    print(f"{name} may take part again from the next round of {run.name}{f' ({count} bans)' if count > 1 else ''}.")
    return 0


def _parser_for_a_name(verb: str, about: str, name: str) -> cli.Parser:
    """Of ``swarm VERB NAME [RUN]``; ``name``: what is said of NAME."""
    parser = cli.Parser(f"swarm {verb}", about)
    parser.add_argument("name", metavar="NAME", help=name)
    parser.add_argument("run", nargs="?", metavar="RUN", help="default: the newest swarm of this folder")
    return parser


def _status_parser() -> cli.Parser:
    parser = cli.Parser("swarm status", "Peers, rounds and loss of a swarm.")
    parser.add_argument(
        "swarm", nargs="?", metavar="TOKEN|RUN", help="or a file with the token; default: the newest swarm"
    )
    parser.add_argument("-w", "--watch", action="store_true", help="show it anew as it changes, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="an object, for programs")
    parser.add_argument("--leaderboard", action="store_true", help="who has contributed how much")
    return parser


def _status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    if args.watch and args.json:
        raise UserError("--watch and --json do not go together.", why="An object has an end.", fix="Use one.")
    from trainkit.swarm import view as swarm_view

    lines = swarm_view.leaderboard_lines if args.leaderboard else swarm_view.status_lines
    with swarm_view.looking(args.swarm, env) as look:
        if args.watch:
            terminal.watch(lambda: "\n".join(lines(look())), every=WATCH_SECONDS)
        view = look()
    print(json.dumps(swarm_view.as_object(view), indent=2, allow_nan=False) if args.json else "\n".join(lines(view)))
    return 0


def _anchor_parser() -> cli.Parser:
    parser = cli.Parser("swarm anchor", "Keep a swarm together on a machine that others reach, without training.")
    parser.add_argument("words", nargs="*", metavar="TOKEN", help="made with --reduce; and settings, data.root=...")
    parser.add_argument("--announce", metavar="HOST[:PORT]", help="the router that forwards the port, if there is one")
    cli.add_allow_code_flag(parser)
    add_peer_flags(parser, host="0.0.0.0")
    return parser


def _anchor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Join as a peer that others reach and that does not train."""
    entry = entry_in(args, env)
    place = replace(place_of(args, entry, host=args.host), trains=False)
    overrides = [*(word for word in args.words if is_setting(word)), "launch.gpus_per_node=0"]
    return take_part(args, entry, place, overrides, env)


def _doctor_parser() -> cli.Parser:
    parser = cli.Parser("swarm doctor", "Say what keeps this machine from joining a swarm. It does not join.")
    parser.add_argument(
        "words", nargs="*", metavar="TOKEN", help="a file with the token, -, or the address of an open run"
    )
    return parser


def _doctor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Examine what joining needs. Exit code 0: all is well; 2: this machine lacks something; 1: the swarm does."""
    from trainkit.swarm.address import examine

    worst = 0
    for finding in examine(warned(entry_of(args.words, env, name="doctor")), env):
        print("\n".join(finding.lines()), flush=True)
        worst = max(worst, finding.exit_code)
    print("This machine can join." if worst == 0 else "This machine cannot join as it is.")
    return worst


VERBS = {
    "create": cli.Verb(_create_parser, _create),
    "invite": cli.Verb(_invite_parser, _invite),
    "revoke": cli.Verb(_revoke_parser, _revoke),
    "unban": cli.Verb(_unban_parser, _unban),
    "anchor": cli.Verb(_anchor_parser, _anchor),
    "doctor": cli.Verb(_doctor_parser, _doctor),
    "status": cli.Verb(_status_parser, _status),
}


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
    return _go_on(run, PeerSpec(peer_name()), allow_code=args.allow_code, force=args.force)


def resume(args: argparse.Namespace, parser: cli.Parser, env: Mapping[str, str]) -> int:
    """``python -m jobs.swarm create --resume RUN``."""
    asked = {"--identity": args.identity, "--run-dir": args.run_dir, "--max-upload": args.max_upload}
    given = [*([args.preset] if args.preset else []), *args.overrides, *(flag for flag in asked if asked[flag])]
    if given:
        parser.error(f"{given[0]} does not go with --resume: the run has its settings, its key and its folder")
    run = find_run(args.resume, env)
    if history_of(run).finished:
        raise UserError(
            f"{run.name} has finished.",
            why="All of its rounds are done.",
            fix=f"Start a new one with its settings: {terminal.command('swarm', 'create', run.path)}",
        )
    # Where the swarm was counts as far as the flags do not say otherwise.
    place = PeerSpec(
        args.name or peer_name(), host=args.host, port=args.port, announce=args.announce, trains=not args.no_train
    )
    return _go_on(run, place, allow_code=args.allow_code, force=args.force)


def _go_on(run: RunDir, place: PeerSpec, *, allow_code: bool, force: bool) -> int:
    require_no_job(run, force=force)
    loaded = load(str(run.config))
    require_own_code(run.path, loaded, allow_code=allow_code)
    from trainkit.swarm.peer import resume_swarm, terminal_peer

    with terminal_peer() as peer:
        ending, run_dir = resume_swarm(run, loaded.config, place, peer.hooks(lambda config, _: run))
    say_end(ending, run_dir)
    return 0


if __name__ == "__main__":
    cli.run(main)

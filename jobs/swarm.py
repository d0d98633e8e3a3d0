"""``python -m jobs.swarm create PRESET | invite NAME | revoke NAME | status [TOKEN|RUN]``: collaborative runs.

create   start a swarm on this machine, train in it, and print the line with which others join
invite   print a token, with which one more may join; it ends by itself
revoke   end the invitations of a name: whoever uses them is out at once
anchor   reduce for a swarm on a machine that others reach, keep its weights, let others join through it; no training
doctor   say what keeps this machine from joining a swarm, and what to do about it
unban    let somebody take part again who was left out of three rounds in a row
stop     end a swarm that was created here, for everybody
status   peers, rounds and loss of a swarm: by a token, of a run, or of the newest run here
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jobs import cli
from jobs.join import add_peer_flags, entry_in, make_run, peer_name, place_of, say_end, take_part
from trainkit import terminal
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.finish import cancel
from trainkit.run.events import history_of
from trainkit.run.folder import RunDir, find_run
from trainkit.run.ownership import require_own_code
from trainkit.run.secrets import refuse_settings
from trainkit.schedulers.base import require_no_job
from trainkit.swarm import admission
from trainkit.swarm.address import ADDRESS_FILE
from trainkit.swarm.admission import KEY_FILE, run_with
from trainkit.swarm.invitations import Role
from trainkit.swarm.spec import PeerSpec

WATCH_SECONDS = 2.0
"""How often ``status --watch`` asks."""
# What is said of NAME.
_NAMES = {
    "invite": "of who is invited; `revoke` takes it",
    "revoke": "as `invite` was given it",
    "unban": "as the run has printed it",
}
_TRUST = """trust them: they average for others, give away and sign the run's weights, ban peers, and stand for you when
you are away. While you train, averages that cannot be true are not used, and after three rounds in a row ban them;
averages a little wrong are believed, and so is everything while you are away"""


def parser() -> cli.Parser:
    return cli.verb_parser("swarm", __doc__ or "", VERBS)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    return cli.run_verb(parser(), VERBS, argv, env)


def _parser(verb: str) -> cli.Parser:
    parser = cli.Parser(f"swarm {verb}", _FUNCTIONS[verb].__doc__ or "")
    add = parser.add_argument
    if verb in _NAMES:
        add("name", metavar="NAME", help=_NAMES[verb])
    if verb in _NAMES or verb == "stop":
        add("run", nargs="?", metavar="RUN", help="default: the newest swarm of this folder")
    if verb == "create":
        add("preset", nargs="?", metavar="PRESET", help="as a rule hivemind")
        add("overrides", nargs="*", metavar="section.key=value")
        add_peer_flags(parser)
        add("--no-train", action="store_true", help="only reduce, judge, and keep the records")
        add("--resume", metavar="RUN", help="go on with a swarm of before, where it was or at --host, --port")
        add("--open", action="store_true", help="whoever has an address may join; else only the invited")
        add("--force", action="store_true", help="with --resume: you know that it runs nowhere any more")
        parser.taking("--allow-code")
    elif verb == "invite":
        add("--expires", default="7d", metavar="7d", help="how long it is good: 30m, 12h, 7d, 4w (default: 7d)")
        add("--reduce", action="store_true", help=_TRUST)
    elif verb == "anchor":
        add("words", nargs="*", metavar="TOKEN", help="made with --reduce; and settings, data.root=...")
        parser.taking("--allow-code")
        add_peer_flags(parser)
    elif verb == "doctor":
        add("words", nargs="*", metavar="TOKEN", help="a file with the token, -, or the address of an open run")
    elif verb == "status":
        which = "or a file with the token; default: the newest swarm"
        add("swarm", nargs="?", metavar="TOKEN|RUN", help=which)
        either = parser.add_mutually_exclusive_group()  # an object has an end
        either.add_argument("-w", "--watch", action="store_true", help="show it anew as it changes, until Ctrl-C")
        either.add_argument("--json", action="store_true", help="an object, for programs")
        add("--leaderboard", action="store_true", help="who has contributed how much")
    return parser


def _create(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Start a swarm on this machine, train in it, and keep its records."""
    if args.resume is not None:
        return _resume(args, env)
    if args.preset is None:
        _parser("create").error("the following arguments are required: PRESET")
    from trainkit.swarm.peer import create_swarm, terminal_peer

    overrides = [*args.overrides, "collaborative.open=true"] if args.open else args.overrides
    loaded = load(args.preset, overrides, env=env)
    require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
    refuse_settings(loaded)
    place = place_of(args, port=loaded.config.collaborative.port)
    with terminal_peer(lambda config, _: make_run(config, args.run_dir, loaded.name, env), _again(args)) as hooks:
        ending, run = create_swarm(loaded.config, replace(place, trains=not args.no_train), hooks)
    say_end(ending, run)
    return 0


def _invite(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print a token, with which somebody may join a swarm that was created here."""
    seconds, run = admission.seconds_of(args.expires), run_with(KEY_FILE, args.run, env)
    owner, addresses = admission.owner_of(run.path), admission.addresses_of(run)
    role: Role = "reducer" if args.reduce else "volunteer"
    with admission.room_in(run):
        print(*admission.invite(owner, addresses, args.name, seconds, role), sep="\n")
    return 0


def _revoke(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """End the invitations of a name, in a swarm that was created here."""
    run = run_with(KEY_FILE, args.run, env)
    with admission.room_in(run):
        print(admission.revoke(run, args.name))
    return 0


def _unban(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Let a banned peer take part again, in a swarm that was created here."""
    from trainkit.swarm.access import unban

    run = run_with(ADDRESS_FILE, args.run, env)
    count, name = len(unban(run.path, args.name)), terminal.name(args.name)
    print(f"{name} may take part again from the next round of {run.name}{f' ({count} bans)' if count > 1 else ''}.")
    return 0


def _stop(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """End a swarm that was created here, for everybody in it. What it has saved stays, and `resume` goes on from it."""
    cancel([run_with(KEY_FILE, args.run, env)])
    return 0


def _status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Peers, rounds and loss of a swarm."""
    from trainkit.swarm import view as swarm_view

    lines = swarm_view.leaderboard_lines if args.leaderboard else swarm_view.status_lines
    with swarm_view.looking(args.swarm, env) as look:
        if args.watch:
            terminal.watch(lambda: "\n".join(lines(look())), every=WATCH_SECONDS)
        view = look()
    print(json.dumps(swarm_view.as_object(view), indent=2, allow_nan=False) if args.json else "\n".join(lines(view)))
    return 0


def _anchor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Keep a swarm together on a machine that others reach, without training."""
    entry, overrides = entry_in(args, env)
    place = replace(place_of(args, entry), trains=False)
    return take_part(args, entry, place, [*overrides, "launch.gpus_per_node=0"], env)


def _doctor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Say what keeps this machine from joining a swarm. It does not join."""
    # Exit code 0: all is well; 2: this machine lacks something; 1: the swarm does.
    from trainkit.swarm.address import examine

    worst = 0
    for finding in examine(admission.entry_of(args.words, env, name="doctor"), env):
        print(*finding.lines(), sep="\n", flush=True)
        worst = max(worst, finding.exit_code)
    print("This machine can join." if worst == 0 else "This machine cannot join as it is.")
    return worst


_FUNCTIONS = {it.__name__[1:]: it for it in (_create, _invite, _revoke, _unban, _stop, _anchor, _doctor, _status)}
VERBS = {verb: cli.Verb(partial(_parser, verb), function) for verb, function in _FUNCTIONS.items()}


def resume_by_hand(run: RunDir, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``python -m jobs.resume RUN``, of such a run. Resources are this machine's, so that their flags mean nothing.

    Args:
        argv: as it was typed.
    """
    if extra := [word for word in argv if word not in {args.run, "--allow-code", "--force"}]:
        why = "It is a swarm that was created by hand, and goes on in this terminal."
        fix = f"Leave it out: {terminal.command('resume', run.path)}"
        raise UserError(f"{extra[0]} means nothing to {run.name}.", why=why, fix=fix)
    return _go_on(run, PeerSpec(peer_name()), args)


def _resume(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """``python -m jobs.swarm create --resume RUN``."""
    asked = {"--identity": args.identity, "--run-dir": args.run_dir, "--max-upload": args.max_upload}
    given = [*([args.preset] if args.preset else []), *args.overrides, *(flag for flag in asked if asked[flag])]
    if given:
        why = "the run has its settings, its key and its folder"
        _parser("create").error(f"{given[0]} does not go with --resume: {why}")
    run = find_run(args.resume, env)
    if history_of(run).finished:
        fix = f"Start a new one with its settings: {terminal.command('swarm', 'create', run.path)}"
        raise UserError(f"{run.name} has finished.", why="All of its rounds are done.", fix=fix)
    # Where the swarm was counts as far as the flags do not say otherwise.
    name, trains = args.name or peer_name(), not args.no_train
    return _go_on(run, PeerSpec(name, host=args.host, port=args.port, announce=args.announce, trains=trains), args)


def _again(args: argparse.Namespace) -> list[str]:
    """What a creator is told once more when it comes back; all else is in its run folder."""
    return [flag for flag in ("--allow-code", "--no-train") if getattr(args, flag[2:].replace("-", "_"), False)]


def _go_on(run: RunDir, place: PeerSpec, args: argparse.Namespace) -> int:
    require_no_job(run, force=args.force)
    loaded = load(str(run.config))
    require_own_code(run.path, loaded, allow_code=args.allow_code)
    from trainkit.swarm.peer import resume_swarm, terminal_peer

    with terminal_peer(lambda config, _: run, _again(args)) as hooks:
        ending, ended = resume_swarm(run, loaded.config, place, hooks)
    say_end(ending, ended)
    return 0


if __name__ == "__main__":
    cli.run(main)

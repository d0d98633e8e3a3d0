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
from pathlib import Path

from jobs import cli
from jobs.anchoring import anchor, doctor
from jobs.peering import add_peer_flags, check_peer_flags, make_run, peer_name, say_end
from jobs.returning import resume
from trainkit import terminal
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.run.ownership import require_own_code
from trainkit.run.secrets import refuse_settings
from trainkit.swarm.link import rate_of

WATCH_SECONDS = 2.0
"""How often ``status --watch`` asks."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse and call the verb."""
    verbs = {"create": _create, "invite": _invite, "revoke": _revoke, "unban": _unban}
    verbs |= {"anchor": anchor, "doctor": doctor, "status": _status}
    parser = cli.Parser("swarm", __doc__ or "")
    parser.add_argument("verb", choices=tuple(verbs), metavar="|".join(verbs), help="what to do")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="`create --help` lists its flags")
    args = parser.parse_args(argv)
    return verbs[args.verb](args.rest, env)


def _create(argv: Sequence[str], env: Mapping[str, str]) -> int:
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
    args = parser.parse_intermixed_args(argv)
    if args.resume is not None:
        return resume(args, parser, env)
    if args.force:
        parser.error("--force needs --resume: a new swarm runs nowhere else")
    if args.preset is None:
        parser.error("the following arguments are required: PRESET")
    from trainkit.ranks.signals import stop_on_signal
    from trainkit.swarm.address import announced
    from trainkit.swarm.peer import by_hand, create_swarm, leave_on_interrupt

    check_peer_flags(args)
    overrides = [*args.overrides, *(["collaborative.open=true"] if args.open else [])]
    loaded = load(args.preset, overrides, env=env)
    require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
    refuse_settings(loaded)
    port = args.port or loaded.config.collaborative.port
    with by_hand() as peer, stop_on_signal() as stop, leave_on_interrupt(stop, peer.say):
        ending, run_dir = create_swarm(
            loaded.config,
            open_run=lambda config: peer.begin(make_run(config, args.run_dir, loaded.name, env)),
            name=args.name or peer_name(),
            host=args.host or "0.0.0.0",
            port=port,
            max_upload=rate_of(args.max_upload) if args.max_upload else None,
            identity=args.identity,
            stop=stop,
            say=peer.say,
            announce=announced(args.announce, port),
            trains=not args.no_train,
        )
    say_end(ending, run_dir)
    return 0


def _invite(argv: Sequence[str], env: Mapping[str, str]) -> int:
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
    args = parser.parse_args(argv)
    from trainkit.swarm.admission import created_run, invite, seconds_of

    seconds = seconds_of(args.expires)
    print("\n".join(invite(created_run(args.run, env), args.name, seconds, "reducer" if args.reduce else "volunteer")))
    return 0


def _revoke(argv: Sequence[str], env: Mapping[str, str]) -> int:
    about = "End the invitations of a name, in a swarm that was created here."
    args = _parser_for_a_name("revoke", about, "as `invite` was given it").parse_args(argv)
    from trainkit.swarm.admission import created_run, revoke

    print(revoke(created_run(args.run, env), args.name))
    return 0


def _unban(argv: Sequence[str], env: Mapping[str, str]) -> int:
    about = "Let a banned peer take part again, in a swarm that was created here."
    args = _parser_for_a_name("unban", about, "as the run has printed it").parse_args(argv)
    from trainkit.swarm.bans import unban
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


def _status(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("swarm status", "Peers, rounds and loss of a swarm.")
    parser.add_argument(
        "swarm", nargs="?", metavar="TOKEN|RUN", help="or a file with the token; default: the newest swarm"
    )
    parser.add_argument("-w", "--watch", action="store_true", help="show it anew as it changes, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="an object, for programs")
    parser.add_argument("--leaderboard", action="store_true", help="who has contributed how much")
    args = parser.parse_args(argv)
    if args.watch and args.json:
        raise UserError("--watch and --json do not go together.", why="An object has an end.", fix="Use one.")
    from trainkit.swarm import view as swarm_view
    from trainkit.swarm.view import looking

    lines = swarm_view.leaderboard_lines if args.leaderboard else swarm_view.status_lines
    with looking(args.swarm, env) as look:
        if args.watch:
            terminal.watch(lambda: "\n".join(lines(look())), every=WATCH_SECONDS)
        view = look()
    print(json.dumps(swarm_view.as_object(view), indent=2, allow_nan=False) if args.json else "\n".join(lines(view)))
    return 0


if __name__ == "__main__":
    cli.run(main)

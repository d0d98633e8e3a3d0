"""``swarm anchor TOKEN`` and ``swarm doctor TOKEN``: what others than trainers do with a swarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs import cli
from jobs.peering import add_peer_flags, check_peer_flags, peer_name, say_end, take_part
from trainkit.swarm.admission import entry_of, is_setting, warned


def anchor(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Take part without training, on a machine that others reach: the swarm outlives its creator by it."""
    parser = cli.Parser("swarm anchor", "Keep a swarm together on a machine that others reach, without training.")
    parser.add_argument("words", nargs="*", metavar="TOKEN", help="made with --reduce; and settings, data.root=...")
    parser.add_argument("--announce", metavar="HOST[:PORT]", help="the router that forwards the port, if there is one")
    cli.add_allow_code_flag(parser)
    add_peer_flags(parser, host="0.0.0.0")
    args = parser.parse_intermixed_args(argv)
    entry = entry_of([word for word in args.words if not is_setting(word)], env, name=args.name or peer_name())
    check_peer_flags(args)
    overrides = [*(word for word in args.words if is_setting(word)), "launch.gpus_per_node=0"]
    ending, run_dir = take_part(args, entry, overrides, env, role="anchor", host=args.host)
    say_end(ending, run_dir)
    return 0


def doctor(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Look at everything that joining needs; 0: all is well, 2: this machine lacks something, 1: the swarm does."""
    parser = cli.Parser("swarm doctor", "Say what keeps this machine from joining a swarm. It does not join.")
    parser.add_argument(
        "words", nargs="*", metavar="TOKEN", help="a file with the token, -, or the address of an open run"
    )
    args = parser.parse_args(argv)
    from trainkit.swarm.doctor import examine

    worst = 0
    for finding in examine(warned(entry_of(args.words, env, name="doctor")), env):
        print("\n".join(finding.lines()), flush=True)
        worst = max(worst, finding.exit_code)
    print("This machine can join." if worst == 0 else "This machine cannot join as it is.")
    return worst

"""``swarm anchor TOKEN`` and ``swarm doctor TOKEN``: what others than trainers do with a swarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs import cli
from jobs.peering import add_peer_flags, check_peer_flags, make_run, say_end
from trainkit.collaborative.entry import entry_of, is_setting
from trainkit.collaborative.fitting import rate_of


def anchor(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Take part without training, on a machine that others reach: the swarm outlives its creator by it."""
    parser = cli.Parser("swarm anchor", "Keep a swarm together on a machine that others reach, without training.")
    parser.add_argument("words", nargs="*", metavar="TOKEN", help="made with --reduce; and settings, data.root=...")
    parser.add_argument("--announce", metavar="HOST[:PORT]", help="the router that forwards the port, if there is one")
    cli.add_allow_code_flag(parser)
    add_peer_flags(parser, host="0.0.0.0")
    args = parser.parse_intermixed_args(argv)
    entry = entry_of([word for word in args.words if not is_setting(word)], env, name=args.name)
    check_peer_flags(args)
    from trainkit.collaborative.by_hand import by_hand
    from trainkit.collaborative.peer import join_swarm, leave_on_interrupt
    from trainkit.collaborative.reachability import announced
    from trainkit.distributed.stop import stop_on_signal

    with by_hand() as peer, stop_on_signal() as stop, leave_on_interrupt(stop, peer.say):
        ending, run_dir = join_swarm(
            entry,
            overrides=[*(word for word in args.words if is_setting(word)), "launch.gpus_per_node=0"],
            open_run=lambda config, name: peer.begin(make_run(config, args.run_dir, f"{name}-anchor", env)),
            name=args.name,
            host=args.host,
            port=args.port,
            max_upload=rate_of(args.max_upload) if args.max_upload else None,
            identity=args.identity,
            allow_code=args.allow_code,
            stop=stop,
            say=peer.say,
            announce=announced(args.announce, args.port),
            trains=False,
        )
    say_end(ending, run_dir)
    return 0


def doctor(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Look at everything that joining needs; 0: all is well, 2: this machine lacks something, 1: the swarm does."""
    parser = cli.Parser("swarm doctor", "Say what keeps this machine from joining a swarm. It does not join.")
    parser.add_argument("words", nargs="*", metavar="TOKEN", help="or the address of an open run")
    args = parser.parse_args(argv)
    from trainkit.collaborative.doctor import examine

    worst = 0
    for finding in examine(entry_of(args.words, env, name="doctor"), env):
        print("\n".join(finding.lines()), flush=True)
        worst = max(worst, finding.exit_code)
    print("This machine can join." if worst == 0 else "This machine cannot join as it is.")
    return worst

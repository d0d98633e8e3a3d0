"""``TRAINKIT_TOKEN=... python -m jobs.join``: take part in a collaborative run with this machine.

A token is what `python -m jobs.swarm invite` has printed; treat it as a password. It is taken from the environment,
from a file that holds it, or, with `-`, from standard input; as an argument it works too, but all who use this
machine would see it in the list of processes. A run that is open to all is joined by its address.

Settings come from the run's creator. This peer only calls out, so it works behind routers and in notebooks. Who was
invited with --reduce may add --public to be reached by others, which takes load off the creator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs import cli
from jobs.peering import add_peer_flags, check_peer_flags, peer_name, say_end, take_part
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.swarm.admission import entry_of, is_setting


def parser() -> cli.Parser:
    parser = cli.Parser("join", __doc__ or "")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TOKEN",
        help="a file with the token, -, or addresses of an open run; and settings of this machine: data.root=...",
    )
    parser.add_argument("--public", action="store_true", help="listen, so that other peers can reach this one")
    parser.add_argument("--nproc", type=int, metavar="N", help="GPUs of this machine that are one peer together (1)")
    parser.add_argument("--announce", metavar="HOST[:PORT]", help="with --public: the router that forwards the port")
    parser.add_argument("--allow-code", action="store_true", help="run code of the creator's own, which you trust")
    add_peer_flags(parser, host=None)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, join, say how it ended."""
    args = parser().parse_intermixed_args(argv)
    overrides = [word for word in args.words if is_setting(word)]
    words = [word for word in args.words if word not in overrides]
    # Other ranks of this peer follow rank 0, who alone may read standard input.
    entry = entry_of(words, env, name=args.name or peer_name()) if RankEnv.from_mapping(env).is_main else None
    check_peer_flags(args)
    if not args.public and (args.host or args.port or args.announce):
        raise UserError(
            f"--{'host' if args.host else 'port' if args.port else 'announce'} needs --public.",
            why="Without it this peer only calls out and listens to nobody.",
            fix="Add --public, or leave it out.",
        )

    from trainkit.config.loading import load
    from trainkit.swarm.local_ranks import deaf_to_signals, follow_rank_0, ranks_of_peer

    with ranks_of_peer(args.nproc, "join", argv, env) as (ranks, secret):
        if not ranks.is_main:
            from trainkit.training.building import wants_gpu

            deaf_to_signals()
            follow_rank_0(ranks, secret, use_gpu=wants_gpu(load("hivemind", overrides).config))
            return 0
        assert entry is not None
        host = (args.host or "0.0.0.0") if args.public else None
        ending, run_dir = take_part(args, entry, overrides, env, role="peer", host=host, ranks=ranks, secret=secret)
    say_end(ending, run_dir)
    return 0


if __name__ == "__main__":
    cli.run(main)

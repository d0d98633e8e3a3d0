"""``python -m jobs.shell RUN [-- COMMAND]``: a shell beside the ranks of a running job, their stacks, or a live view.

The shell has the environment and the folder of a rank, inside of the job's
allocation and container. What you do there is not the run's.

  python -m jobs.shell ddp-0001 --rank 3
  python -m jobs.shell ddp-0001 --rank 3 --stack
  python -m jobs.shell ddp-0001 --node n2 -- nvidia-smi
"""

import sys
from collections.abc import Mapping, Sequence

from jobs import cli, login_node
from trainkit.common.errors import UserError
from trainkit.config.script import split
from trainkit.run.find import find_run


def parser() -> cli.Parser:
    parser = cli.Parser("shell", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--rank", type=int, metavar="R", help="beside this rank (default: 0)")
    places.add_argument("--node", metavar="N", help="on this node: its name, or its number from 0")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stack", action="store_true", help="print the rank's Python and native stacks (needs py-spy)")
    what.add_argument("--top", action="store_true", help="show GPUs and processes of all nodes until q")
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    given, command = split(argv)
    args = parser().parse_intermixed_args(given)
    if command is not None and (args.stack or args.top or not command):
        why = "Behind `--` stands one command, in place of --stack and --top."
        raise UserError("There is no such shell.", why=why, fix="For example: shell RUN --rank 0 -- nvidia-smi.")
    if args.top and (args.rank is not None or args.node is not None):
        raise UserError("--top shows all nodes.", why="You also named one.", fix="Leave --rank and --node out.")
    if args.host is not None:
        if not (command or args.stack or args.top or (sys.stdin.isatty() and sys.stdout.isatty())):
            why = "Over --host stdin is not passed on without one, so the shell would end at once."
            fix = f"Give it a command: shell {args.run} --host {args.host} -- sh -c 'hostname; pwd'."
            raise UserError("There is no terminal for a shell.", why=why, fix=fix)
        there = login_node.without_host(given)
        return login_node.forward("shell", there if command is None else [*there, "--", *command], args.host, env)
    from trainkit.launch import shell

    place = shell.place_of(find_run(args.run, env))
    if args.top:
        return shell.watch(place, env)
    rank = args.rank or 0
    if args.node is not None:
        rank = place.first_rank(args.node)
    if args.stack:
        shell.become(place.beside([place.node_of(rank)], "stack", str(rank)), env)
    return shell.become(place.shell(rank, command or ()), env)


if __name__ == "__main__":
    cli.run(main)

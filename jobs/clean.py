"""``python -m jobs.clean``: show what runs take and what may go by a rule; with `--yes` move that to the trash.

Nothing is done without --yes. What goes lies in runs/.trash for 14 days, and can
be copied back. What runs, is queued, is needed by another run or is tagged `keep`
never goes.

Without a rule goes what is spare, as it can be had again: checkpoints but the
best and the newest; of finished runs the newest too, where a minute of training
from the best makes it again, and W&B's offline files, as `sync` has the metrics;
and unpacked code that no run uses now, as each has an archive of it.

  python -m jobs.clean                                  what runs take
  python -m jobs.clean --yes                            what is spare goes
  python -m jobs.clean --keep-best --yes                other checkpoints go
  python -m jobs.clean --state failed --older-than 30d  those runs would go
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jobs import cli
from trainkit import terminal

if TYPE_CHECKING:
    from trainkit.cleaning import Item


def parser() -> cli.Parser:
    parser = cli.Parser("clean", __doc__ or "")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="only these runs or sweeps")
    keep = "only checkpoints go: all but the best, and but the newest of a run that has not finished"
    add("--keep-best", action="store_true", help=keep)
    add("--weights-only", action="store_true", help="with --keep-best: of finished runs not even the optimizer's state")
    add("--yes", action="store_true", help="do it")
    add("--empty-trash", action="store_true", help="with --yes: remove what lies in the trash now, for good")
    add("--older-than", dest="older", metavar="AGE", help="of which nothing was written for so long: 30d, 12h")
    return cli.add_selection(parser).taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit import cleaning
    from trainkit.errors import UserError
    from trainkit.run import folder, room
    from trainkit.run.snapshot import STORE

    wanted = cli.selection(args)
    named = [run for reference in args.runs for run in folder.find_runs(reference, env)]
    runs = named or folder.known_runs(env)
    roots = dict.fromkeys([folder.runs_root(env), *(room.root_of(run) for run in runs)])
    if args.weights_only and not args.keep_best:
        why, fix = "It says what of the best checkpoint stays.", "Add --keep-best."
        raise UserError("--weights-only needs --keep-best.", why=why, fix=fix)
    rule = "weights" if args.weights_only else "best" if args.keep_best else "whole" if named or wanted else "spare"
    items = [] if args.empty_trash else cleaning.planned(runs, wanted, env, rule=rule)
    going = [item for item in items if item.goes]
    if args.empty_trash:
        heaps = [root / room.TRASH for root in roots if (root / room.TRASH).is_dir()]
        size = terminal.size(sum(map(room.size_of, heaps)))
        print(f"In the trash: {size}{', which is gone for good' if args.yes else '; --yes removes it for good'}.")
    else:
        stores = [store for root in roots for store in root.glob(f"{STORE}*")]
        print("\n".join(_table(items, sum(map(room.size_of, stores)))))
        print(_outcome(going, rule, done=args.yes))
    thrown = cleaning.clean(going) if args.yes else []
    for root in roots if args.yes else ():
        room.empty_trash(root, *[0.0] * args.empty_trash)
    for heap in thrown:
        here, back = (terminal.word_for_shell(str(path)) for path in (heap, heap.parents[1]))
        print(f"  back by     cp -a {here}/. {back}")


def _table(items: "Sequence[Item]", shared: int) -> list[str]:
    from trainkit.run.room import PARTS

    header = ("run", "state", "takes", *PARTS, "frees")
    rows = []
    for item in items:
        parts = [terminal.size(item.parts[part]) if item.parts[part] else "-" for part in PARTS]
        frees = terminal.size(item.frees) if item.goes else "-"
        rows.append((item.run.name, item.state, terminal.size(sum(item.parts.values())), *parts, frees))
    if shared:
        takes = terminal.size(shared)
        rows.append(("(shared code)", "-", takes, "-", takes, *["-"] * len(PARTS[2:]), "-"))
    notes = [f"stays: {item.stays}" if item.stays else "" for item in items]
    return terminal.table(header, rows, notes, dispensable=("other", "logs", "curves", "samples", "code", "state"))


def _outcome(going: "Sequence[Item]", rule: str, *, done: bool) -> str:
    from trainkit.run.room import KEPT_SECONDS

    more = "" if done or rule != "spare" else " More goes by --keep-best, --older-than 30d, --state failed, or by name."
    if not going:
        return f"Nothing goes.{more}"
    what = terminal.plural(len(going), "run")
    if rule in ("best", "weights"):
        what = f"of the checkpoints of {what} all but the best{' weights' * (rule == 'weights')}"
    if rule == "spare":
        what = f"of {what} what can be had again"
    size = terminal.size(sum(item.frees for item in going))
    if done:
        days = round(KEPT_SECONDS / 86400)
        return f"Moved to the trash: {what}, {size}. It is removed after {days} days, or by --empty-trash."
    return f"Would go: {what}, {size}. --yes moves that to the trash.{more}"


if __name__ == "__main__":
    cli.run(main)

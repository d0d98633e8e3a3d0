"""``python -m jobs.clean``: show disk usage of runs; with `--yes` move what a rule selects to the trash.

Without --yes nothing is removed. Removed files stay in runs/.trash for 14 days
and can be copied back. Runs that are running, queued, needed by another run or
tagged `keep` are never touched.

Without a rule, it removes what can be made again: all checkpoints but the best
and the newest; W&B's offline files of finished runs, because `sync` sends the
metrics; unpacked code that no run uses, because each run has an archive of it.

  python -m jobs.clean                                  show disk usage
  python -m jobs.clean --yes                            remove what can be made again
  python -m jobs.clean --keep-best --yes                remove other checkpoints
  python -m jobs.clean --state failed --older-than 30d  list these runs
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jobs import cli, flags, output
from trainkit.common import terminal

if TYPE_CHECKING:
    from pathlib import Path

    from trainkit.launch.clean import Item
    from trainkit.run.folder import RunDir


def parser() -> cli.Parser:
    parser = cli.Parser("clean", __doc__ or "")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="only these runs or sweeps")
    keep = "remove all checkpoints but the best; a run that has not finished also keeps its newest"
    add("--keep-best", action="store_true", help=keep)
    add("--weights-only", action="store_true", help="with --keep-best: also the optimizer's state of finished runs")
    add("--yes", action="store_true", help="remove what is listed")
    add("--empty-trash", action="store_true", help="with --yes: delete everything in the trash for good")
    add("--older-than", dest="older", metavar="AGE", help="not written to for this long: 30d, 12h")
    flags.add_selection(parser)
    return parser.taking("--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.common.errors import UserError
    from trainkit.launch import clean
    from trainkit.run import find, trash
    from trainkit.run.snapshot import STORE

    wanted = flags.selection(args)
    named: list[RunDir] = []
    for reference in args.runs:
        named += find.find_runs(reference, env)
    runs = named or find.known_runs(env)
    roots = dict.fromkeys([find.runs_root(env), *map(trash.root_of, runs)])
    if args.weights_only and not args.keep_best:
        why = "It changes what is kept of the best checkpoint."
        raise UserError("--weights-only needs --keep-best.", why=why, fix="Add --keep-best.")
    if args.weights_only:
        rule = "weights"
    elif args.keep_best:
        rule = "best"
    elif named or wanted:
        rule = "whole"
    else:
        rule = "spare"
    if args.empty_trash:
        size = terminal.size(sum(trash.size_of(root / trash.TRASH) for root in roots))
        if output.is_on():
            _answer([], [root / trash.TRASH for root in roots], done=args.yes)
        if not args.yes:
            print(f"In the trash: {size}; --yes deletes it for good.")
            return
        print(f"Deleted from the trash: {size}.")
        for root in roots:
            trash.empty_trash(root, 0.0)
        return
    items = clean.planned(runs, wanted, env, rule=rule)
    going = [item for item in items if item.goes]
    shared = 0
    for root in roots:
        shared += sum(map(trash.size_of, root.glob(f"{STORE}*")))
    print("\n".join(_table(items, shared)))
    print(_outcome(going, rule, done=args.yes))
    thrown = clean.clean(going) if args.yes else []
    if output.is_on():
        _answer(items, thrown, done=args.yes)
    if not args.yes:
        return
    for root in roots:
        trash.empty_trash(root)
    for heap in thrown:
        here = terminal.word_for_shell(str(heap))
        print(f"  restore     cp -a {here}/. {terminal.word_for_shell(str(heap.parents[1]))}")


def _answer(items: "Sequence[Item]", heaps: "Sequence[Path]", *, done: bool) -> None:
    from jobs.shapes import Cleaned, CleanedRun

    runs = []
    for item in items:
        run = item.run
        takes = sum(item.parts.values())
        goes = [str(path) for path in item.goes]
        told = CleanedRun(
            run=run.name, folder=str(run.path), state=item.state, takes_bytes=takes, frees_bytes=item.frees, goes=goes,
            stays=item.stays,
        )  # fmt: skip
        runs.append(told)
    frees = sum(item.frees for item in items if item.goes)
    output.emit(Cleaned(removed=done, frees_bytes=frees, runs=runs, trash=list(map(str, heaps))))


def _table(items: "Sequence[Item]", shared: int) -> list[str]:
    from trainkit.run.trash import PARTS

    header = ("run", "state", "takes", *PARTS, "frees")
    rows = []
    notes = []
    for item in items:
        parts = [_size(item.parts[part]) for part in PARTS]
        frees = terminal.size(item.frees) if item.goes else "-"
        rows.append((item.run.name, item.state, terminal.size(sum(item.parts.values())), *parts, frees))
        notes.append(_note(item))
    if shared:
        size = terminal.size(shared)
        of_code = dict.fromkeys(PARTS, "-") | {"code": size}
        rows.append(("(shared code)", "-", size, *of_code.values(), "-"))
    return terminal.table(header, rows, notes, dispensable=("other", "logs", "curves", "samples", "code", "state"))


def _size(bytes_: int) -> str:
    return terminal.size(bytes_) if bytes_ else "-"


def _note(item: "Item") -> str:
    """Say why a run stays, or name the files that stay when a sweep is cleaned away."""
    if item.stays:
        return f"stays: {item.stays}"
    if not item.beside:
        return ""
    names = terminal.one_line(", ".join(item.beside), 300)
    return f"its sweep is removed; these files stay in {terminal.one_line(item.run.path.parent.name)}: {names}"


def _outcome(going: "Sequence[Item]", rule: str, *, done: bool) -> str:
    from trainkit.run.trash import KEPT_SECONDS

    more = ""
    if rule == "spare" and not done:
        more = " --keep-best, --older-than 30d, --state failed or names of runs select more."
    if not going:
        return f"Nothing to remove.{more}"
    what = terminal.plural(len(going), "run")
    if rule == "best":
        what = f"all checkpoints but the best of {what}"
    elif rule == "weights":
        what = f"all but the best weights of {what}"
    elif rule == "spare":
        what = f"files of {what} that can be made again"
    size = terminal.size(sum(item.frees for item in going))
    if done:
        days = round(KEPT_SECONDS / 86400)
        return f"Moved to the trash: {what}, {size}. It is deleted after {days} days, or by --empty-trash."
    return f"To remove: {what}, {size}. --yes moves it to the trash.{more}"


if __name__ == "__main__":
    cli.run(main)

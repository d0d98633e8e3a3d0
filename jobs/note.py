"""``python -m jobs.note RUN TEXT``: add a note to a run; its report and loggers show it."""

from collections.abc import Mapping, Sequence

from jobs import cli


def parser() -> cli.Parser:
    parser = cli.Parser("note", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's or a sweep's name or folder")
    add("text", nargs="?", metavar="TEXT", help="the note, in quotes; without it, print the existing notes")
    add("--remove", metavar="NUMBER", type=int, help="remove the note with this number")
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.run.find import find_runs
    from trainkit.run.labels import labels_of, note_of, require_said, say, take_back

    new: list[str] = []
    if args.text is not None:
        new = [note_of(args.text)]
    runs = find_runs(args.run, env)
    for run in runs:  # before anything is written of a sweep
        require_said(run, note=args.remove)
    for run in runs:
        take_back(run, note=args.remove)
        say(run, notes=new)
        notes = labels_of(run).notes
        print(f"{run.name}:" if notes else f"{run.name}: no notes")
        for note in notes:
            print(f"  {note.number}  {note.day}  {note.text}")


if __name__ == "__main__":
    cli.run(main)

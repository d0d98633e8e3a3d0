"""``python -m jobs.report RUN...``: a log book with settings, results, costs and curves; compares several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli, login_node
from trainkit import fileio, terminal
from trainkit.run.folder import find_runs


def parser() -> cli.Parser:
    parser = cli.Parser("report", __doc__)
    add = parser.add_argument
    runs = "a run's name or folder; the first is the reference. A sweep: its results"
    add("runs", nargs="+", metavar="RUN", help=runs)
    add("--compare", action="store_true", help="comparison.md, printed too, in place of the log book")
    add("--out", type=Path, metavar="FOLDER", help="folder to write to (default: the run's, or ./report for several)")
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, write, print the paths."""
    args = parser().parse_args(argv)
    from trainkit.log_book import report_on
    from trainkit.report.writers import RESULTS

    if args.host is not None:
        asked = [*args.runs, *["--compare"] * args.compare]
        for path in login_node.report(asked, args.host, args.out or Path("report"), env):
            if path.name == RESULTS:
                print(terminal.lines(fileio.read_text(path)))
            print(terminal.path(path.absolute()))
        return
    found = [find_runs(reference, env) for reference in args.runs]
    is_sweep = len(found) == 1 and len(found[0]) > 1
    runs = list({run.path: run for group in found for run in group}.values())
    report_on(runs, args.out, compare=args.compare, is_sweep=is_sweep)


if __name__ == "__main__":
    cli.run(main)

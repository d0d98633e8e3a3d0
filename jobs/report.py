"""``python -m jobs.report RUN...``: write a log book with settings, results, costs and curves; compare several runs."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli, login_node, output
from trainkit.common import fileio, terminal
from trainkit.run.find import runs_named
from trainkit.run.folder import BenchDir


def parser() -> cli.Parser:
    parser = cli.Parser("report", __doc__)
    add = parser.add_argument
    runs = "a run's name or folder; the first is the reference. For a sweep: its results"
    add("runs", nargs="+", metavar="RUN", help=runs)
    add("--compare", action="store_true", help="write and print comparison.md instead of the log book")
    add("--out", type=Path, metavar="FOLDER", help="folder to write to (default: the run's, or ./report for several)")
    return parser.taking("--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, write, print the paths."""
    args = parser().parse_args(argv)
    from trainkit.bench.results import page
    from trainkit.report.collection import collect, ranked
    from trainkit.report.figures import values_of
    from trainkit.report.writers import RESULTS, report_on

    if args.host is not None:
        asked = list(args.runs)
        if args.compare:
            asked.append("--compare")
        for path in login_node.report(asked, args.host, args.out or Path("report"), env):
            if path.name == RESULTS:
                print(terminal.lines(fileio.read_text(path)))
            print(terminal.path(path.absolute()))
        return
    runs = list(dict.fromkeys(runs_named(args.runs, env)))
    is_sweep = len(args.runs) == 1 and len(runs) > 1
    bench = BenchDir(runs[0].path)
    if len(runs) == 1 and bench.request.exists():
        print("\n".join(page(bench)))
        if output.is_on():
            from jobs.measured_shapes import Benched

            output.emit(Benched.of(bench))
        return
    report = report_on(runs, args.out, compare=args.compare, is_sweep=is_sweep)
    if output.is_on():
        from jobs.shapes import Reported, ReportedRun

        left_out = list(report.left_out)
        files = [str(path) for path in report.files]
        told = [ReportedRun.model_validate(values_of(facts)) for facts in ranked(collect(runs))]
        output.emit(Reported(runs=told, files=files, left_out=left_out))
    for sentence in report.left_out:
        print(sentence, file=sys.stderr)
    if report.text:
        print(report.text)
    for path in report.files:
        print(terminal.path(path))


if __name__ == "__main__":
    cli.run(main)

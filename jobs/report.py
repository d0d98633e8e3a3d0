"""``python -m jobs.report RUN...``: a log book with settings, results, costs and curves; compares several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli, elsewhere
from trainkit.records.rundir import find_run
from trainkit.report.logbook import write_logbook


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, write, print the paths."""
    parser = cli.Parser("report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's name or folder; the first is the reference")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the run's, or ./report for several)")
    elsewhere.add_host_flag(parser)
    args = parser.parse_args(argv)
    if args.host is not None:
        for path in elsewhere.report(args.runs, args.host, args.out or Path("report"), env):
            print(path.absolute())
        return 0
    runs = list({run.path: run for run in (find_run(reference, env) for reference in args.runs)}.values())
    out = args.out or (runs[0].path if len(runs) == 1 else Path("report"))
    for path in write_logbook(runs, out.absolute()):
        print(path)
    return 0


if __name__ == "__main__":
    cli.run(main)

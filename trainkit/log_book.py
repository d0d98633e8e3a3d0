"""Write what a report is made of, and say where: what `report` does, in notebooks too."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainkit import terminal
from trainkit.bench.base import BenchDir
from trainkit.bench.results import page
from trainkit.errors import UserError
from trainkit.report.facts import Facts, collect
from trainkit.report.writers import RESULTS, write_comparison, write_logbook, write_page, write_results
from trainkit.run.folder import RunDir


def report_on(
    runs: Sequence[RunDir], out: Path | None = None, *, compare: bool = False, is_sweep: bool = False
) -> None:
    """Write log book and page of one run, of several, or of a sweep's.

    Args:
        out: the folder; None: the run's or sweep's own, or ./report for several.
        compare: comparison.md in place of the log book; the first run is the reference.
    """
    if len(runs) == 1 and (bench := BenchDir(runs[0].path)).request.exists():
        print("\n".join(page(bench)))
        return
    if compare and len(runs) < 2:
        why = "There is nothing to set this one against."
        fix = f"Name the reference first: `{terminal.command('report', 'REFERENCE', runs[0].path, '--compare')}`."
        raise UserError("--compare needs two runs or more.", why=why, fix=fix)
    facts = collect(runs) if len(runs) == 1 else _readable(collect(runs), compare)
    if out is None:
        out = runs[0].path if len(runs) == 1 else runs[0].path.parent if is_sweep else Path("report")
    out = out.absolute()
    if compare:
        table, written = write_comparison(facts, out)
        print(f"{table}\n")
    else:
        if is_sweep:
            print(write_results(facts, out))
            print(terminal.path(out / RESULTS))
        written = write_logbook(facts, out)
    for path in [*written, write_page(facts, out)]:
        print(terminal.path(path))


def _readable(facts: list[Facts], compare: bool) -> list[Facts]:
    """Those whose records can be read: one odd run costs the others nothing. The reference is not left out."""
    found: list[Facts] = []
    for item in facts:
        try:
            _ = item.events, item.metrics, item.hosts, item.test
            found.append(item)
        except UserError as error:
            if (item is facts[-1] and not found) or (compare and item is facts[0]):
                raise
            print(f"Left out: {item.label}. {terminal.one_line(f'{error.what} {error.why}')}", file=sys.stderr)
    return found

"""The folder of a bench: samples line by line, and what they come to as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.bench import columns
from trainkit.bench.arms import Request
from trainkit.bench.benches import bench_of
from trainkit.bench.folder import BenchDir
from trainkit.bench.results import Results, Row, as_json, results_of
from trainkit.bench.words import meaning_of


def read_results(run: BenchDir) -> tuple[Results, list[dict[str, Any]]]:
    """What a bench has come to so far, and its samples. Raises UserError for any other folder."""
    request = Request.read(run.request)
    records = list(fileio.read_jsonl(run.samples))
    return results_of(bench_of(request.bench), request, records), records


def write_results(run: BenchDir) -> tuple[Results, list[Path]]:
    """Write results.json, and bench.png where there is something to draw; their paths."""
    from trainkit.bench.drawing import draw

    results, records = read_results(run)
    samples = [record for record in records if record.get("kind") == "sample"]
    fileio.write(run.results, json.dumps(fileio.finite(as_json(results, samples)), indent=2) + "\n", run.path)
    written = [run.results]
    if draw(results, run.picture):
        written.append(run.picture)
    return results, written


def page(run: BenchDir) -> list[str]:
    """The table with where its files are; they are written anew."""
    results, files = write_results(run)
    places = [f"  {file.suffix.removeprefix('.'):12}{file}" for file in files]
    return ["", *lines(results), "", *places]


def lines(results: Results) -> list[str]:
    """The table with everything that belongs to it, for a terminal."""
    bench = results.bench
    preset = f", preset {results.request.preset}" if results.request.preset else ""
    head = f"{bench.question} {bench.name}{preset}; {results.where or 'it has not begun'}."
    found = [*terminal.wrapped(terminal.one_line(head)), ""]
    shown = [(name, cell) for name, cell in bench.columns if _tells(cell, results)]
    rows = [[terminal.one_line(cell(row, results)) for _, cell in shown] for row in results.rows]
    notes = [terminal.one_line(row.failed) for row in results.rows]
    rows += [[name] + [columns.NONE] * (len(shown) - 1) for name, _ in results.left_out]
    notes += [f"left out: {terminal.one_line(why)}" for _, why in results.left_out]
    names = [name for name, _ in shown]
    gone = [name for name in bench.dispensable if name in names]
    found += terminal.table(names, rows, notes, dispensable=gone)
    found.append("")
    if results.control:
        first = next(row.name for row in results.rows if row.rates)
        spread = f"{min(results.control):.2f} to {max(results.control):.2f}"
        rounds = f"{results.rounds} round{'s' * (results.rounds != 1)}"
        found += terminal.wrapped(f"{rounds}. Control: {first} to itself {results.control_median:.2f} x ({spread}).")
    for note in results.notes:
        found += terminal.wrapped(f"Note: {terminal.one_line(note)}")
    meaning = meaning_of(results)
    for why in dict.fromkeys(row.why_none for row in results.rows if row.why_none):
        if why not in meaning:
            said = "No ratio" if columns.SPEED[1] in [cell for _, cell in bench.columns] else "Roughly"
            found += terminal.wrapped(f"{said}: {terminal.one_line(why)}.")
    return [*found, *terminal.wrapped(terminal.one_line(meaning))]


def _tells(cell: Callable[[Row, Results], str], results: Results) -> bool:
    """Whether a column says something of any row."""
    return not results.rows or any(cell(row, results) != columns.NONE for row in results.rows)

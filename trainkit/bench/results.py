"""From samples to figures: medians, ratios and whether they may be believed; and their table, JSON and picture.

The figures are a pure function of the lines that the job has written, so a job that was killed has told what it had
measured.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.bench.arms import MODEL, bench_of
from trainkit.bench.base import CONTROL, NONE, SPEED, WITHIN, Arm, Bench, Results, Row, rate
from trainkit.bench.request import FEWEST_ROUNDS, BenchDir, Request
from trainkit.report.charts import GREY, Axes, Bar, Picture, Point, Series, bar_chart, drawing, line_chart
from trainkit.report.facts import cpus_taken

TOLERANCE = 0.05
"""How far the first arm may be from itself before no ratio is believed."""
_MANY = 7
"""From so many rounds on the lowest and the highest ratio do not count: a neighbour's moment is no noise."""
Samples = Mapping[int, Mapping[str, Any]]
"""Of one arm, by round."""
Values = Mapping[str, tuple[float, Point | None]]
"""What a chart shows of each arm, and the ends of its spread."""


def results_of(bench: Bench, request: Request, records: Iterable[Mapping[str, Any]]) -> Results:
    """What the records of `samples.jsonl` come to."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        kinds.setdefault(str(record.get("kind")), []).append(record)
    began = (kinds.get("began") or [{}])[-1]
    rows = {arm["name"]: Row(arm["name"], _arm(arm)) for arm in began.get("arms", [])}
    for record in kinds.get("failed", []):
        if record.get("arm") in rows:
            rows[record["arm"]].failed = str(record.get("why", ""))
    for record in kinds.get("largest", []):
        if record.get("arm") in rows:
            rows[record["arm"]].largest = record.get("size")
    samples = [one for one in kinds.get("sample", []) if one.get("seconds") and one.get("arm") in {*rows, CONTROL}]
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in samples:
        by_arm.setdefault(one["arm"], {})[int(one["round"])] = one
    costs = {
        name: {number: one["seconds"] / one[bench.amount] for number, one in taken.items()}
        for name, taken in by_arm.items()
    }
    first = next((name for name in rows if name in by_arm), "")
    before, again = costs.get(first, {}), costs.get(CONTROL, {})
    control = [before[number] / again[number] for number in sorted(before.keys() & again.keys())]
    for name, row in rows.items():
        row.rates = [bench.scale / cost for cost in costs.get(name, {}).values()]
        _fill(row, list(by_arm.get(name, {}).values()))
    complete = min((len(costs[name]) for name, row in rows.items() if row.rates and not row.failed), default=0)
    problem = _problem(control, first) or _busy(samples)
    for name, row in rows.items():
        base = row.arm.base or first
        if name != base and row.rates and costs.get(base):
            # The first arm took the mean of its two turns.
            twice = again if base == first else {}
            mean = {number: (cost + twice.get(number, cost)) / 2 for number, cost in costs[base].items()}
            _compare(row, costs[name], mean, control, problem)
    if bench.ideal:
        _refuse_miracles(list(rows.values()))
    _compare_memory(rows, by_arm, first)
    ended = kinds.get("ended", [])
    notes = [str(note) for note in began.get("notes", [])]
    if ended and ended[-1].get("why"):
        notes.append(str(ended[-1]["why"]))
    if not ended:
        trying = kinds.get("trying", [])
        last = f"; it had begun with {trying[-1].get('arm')}" if trying and not samples else ""
        notes.append(f"It has not come to its end: {complete} of {request.rounds} rounds are complete{last}.")
    return Results(
        bench=bench,
        request=request,
        rows=list(rows.values()),
        left_out=[(str(one["name"]), str(one["why"])) for one in began.get("left_out", [])],
        control=control,
        problem=problem,
        rounds=complete,
        updates=int((samples or [{}])[0].get("updates", 0) or 0),
        where=str(began.get("where", "")),
        ended=bool(ended),
        notes=notes,
    )


def _arm(told: Mapping[str, Any]) -> Arm:
    known = {key: told[key] for key in ("name", "work", "size", "base", "series", "x") if key in told}
    ranks = told.get("ranks")
    return Arm(overrides=tuple(told.get("overrides", ())), ranks=None if ranks is None else tuple(ranks), **known)


def _fill(row: Row, samples: Sequence[Mapping[str, Any]]) -> None:
    row.memory_mb = _memory(samples)
    losses = [one["loss"] for one in samples if isinstance(one.get("loss"), int | float)]
    row.loss = statistics.median(losses) if losses and len(losses) == len(samples) else None
    for key in {key for one in samples for key in one.get("extra", {})}:
        values = [one["extra"][key] for one in samples if isinstance(one.get("extra", {}).get(key), int | float)]
        if values:
            row.extra[key] = statistics.median(values)


def _memory(samples: Iterable[Mapping[str, Any]]) -> float | None:
    peaks = [max(one["memory_mb"]) for one in samples if one.get("memory_mb")]
    return statistics.median(peaks) if peaks else None


def _problem(control: Sequence[float], first: str) -> str:
    """Why no ratio may be believed; empty where they may."""
    if len(control) < FEWEST_ROUNDS:
        told = "1 complete round is" if len(control) == 1 else f"{len(control)} complete rounds are"
        return f"{told} too few, it takes {FEWEST_ROUNDS}"
    median = statistics.median(control)
    if abs(median - 1) > TOLERANCE:
        return f"the control is off, {first} against itself came to {median:.2f} x: this machine does something else"
    return ""


def _busy(samples: Sequence[Mapping[str, Any]]) -> str:
    told = [one["cpu_taken"] for one in samples if isinstance(one.get("cpu_taken"), int | float)]
    return cpus_taken(statistics.median(told) if told else None)


def _compare(
    row: Row, own: Mapping[int, float], base: Mapping[int, float], control: Sequence[float], problem: str
) -> None:
    """Fill in the ratio, or why there is none."""
    row.ratios = [base[number] / own[number] for number in sorted(own.keys() & base.keys())]
    row.why_none = problem
    if problem:
        return
    if len(row.ratios) < FEWEST_ROUNDS:
        row.why_none = f"{row.name} was measured in {len(row.ratios)} rounds only"
        return
    median, kept = statistics.median(row.ratios), _kept(row.ratios)
    low, high = noise(control)
    if min(kept) < 1 < max(kept):
        row.why_none = f"{row.name} came out now faster, now slower ({min(kept):.2f} to {max(kept):.2f} x)"
    elif low <= median <= high:
        row.why_none = f"{row.name} came to {median:.2f} x, which is {WITHIN} ({low:.2f} to {high:.2f} x)"
    else:
        row.ratio = median


def _kept(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return ordered[1:-1] if len(ordered) >= _MANY else ordered


def noise(control: Sequence[float]) -> tuple[float, float]:
    """Between which ratios the first arm lies to itself, in either direction."""
    kept = _kept(control)
    width = max(max(kept), 1 / min(kept))
    return 1 / width, width


def _refuse_miracles(rows: Sequence[Row]) -> None:
    """A speed-up above the number of ranks means that the arm with fewer was held up."""
    for row in rows:
        base = next((other for other in rows if other.arm.series == row.arm.series), row)
        more = row.arm.x / base.arm.x if base.arm.x else 1
        if row.ratio is not None and more > 1 and row.ratio > more * (1 + TOLERANCE):
            row.why_none = f"{row.name} came to {row.ratio:.2f} x with {more:g} x the ranks: {base.name} was held up"
            row.ratio = None


def _compare_memory(rows: Mapping[str, Row], by_arm: Mapping[str, Samples], first: str) -> None:
    """Ratios of memory, where the first arm takes as much in both of its turns."""
    mine = rows[first].memory_mb if first else None
    again = _memory(by_arm.get(CONTROL, {}).values())
    if not mine or not again or abs(again / mine - 1) > TOLERANCE:
        return
    for row in rows.values():
        if row.name != first and row.memory_mb and abs(row.memory_mb / mine - 1) > TOLERANCE:
            row.memory_ratio = row.memory_mb / mine


def as_json(results: Results, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, samples included, so that whoever doubts a figure can compute it."""
    low, high = noise(results.control) if results.control else (None, None)
    median = statistics.median(results.control) if results.control else None
    return {
        "bench": results.bench.name,
        "question": results.bench.question,
        "meaning": results.meaning,
        "preset": results.request.preset,
        "where": results.where,
        "ended": results.ended,
        "rounds": results.rounds,
        "updates": results.updates,
        "unit": results.bench.unit,
        "control": {"ratios": results.control, "median": median, "noise": [low, high]},
        "arms": [
            {
                "name": row.name,
                "overrides": list(row.arm.overrides),
                "rate": row.median or None,
                "rate_min": min(row.rates, default=None),
                "rate_max": max(row.rates, default=None),
                "ratio": row.ratio,
                "ratios": row.ratios,
                "why_no_ratio": row.why_none,
                "memory_mb": row.memory_mb,
                "memory_ratio": row.memory_ratio,
                "loss": row.loss,
                "largest_micro_batch": row.largest,
                "failed": row.failed,
                **row.extra,
            }
            for row in results.rows
        ],
        "left_out": [{"name": name, "why": why} for name, why in results.left_out],
        "notes": results.notes,
        "samples": list(samples),
    }


def read_results(run: BenchDir) -> tuple[Results, list[dict[str, Any]]]:
    """What a bench has come to so far, and its samples. Raises UserError for any other folder."""
    request = Request.read(run.request)
    records = list(fileio.read_jsonl(run.samples))
    return results_of(bench_of(request.bench), request, records), records


def write_results(run: BenchDir) -> tuple[Results, list[Path]]:
    """Write results.json, and bench.svg where there is something to draw; their paths."""
    results, records = read_results(run)
    samples = [record for record in records if record.get("kind") == "sample"]
    fileio.write(run.results, json.dumps(fileio.finite(as_json(results, samples)), indent=2) + "\n", run.path)
    written = [run.results]
    if drawn := picture(results):
        fileio.write(run.picture, drawn, run.path)
        written.append(run.picture)
    return results, written


def page(run: BenchDir) -> list[str]:
    """The table with where its files are; they are written anew."""
    results, written = write_results(run)
    places = [f"  {file.suffix.removeprefix('.'):12}{file}" for file in written]
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
    rows += [[name] + [NONE] * (len(shown) - 1) for name, _ in results.left_out]
    notes += [f"left out: {terminal.one_line(why)}" for _, why in results.left_out]
    names = [name for name, _ in shown]
    found += terminal.table(names, rows, notes, dispensable=[name for name in bench.dispensable if name in names])
    found.append("")
    if results.control:
        spread = f"{min(results.control):.2f} to {max(results.control):.2f}"
        rounds = f"{results.rounds} round{'s' * (results.rounds != 1)}"
        control = f"{results.ran[0].name} to itself {statistics.median(results.control):.2f} x ({spread})"
        found += terminal.wrapped(f"{rounds}. Control: {control}.")
    for note in results.notes:
        found += terminal.wrapped(f"Note: {terminal.one_line(note)}")
    for why in dict.fromkeys(row.why_none for row in results.rows if row.why_none):
        if why not in results.meaning:
            said = "No ratio" if SPEED[1] in [cell for _, cell in bench.columns] else "Roughly"
            found += terminal.wrapped(f"{said}: {terminal.one_line(why)}.")
    return [*found, *terminal.wrapped(terminal.one_line(results.meaning))]


def _tells(cell: Callable[[Row, Results], str], results: Results) -> bool:
    """Whether a column says something of any row."""
    return not results.rows or any(cell(row, results) != NONE for row in results.rows)


def picture(results: Results) -> str:
    """An SVG: how fast each arm is, with its lowest and highest round, and its memory. Empty without rates."""
    unit = results.bench.unit
    rates = {row.name: (row.median, (min(row.rates), max(row.rates))) for row in results.ran}
    memory = {row.name: (row.memory_mb, None) for row in results.ran if row.memory_mb is not None}
    chart = _lines if results.bench.axis else _bars
    charts = [chart(results, "Speed", unit, rates), chart(results, "Peak memory of a rank", "MiB", memory)]
    names = list(dict.fromkeys(row.arm.series for row in results.ran)) if results.bench.axis else []
    legend = [(_label(name), _colour(name, names)) for name in names] if len(names) > 1 else []
    return drawing(charts, title=f"{results.bench.question} {results.where}", legend=legend, foot=results.meaning)


def _bars(results: Results, title: str, unit: str, values: Values) -> Picture | None:
    bars = [Bar(name, value, spread=spread) for name, (value, spread) in values.items()]
    return bar_chart(title, unit, bars)


def _lines(results: Results, title: str, unit: str, values: Values) -> Picture | None:
    """A line for each series of arms over their x; one for the ceiling, whatever x is, and one for what is ideal."""
    rows = [row for row in results.ran if row.name in values]
    places = sorted({row.arm.x for row in rows if row.arm.work != "ceiling"})
    names = list(dict.fromkeys(row.arm.series for row in results.ran))
    found = []
    for name in names:
        own = sorted((row for row in rows if row.arm.series == name), key=lambda row: row.arm.x)
        points = [(row.arm.x, values[row.name][0]) for row in own]
        spread = [ends for row in own if (ends := values[row.name][1])]
        is_ceiling = bool(own) and own[0].arm.work == "ceiling"
        if is_ceiling:
            points, spread = [(place, points[0][1]) for place in places], []
        elif results.bench.ideal and spread:
            (first, begun), (last, _) = points[0], points[-1]
            found.append(
                Series(
                    "as if all ranks were worth as much as the first",
                    [(first, begun), (last, begun * last / first)],
                    GREY,
                    dashed=True,
                )
            )
        found.append(Series(_label(name), points, _colour(name, names), dashed=is_ceiling, spread=spread))
    axes = Axes(title, unit, results.bench.axis, low=0, x_may_be_log=True, x_ticks=places)
    return line_chart(axes, found)


def _label(series: str) -> str:
    return series.removeprefix(", ") or "as configured"


def _colour(series: str, names: Sequence[str]) -> int:
    return GREY if series == MODEL else names.index(series) % GREY


class Progress:
    """Prints what a running bench has written: a line for each arm that is tried, and for each round."""

    def __init__(self, run: BenchDir, *, silent: bool) -> None:
        self._run, self._silent, self._said = run, silent, 0
        self._request = Request.read(run.request)
        self._bench = bench_of(self._request.bench)
        self._round: dict[int, list[str]] = {}
        self._arms = 0

    def show(self) -> None:
        """Print what is new."""
        if self._silent:
            return
        records = list(fileio.read_jsonl(self._run.samples))
        for record in records[self._said :]:
            if line := self._line(record):
                print(terminal.one_line(line), file=sys.stderr, flush=True)
        self._said = len(records)

    def _line(self, record: dict[str, Any]) -> str:
        kind, arm = record.get("kind"), record.get("arm", "")
        if kind == "began":
            self._arms = len(record.get("arms", []))
            return f"{record.get('where')}: {self._arms} arms, {self._request.rounds} rounds"
        if kind == "failed":
            self._arms -= 1
            return f"{arm}: {record.get('why')}"
        if kind == "largest":
            return f"{arm}: micro batches of {record.get('size')} fit"
        if kind != "sample":
            return ""
        number = int(record.get("round", 0))
        told = self._round.setdefault(number, [])
        told.append(f"{arm} {rate(self._bench.scale * record[self._bench.amount] / record['seconds'])}")
        if len(told) <= self._arms:
            return ""
        return f"round {number + 1}/{self._request.rounds}: {'; '.join(told)} {self._bench.unit}"

"""From samples to figures: medians, ratios and whether they may be believed; and their table, JSON and picture.

The figures are a pure function of the lines that the job has written, so a job that was killed has told what it had
measured.
"""

import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import TypeAdapter

from trainkit import fileio, terminal
from trainkit.bench import base
from trainkit.bench.arms import STRONG, WEAK, bench_of
from trainkit.bench.base import CONTROL, NONE, Arm, Bench, BenchDir, Request, Results, Row
from trainkit.monitor.follow import RecordTail
from trainkit.report.document import GREY, Axes, Bar, Series, bar_chart, drawing, line_chart
from trainkit.report.facts import cpus_taken
from trainkit.terminal import plural

OURS = "trainkit-vision"
TOLERANCE = 0.05
"""How far the first arm may be from itself before no ratio is believed."""
_MANY = 7
"""With at least this many rounds the lowest and the highest ratio do not count: one disturbance is no noise."""
Sample = Mapping[str, Any]


def results_of(bench: Bench, request: Request, records: Iterable[Mapping[str, Any]]) -> Results:
    """What the records of `samples.jsonl` come to."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        kinds[str(record.get("kind"))].append(record)
    began, ended = (kinds["began"] or [{}])[-1], kinds["ended"]
    arms = TypeAdapter(list[Arm]).validate_python(began.get("arms", []))
    rows = {arm.name: Row(arm.name, arm) for arm in arms}
    samples = [one for one in kinds["sample"] if one.get("seconds") and one.get("arm") in {*rows, CONTROL}]
    by_arm: dict[str, dict[int, Sample]] = defaultdict(dict)
    for one in samples:
        by_arm[one["arm"]][int(one["round"])] = one
    costs = {
        name: {number: one["seconds"] / one[bench.amount] for number, one in taken.items()}
        for name, taken in by_arm.items()
    }
    first = next((name for name in rows if name in costs), "")
    before, again = costs.get(first, {}), costs.get(CONTROL, {})
    control = [before[number] / again[number] for number in sorted(before.keys() & again.keys())]
    problem = _problem(control, first) or cpus_taken(_median(one.get("cpu_taken") for one in samples))
    for name, row in rows.items():
        row.failed = next((str(record.get("why", "")) for record in kinds["failed"] if record.get("arm") == name), "")
        for proved in (record for record in kinds["proved"] if record.get("arm") == name):
            row.outcome, row.figure = str(proved.get("outcome", "")), str(proved.get("figure", ""))
            row.failed = str(proved.get("why", ""))
        row.largest = next((record.get("size") for record in kinds["largest"] if record.get("arm") == name), None)
        own, against, taken = costs.get(name, {}), row.arm.base or first, list(by_arm[name].values())
        row.rates = [bench.scale / cost for cost in own.values()]
        row.memory_mb = _memory(taken)
        is_finite = all(isinstance(one.get("loss"), int | float) for one in taken)
        row.loss = _median(one.get("loss") for one in taken) if is_finite else None
        for key in sorted({key for one in taken for key in one.get("extra", {})}):
            if (value := _median(one.get("extra", {}).get(key) for one in taken)) is not None:
                row.extra[key] = value
        if name != against and row.rates and costs.get(against):
            # The first arm took the mean of its two turns.
            twice = again if against == first else {}
            mean = {number: (cost + twice.get(number, cost)) / 2 for number, cost in costs[against].items()}
            row.ratios = [mean[number] / own[number] for number in sorted(own.keys() & mean.keys())]
            row.why_none = problem or _contradiction(row, control)
            row.ratio = None if row.why_none else statistics.median(row.ratios)
    _refuse_miracles(list(rows.values()))
    _compare_memory(list(rows.values()), first, _memory(by_arm[CONTROL].values()))
    complete = min((len(row.rates) for row in rows.values() if row.rates and not row.failed), default=0)
    notes = [str(note) for note in [*began.get("notes", []), *(record.get("why") for record in ended[-1:])] if note]
    if not ended and not bench.proves:
        trying = kinds["trying"] if not samples else []
        last = "".join(f"; it had begun with {record.get('arm')}" for record in trying[-1:])
        notes.append(f"It has not come to its end: {complete} of {request.rounds} rounds are complete{last}.")
    left_out = [(str(one["name"]), str(one["why"])) for one in began.get("left_out", [])]
    updates = int((samples or [{}])[0].get("updates", 0) or 0)
    where = str(began.get("where", ""))
    return Results(
        bench, request, list(rows.values()), left_out, control, problem, complete, updates, where, bool(ended), notes
    )


def _median(values: Iterable[Any]) -> float | None:
    """Of those that are numbers; None where there are none."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None


def _memory(samples: Iterable[Sample]) -> float | None:
    return _median(max(one["memory_mb"]) for one in samples if one.get("memory_mb"))


def _problem(control: Sequence[float], first: str) -> str:
    """Why no ratio may be believed; empty where they may."""
    if len(control) < base.FEWEST_ROUNDS:
        told = "1 complete round is" if len(control) == 1 else f"{len(control)} complete rounds are"
        return f"{told} too few, it takes {base.FEWEST_ROUNDS}"
    median = statistics.median(control)
    if abs(median - 1) > TOLERANCE:
        return f"the control is off, {first} against itself came to {median:.2f} x: this machine does something else"
    return ""


def _contradiction(row: Row, control: Sequence[float]) -> str:
    """Why the rounds of one arm tell no difference; empty where they do."""
    if len(row.ratios) < base.FEWEST_ROUNDS:
        return f"{row.name} was measured in {len(row.ratios)} rounds only"
    median, kept = statistics.median(row.ratios), _kept(row.ratios)
    low, high = noise(control)
    if min(kept) < 1 < max(kept):
        return f"{row.name} came out now faster, now slower ({min(kept):.2f} to {max(kept):.2f} x)"
    if low <= median <= high:
        return f"{row.name} came to {median:.2f} x, which is {base.WITHIN} ({low:.2f} to {high:.2f} x)"
    return ""


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
        first = next(other for other in rows if other.arm.series == row.arm.series)
        if row.ratio is None or not row.arm.ranks or not first.arm.ranks:
            continue
        more = len(row.arm.ranks) / len(first.arm.ranks)
        if more > 1 and row.ratio > more * (1 + TOLERANCE):
            row.why_none = f"{row.name} came to {row.ratio:.2f} x with {more:g} x the ranks: {first.name} was held up"
            row.ratio = None


def _compare_memory(rows: Sequence[Row], first: str, again: float | None) -> None:
    """Ratios of memory, where the first arm takes as much in both of its turns."""
    mine = next((row.memory_mb for row in rows if row.name == first), None)
    if not mine or not again or abs(again / mine - 1) > TOLERANCE:
        return
    for row in rows:
        if row.name != first and row.memory_mb and abs(row.memory_mb / mine - 1) > TOLERANCE:
            row.memory_ratio = row.memory_mb / mine


def as_json(results: Results, samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything, samples included, so that whoever doubts a figure can compute it."""
    same = ("name", "ratio", "ratios", "memory_mb", "memory_ratio", "loss", "failed", "outcome", "figure")
    arms = [
        {key: getattr(row, key) for key in same}
        | {"overrides": list(row.arm.overrides), "why_no_ratio": row.why_none, "largest_micro_batch": row.largest}
        | {"rate": row.median or None, "rate_min": min(row.rates, default=None)}
        | {"rate_max": max(row.rates, default=None), **row.extra}
        for row in results.rows
    ]
    control, bench = results.control, results.bench
    return {
        "bench": bench.name,
        "question": bench.question,
        "preset": results.request.preset,
        "unit": bench.unit,
        **{key: getattr(results, key) for key in ("meaning", "where", "ended", "rounds", "updates", "notes")},
        "control": {
            "ratios": control, "median": _median(control), "noise": list(noise(control)) if control else [None, None]
        },
        "arms": arms,
        "left_out": [{"name": name, "why": why} for name, why in results.left_out],
        "samples": list(samples),
    }  # fmt: skip


def read_results(run: BenchDir) -> tuple[Results, list[dict[str, Any]]]:
    """What a bench has come to so far, and its samples. Raises UserError for any other folder."""
    request = Request.read(run.request)
    records = list(fileio.read_jsonl(run.samples))
    return results_of(bench_of(request.bench), request, records), records


def write_results(run: BenchDir) -> Results:
    """Write results.json, and bench.svg where there is something to draw."""
    results, records = read_results(run)
    samples = [record for record in records if record.get("kind") == "sample"]
    fileio.write(run.results, json.dumps(fileio.finite(as_json(results, samples)), indent=2) + "\n", run.path)
    if results.bench.proves:
        fileio.write(run.report, for_others(results, records), run.path)
    if drawn := picture(results):
        fileio.write(run.picture, drawn, run.path)
    return results


def for_others(results: Results, records: Iterable[Mapping[str, Any]]) -> str:
    """A proof as a page to send to a helpdesk, or to those who make trainkit: without names of nodes and without paths,
    which hold names of users.
    """
    kinds = {record.get("kind"): record for record in records}
    began, versions = kinds.get("began", {}), kinds.get("software", {}).get("versions", {})
    rows = [(row.name, row.outcome or "not run", row.figure, row.failed) for row in results.rows]
    rows += [(name, "left out", "", why) for name, why in results.left_out]
    table = terminal.markdown_table(("arm", "outcome", "figure", "why"), rows)
    for host in sorted(began.get("hosts", []), key=len, reverse=True):
        table = re.sub(rf"\b{re.escape(host)}\b", "NODE", table)
    table = re.sub(r"(?<![\w.])(/[^\s/|'\"]+)+", "PATH", table)
    day = time.strftime("%Y-%m-%d", time.gmtime(float(began.get("time", 0.0))))
    software = ", ".join(f"{name} {number}" for name, number in {"trainkit": _own_version(), **versions}.items())
    return f"# {results.bench.question}\n\n{results.meaning}\n\n{day}: {began.get('place')}; {software}.\n\n{table}\n"


def _own_version() -> str:
    try:
        return version(OURS)
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def page(run: BenchDir) -> list[str]:
    """The table with where its files are; they are written anew."""
    told = lines(write_results(run))
    files = (run.results, run.picture, run.report)
    places = [f"  {file.suffix.removeprefix('.'):12}{file}" for file in files if file.exists()]
    return ["", *told, "", *places]


def lines(results: Results) -> list[str]:
    """The table with everything that belongs to it, for a terminal."""
    bench, preset = results.bench, results.request.preset
    name = f"{bench.name}, preset {preset}" if preset else bench.name
    head = f"{bench.question} {name}; {results.where or 'it has not begun'}."
    # Columns that say something of any row.
    shown = {
        name: cell for name, cell in bench.columns
        if not results.rows or any(cell(row, results) != NONE for row in results.rows)
    }  # fmt: skip
    rows = [[terminal.one_line(cell(row, results)) for cell in shown.values()] for row in results.rows]
    rows += [[name] + [NONE] * (len(shown) - 1) for name, _ in results.left_out]
    notes = [row.failed for row in results.rows] + [f"left out: {why}" for _, why in results.left_out]
    notes = [terminal.one_line(note) for note in notes]
    below = []
    if control := results.control:
        itself = f"{results.ran[0].name} to itself {statistics.median(control):.2f} x"
        below.append(
            f"{plural(results.rounds, 'round')}. Control: {itself} ({min(control):.2f} to {max(control):.2f})."
        )
    below += [f"Note: {note}" for note in results.notes]
    no_ratio = "No ratio" if base.SPEED[1] in shown.values() else "Roughly"
    whys = dict.fromkeys(row.why_none for row in results.rows if row.why_none)
    below += [f"{no_ratio}: {why}." for why in whys if why not in results.meaning]
    dispensable = [name for name in bench.dispensable if name in shown]
    table = terminal.table(list(shown), rows, notes, dispensable=dispensable)
    wrapped = [line for words in (*below, results.meaning) for line in terminal.wrapped(terminal.one_line(words))]
    return [*terminal.wrapped(terminal.one_line(head)), "", *table, "", *wrapped]


def picture(results: Results) -> str:
    """An SVG: how fast each arm is, with its lowest and highest round, and its memory. Empty without rates.

    Of bench scaling also the speed-up by ranks, beside that of ranks which are worth as much as the first.
    """
    speeds = [Bar(row.name, row.median, spread=(min(row.rates), max(row.rates))) for row in results.ran]
    memory = [Bar(row.name, row.memory_mb) for row in results.ran if row.memory_mb is not None]
    charts = [bar_chart("Speed", results.bench.unit, speeds), bar_chart("Peak memory of a rank", "MiB", memory)]
    curves = _speed_ups(results)
    if curves:
        fewest, most = curves[0].points[0][0], max(curve.points[-1][0] for curve in curves)
        linear = Series("linear", [(fewest, 1.0), (most, most / fewest)], GREY, label="linear", dashed=True)
        charts.append(line_chart(Axes("Speed-up", "x", "ranks", from_zero=True), [linear, *curves]))
    legend = [(curve.name, curve.colour) for curve in curves]
    return drawing(charts, title=f"{results.bench.question} {results.where}", legend=legend, foot=results.meaning)


def _speed_ups(results: Results) -> list[Series]:
    """By ranks, a line for each way of bench scaling to share the images, where a ratio can be told."""
    curves = []
    for colour, name in enumerate((STRONG, WEAK)):
        first, more = results.series(name)[:1], [row for row in results.compared if row.arm.series == name]
        points = [(float(len(row.arm.ranks or ())), row.speed or 1.0) for row in [*first, *more]]
        if more:
            curves.append(Series(name, points, colour, label=f"{points[-1][1]:.2f} x"))
    return curves


def progress(run: BenchDir) -> Callable[[], None]:
    """What prints, whenever it is called, what a running bench has written since, a line a turn."""
    request = Request.read(run.request)
    bench, samples = bench_of(request.bench), RecordTail(run.samples)
    rounds = "" if bench.proves else f", {request.rounds} rounds"

    def line(record: Mapping[str, Any]) -> str:
        kind, arm = record.get("kind"), record.get("arm", "")
        if kind == "began":
            return f"{record.get('where')}: {len(record.get('arms', []))} arms{rounds}"
        if kind == "failed":
            return f"{arm}: {record.get('why')}"
        if kind == "proved":
            told = (record.get(key) for key in ("outcome", "figure", "why"))
            return f"{arm}: {'; '.join(str(one) for one in told if one)}"
        if kind == "largest":
            return f"{arm}: micro batches of {record.get('size')} fit"
        if kind != "sample":
            return ""
        rate = base.rate(bench.scale * record[bench.amount] / record["seconds"])
        return f"round {int(record.get('round', 0)) + 1}/{request.rounds}: {arm} {rate} {bench.unit}"

    def show() -> None:
        for record in samples.read():
            if told := line(record):
                print(terminal.one_line(told), file=sys.stderr, flush=True)

    return show

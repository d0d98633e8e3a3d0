"""From samples to figures: medians, ratios and whether they may be believed; and their table, JSON and picture.

The figures are a pure function of the lines that the job has written, so a job that was killed has told what it had
measured.
"""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import TypeAdapter

from trainkit.bench import base
from trainkit.bench.base import CONTROL, NONE, Arm, ArmFigures, Bench, BenchRequest, Results
from trainkit.bench.benches.several_ranks import STRONG, WEAK
from trainkit.bench.catalogue import bench_of
from trainkit.common import fileio, jsonl, markdown, terminal
from trainkit.common.terminal import plural
from trainkit.monitor.log_tail import RecordTail
from trainkit.report.charts import GREY, Axes, Bar, Series, bar_chart, drawing, line_chart
from trainkit.report.hardware_samples import cpus_taken
from trainkit.run.folder import BenchDir

OURS = "trainkit-vision"
TOLERANCE = 0.05
"""Share by which the first arm may be off itself before no ratio is believed."""
_MANY = 7
"""With at least this many rounds the lowest and the highest ratio do not count: one disturbance is no noise."""
Sample = Mapping[str, Any]
"""A line of ``samples.jsonl``."""
Costs = Mapping[int, float]
"""Round -> seconds for one image, or one byte."""


def results_of(bench: Bench, request: BenchRequest, records: Iterable[Sample]) -> Results:
    """Compute the results from the records of `samples.jsonl`."""
    kinds = defaultdict[str, list[Sample]](list)
    for record in records:
        kinds[str(record.get("kind"))].append(record)
    began: Sample = {}
    if kinds["began"]:
        began = kinds["began"][-1]
    rows: dict[str, ArmFigures] = {}
    for arm in TypeAdapter(list[Arm]).validate_python(began.get("arms", [])):
        rows[arm.name] = ArmFigures(arm.name, arm)
    known = {*rows, CONTROL}
    samples = [sample for sample in kinds["sample"] if sample.get("seconds") and sample.get("arm") in known]
    turns = defaultdict[str, dict[int, Sample]](dict)
    costs = defaultdict[str, dict[int, float]](dict)
    for sample in samples:
        number = int(sample["round"])
        turns[sample["arm"]][number] = sample
        costs[sample["arm"]][number] = sample["seconds"] / sample[bench.amount]
    first = next((name for name in rows if name in turns), "")  # the first arm that was measured
    control = _ratios(costs[CONTROL], costs[first], {})
    taken = _median(sample.get("cpu_taken") for sample in samples)
    problem = _problem(control, first) or cpus_taken(taken)
    for name, row in rows.items():
        _take_events(row, kinds)
        _take_samples(row, list(turns[name].values()))
        row.rates = [bench.scale / cost for cost in costs[name].values()]
        against = row.arm.base or first
        if name == against or not row.rates or not costs[against]:
            continue
        second_turns = costs[CONTROL] if against == first else {}
        row.ratios = _ratios(costs[name], costs[against], second_turns)
        row.why_none = problem or _contradiction(row, control)
        if not row.why_none:
            row.ratio = statistics.median(row.ratios)
    ordered = list(rows.values())
    _refuse_miracles(ordered)
    _compare_memory(rows, first, _memory(turns[CONTROL].values()))
    left_out = []
    for one in began.get("left_out", []):
        left_out.append((str(one["name"]), str(one["why"])))
    updates = 0
    if samples:
        updates = int(samples[0].get("updates") or 0)
    complete = _complete_rounds(ordered)
    return Results(
        bench, request, rows=ordered, left_out=left_out, control=control, problem=problem, rounds=complete,
        updates=updates, where=str(began.get("where", "")), ended=bool(kinds["ended"]),
        notes=_notes(bench, request, kinds, complete),
    )  # fmt: skip


def _complete_rounds(rows: Sequence[ArmFigures]) -> int:
    """Return the number of rounds that every arm has made, of those that were measured and have not failed."""
    counts = [len(row.rates) for row in rows if row.rates and not row.failed]
    return min(counts, default=0)


def _take_events(row: ArmFigures, kinds: Mapping[str, Sequence[Sample]]) -> None:
    """Fill in what was written about an arm besides its samples."""
    for record in (*kinds.get("failed", ()), *kinds.get("proved", ())):
        if record.get("arm") == row.name:
            row.failed = str(record.get("why", ""))
            row.outcome = str(record.get("outcome", ""))
            row.figure = str(record.get("figure", ""))
    for record in kinds.get("largest", ()):
        if record.get("arm") == row.name:
            row.largest = record.get("size")


def _take_samples(row: ArmFigures, samples: Sequence[Sample]) -> None:
    """Fill in the medians of memory, loss and whatever else the samples of an arm hold."""
    row.memory_mb = _memory(samples)
    losses = [one.get("loss") for one in samples]
    if all(isinstance(loss, int | float) for loss in losses):
        row.loss = _median(losses)
    extras = defaultdict[str, list[Any]](list)
    for sample in samples:
        for key, value in sample.get("extra", {}).items():
            extras[key].append(value)
    for key in sorted(extras):
        median = _median(extras[key])
        if median is not None:
            row.extra[key] = median


def _ratios(own: Costs, others: Costs, again: Costs) -> list[float]:
    """Return by how much an arm is faster than another in each round that has both.

    Args:
        again: of the second turn that the first arm takes in each round; the mean of both counts.
    """
    ratios = []
    for number in sorted(own.keys() & others.keys()):
        mean = (others[number] + again.get(number, others[number])) / 2
        ratios.append(mean / own[number])
    return ratios


def _notes(bench: Bench, request: BenchRequest, kinds: Mapping[str, Sequence[Sample]], complete: int) -> list[str]:
    """Return what a reader should know of the figures, an early end above all."""
    notes = []
    for began in kinds["began"][-1:]:
        notes += began.get("notes", [])
    for ended in kinds["ended"][-1:]:
        notes.append(ended.get("why"))
    told = [str(note) for note in notes if note]
    if not kinds["ended"] and not bench.proves:
        last = ""
        if kinds["trying"] and not kinds["sample"]:
            last = f"; it had started {kinds['trying'][-1].get('arm')}"
        told.append(f"It has not finished: {complete} of {request.rounds} rounds are complete{last}.")
    return told


def _median(values: Iterable[Any]) -> float | None:
    """Median of those values that are numbers; None where there are none."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return None
    return statistics.median(numbers)


def _memory(samples: Iterable[Sample]) -> float | None:
    """Median of the peaks of the rank that needs most."""
    return _median(max(one["memory_mb"]) for one in samples if one.get("memory_mb"))


def _problem(control: Sequence[float], first: str) -> str:
    """Why no ratio may be believed; empty where they may."""
    if len(control) < base.FEWEST_ROUNDS:
        are = "is" if len(control) == 1 else "are"
        return f"{plural(len(control), 'complete round')} {are} too few; {base.FEWEST_ROUNDS} are needed"
    median = statistics.median(control)
    if abs(median - 1) > TOLERANCE:
        return f"the control is off, {first} against itself came to {median:.2f} x: other programs use this machine"
    return ""


def _contradiction(row: ArmFigures, control: Sequence[float]) -> str:
    """Why the rounds of one arm tell no difference; empty where they do."""
    if len(row.ratios) < base.FEWEST_ROUNDS:
        return f"{row.name} was measured in {len(row.ratios)} rounds only"
    median = statistics.median(row.ratios)
    kept = _kept(row.ratios)
    low, high = noise(control)
    if min(kept) < 1 < max(kept):
        return f"{row.name} was sometimes faster, sometimes slower ({min(kept):.2f} to {max(kept):.2f} x)"
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


def _refuse_miracles(rows: Sequence[ArmFigures]) -> None:
    """A speed-up above the number of ranks means that the arm with fewer was held up."""
    firsts: dict[str, ArmFigures] = {}
    for row in rows:
        first = firsts.setdefault(row.arm.series, row)
        if row.ratio is None or not row.arm.ranks or not first.arm.ranks:
            continue
        more = len(row.arm.ranks) / len(first.arm.ranks)
        if more > 1 and row.ratio > more * (1 + TOLERANCE):
            row.why_none = (
                f"{row.name} came to {row.ratio:.2f} x with {more:g} x the ranks, so something slowed {first.name} down"
            )
            row.ratio = None


def _compare_memory(rows: Mapping[str, ArmFigures], first: str, again: float | None) -> None:
    """Fill in ratios of memory, where the first arm takes as much in both of its turns."""
    if not first:
        return
    mine = rows[first].memory_mb
    if not mine or not again or abs(again / mine - 1) > TOLERANCE:
        return
    for name, row in rows.items():
        ratio = (row.memory_mb or mine) / mine
        if name != first and abs(ratio - 1) > TOLERANCE:
            row.memory_ratio = ratio


def as_json(results: Results, samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything, samples included, so that whoever doubts a figure can compute it."""
    same = ("name", "ratio", "ratios", "memory_mb", "memory_ratio", "loss", "failed", "outcome", "figure")
    arms = []
    for row in results.rows:
        arm: dict[str, Any] = {}
        for key in same:
            arm[key] = getattr(row, key)
        arm["overrides"] = list(row.arm.overrides)
        arm["why_no_ratio"] = row.why_none
        arm["largest_micro_batch"] = row.largest
        arm["rate"] = row.median or None
        arm["rate_min"] = min(row.rates, default=None)
        arm["rate_max"] = max(row.rates, default=None)
        arms.append(arm | row.extra)
    control = results.control
    limits: list[float | None] = [None, None]
    if control:
        limits = [*noise(control)]
    bench = results.bench
    about = {"bench": bench.name, "question": bench.question, "preset": results.request.preset, "unit": bench.unit}
    for key in ("meaning", "where", "ended", "rounds", "updates", "notes"):
        about[key] = getattr(results, key)
    return {
        **about,
        "control": {"ratios": control, "median": _median(control), "noise": limits},
        "arms": arms,
        "left_out": [{"name": name, "why": why} for name, why in results.left_out],
        "samples": list(samples),
    }


def read_results(run: BenchDir) -> tuple[Results, list[dict[str, Any]]]:
    """Return the results of a bench so far, and its samples. Raises UserError for any other folder."""
    request = BenchRequest.read(run.request)
    records = list(jsonl.read_jsonl(run.samples))
    return results_of(bench_of(request.bench), request, records), records


def write_results(run: BenchDir) -> Results:
    """Write results.json, and bench.svg where there is something to draw."""
    results, records = read_results(run)
    samples = [record for record in records if record.get("kind") == "sample"]
    fileio.write(run.results, json.dumps(jsonl.finite(as_json(results, samples)), indent=2) + "\n", run.path)
    if results.bench.proves:
        fileio.write(run.report, for_others(results, records), run.path)
    drawn = picture(results)
    if drawn:
        fileio.write(run.picture, drawn, run.path)
    return results


def for_others(results: Results, records: Iterable[Mapping[str, Any]]) -> str:
    """A proof as a page to send to a helpdesk, or to those who make trainkit: without names of nodes and without paths,
    which hold names of users.
    """
    began: Sample = {}
    versions = {"trainkit": "of a checkout that is not installed"}
    with suppress(PackageNotFoundError):
        versions["trainkit"] = version(OURS)
    for record in records:
        if record.get("kind") == "began":
            began = record
        elif record.get("kind") == "software":
            versions |= record["versions"]
    rows = []
    for row in results.rows:
        rows.append((row.name, row.outcome or "not run", row.figure, row.failed))
    for name, why in results.left_out:
        rows.append((name, "left out", "", why))
    table = markdown.markdown_table(("arm", "outcome", "figure", "why"), rows)
    for host in sorted(began.get("hosts", []), key=len, reverse=True):
        table = re.sub(rf"\b{re.escape(host)}\b", "NODE", table)
    table = re.sub(r"(?<![\w.])(/[^\s/|'\"]+)+", "PATH", table)
    day = time.strftime("%Y-%m-%d", time.gmtime(float(began.get("time", 0.0))))
    software = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"# {results.bench.question}\n\n{results.meaning}\n\n{day}: {began.get('place')}; {software}.\n\n{table}\n"


def page(run: BenchDir) -> list[str]:
    """The table with where its files are; they are written anew."""
    told = ["", *lines(write_results(run)), ""]
    for file in (run.results, run.picture, run.report):
        if file.exists():
            told.append(f"  {file.suffix.removeprefix('.'):12}{file}")
    return told


def lines(results: Results) -> list[str]:
    """The table with everything that belongs to it, for a terminal."""
    bench = results.bench
    name = bench.name
    if results.request.preset:
        name += f", preset {results.request.preset}"
    header = []
    columns = []  # those that say something of any row
    for title, cell in bench.columns:
        cells = [terminal.one_line(cell(row, results)) for row in results.rows]
        if not cells or set(cells) != {NONE}:
            header.append(title)
            columns.append(cells)
    rows = list(map(list, zip(*columns, strict=True)))
    notes = [row.failed for row in results.rows]
    for left_out, why in results.left_out:
        rows.append([left_out] + [NONE] * (len(header) - 1))
        notes.append(f"left out: {why}")
    dispensable = [title for title in bench.dispensable if title in header]
    table = terminal.table(header, rows, list(map(terminal.one_line, notes)), dispensable=dispensable)
    head = f"{bench.question} {name}; {results.where or 'it has not begun'}."
    return [*_wrapped(head), "", *table, "", *_wrapped(*_remarks(results), results.meaning)]


def _wrapped(*lines: str) -> list[str]:
    found = []
    for line in lines:
        found += terminal.wrapped(terminal.one_line(line))
    return found


def _remarks(results: Results) -> list[str]:
    """The control, notes, and why arms have no ratio."""
    remarks = []
    control = results.control
    if control:
        itself = f"{results.ran[0].name} to itself {statistics.median(control):.2f} x"
        rounds = plural(results.rounds, "round")
        remarks.append(f"{rounds}. Control: {itself} ({min(control):.2f} to {max(control):.2f}).")
    remarks += [f"Note: {note}" for note in results.notes]
    label = "Roughly"
    for _, cell in results.bench.columns:
        if cell is base.SPEED[1]:
            label = "No ratio"
    for why in dict.fromkeys(row.why_none for row in results.rows):
        if why and why not in results.meaning:
            remarks.append(f"{label}: {why}.")
    return remarks


def picture(results: Results) -> str:
    """An SVG: how fast each arm is, with its lowest and highest round, and its memory. Empty without rates.

    Of bench scaling also the speed-up by ranks, beside that of ranks which are worth as much as the first.
    """
    speeds = []
    memory = []
    for row in results.ran:
        speeds.append(Bar(row.name, row.median, spread=(min(row.rates), max(row.rates))))
        if row.memory_mb is not None:
            memory.append(Bar(row.name, row.memory_mb))
    charts = [bar_chart("Speed", results.bench.unit, speeds), bar_chart("Peak memory of a rank", "MiB", memory)]
    curves = _speed_ups(results)
    legend = []
    most = 0.0
    for curve in curves:
        legend.append((curve.name, curve.colour))
        most = max(most, curve.points[-1][0])
    if curves:
        fewest = curves[0].points[0][0]
        linear = Series("linear", [(fewest, 1.0), (most, most / fewest)], GREY, label="linear", dashed=True)
        charts.append(line_chart(Axes("Speed-up", "x", "ranks", from_zero=True), [linear, *curves]))
    return drawing(charts, title=f"{results.bench.question} {results.where}", legend=legend, foot=results.meaning)


def _speed_ups(results: Results) -> list[Series]:
    """Curves by number of ranks, one for each way of bench scaling to share the images, where a ratio can be told."""
    curves = []
    for colour, name in enumerate((STRONG, WEAK)):
        points = []
        for place, row in enumerate(results.series(name)):
            if place == 0 or row.ratio is not None:
                points.append((float(len(row.arm.ranks or ())), row.speed or 1.0))
        if len(points) > 1:
            curves.append(Series(name, points, colour, label=f"{points[-1][1]:.2f} x"))
    return curves


def progress(run: BenchDir) -> Callable[[], None]:
    """Return a function that says what a running bench has written since it was last called, a line a turn."""
    request = BenchRequest.read(run.request)
    samples = RecordTail(run.samples)

    def show() -> None:
        for record in samples.read():
            told = _in_words(record, request)
            if told:
                terminal.warn(terminal.one_line(told))

    return show


def _in_words(record: Sample, request: BenchRequest) -> str:
    """A record of a running bench in words; empty for one that nobody waits for."""
    bench = bench_of(request.bench)
    kind = record.get("kind")
    arm = record.get("arm", "")
    if kind == "began":
        arms = f"{record.get('where')}: {len(record.get('arms', []))} arms"
        if bench.proves:
            return arms
        return f"{arms}, {request.rounds} rounds"
    if kind == "failed":
        return f"{arm}: {record.get('why')}"
    if kind == "proved":
        told = [str(record[key]) for key in ("outcome", "figure", "why") if record.get(key)]
        return f"{arm}: {'; '.join(told)}"
    if kind == "largest":
        return f"{arm}: micro batches of {record.get('size')} fit"
    if kind != "sample":
        return ""
    rate = base.rate(bench.scale * record[bench.amount] / record["seconds"])
    return f"round {int(record.get('round', 0)) + 1}/{request.rounds}: {arm} {rate} {bench.unit}"

"""From samples to figures: medians, ratios to the arm that is compared with, and whether they may be believed.

A pure function of what the job has written line by line, so that one that was killed has told what it had measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.bench.arms import CONTROL, FEWEST_ROUNDS, WITHIN, Arm, Bench, Request
from trainkit.bench.words import meaning_of
from trainkit.report.facts import cpus_taken

TOLERANCE = 0.05
"""So much the first arm may differ from itself before nothing else may be believed either."""
_MANY = 7
"""From so many rounds on the lowest and the highest ratio do not count: a neighbour's moment is no noise."""


@dataclass
class Row:
    """One arm."""

    name: str
    arm: Arm
    failed: str = ""
    """Why it could not be measured, or not to the end."""
    rates: list[float] = field(default_factory=list)
    """One a round, in the bench's unit."""
    ratio: float | None = None
    """Median over the rounds of its rate to that of the arm that it is compared with; None: see ``why_none``."""
    ratios: list[float] = field(default_factory=list)
    why_none: str = ""
    memory_mb: float | None = None
    """Median of the peaks of the rank that needs most."""
    memory_ratio: float | None = None
    loss: float | None = None
    largest: int | None = None
    """Micro batch that fits."""
    extra: dict[str, float] = field(default_factory=dict)
    """Medians of whatever else its samples hold."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None

    @property
    def speed(self) -> float:
        """The ratio, where there is one."""
        assert self.ratio is not None
        return self.ratio


@dataclass(frozen=True)
class Results:
    """Of a whole bench, finished or not."""

    bench: Bench
    request: Request
    rows: list[Row]
    left_out: list[tuple[str, str]]
    control: list[float]
    """The first arm's second turn to its first, round by round."""
    problem: str
    """Why no ratio may be believed; empty where they may."""
    rounds: int
    """That are complete."""
    updates: int
    where: str
    ended: bool
    """It has come to its end, if an early one."""
    notes: list[str]

    @property
    def control_median(self) -> float | None:
        return statistics.median(self.control) if self.control else None


def results_of(bench: Bench, request: Request, records: Iterable[Mapping[str, Any]]) -> Results:
    """What the records of `samples.jsonl` come to."""
    listed = list(records)
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for record in listed:
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
    control = _paired(costs.get(first, {}), costs.get(CONTROL, {}))
    for name, row in rows.items():
        row.rates = [bench.scale / cost for cost in costs.get(name, {}).values()]
        _fill(row, list(by_arm.get(name, {}).values()))
    alive = [name for name, row in rows.items() if row.rates and not row.failed]
    complete = min((len(costs[name]) for name in alive), default=0)
    problem = _problem(control, first) or _busy(samples)
    for name, row in rows.items():
        base = row.arm.base or first
        if name != base and row.rates and costs.get(base):
            _compare(row, costs[name], _of_base(base, first, costs), control, problem)
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
    memory = [max(one["memory_mb"]) for one in samples if one.get("memory_mb")]
    row.memory_mb = statistics.median(memory) if memory else None
    losses = [one["loss"] for one in samples if isinstance(one.get("loss"), int | float)]
    row.loss = statistics.median(losses) if losses and len(losses) == len(samples) else None
    for key in {key for one in samples for key in one.get("extra", {})}:
        values = [one["extra"][key] for one in samples if isinstance(one.get("extra", {}).get(key), int | float)]
        if values:
            row.extra[key] = statistics.median(values)


def _paired(first: Mapping[int, float], again: Mapping[int, float]) -> list[float]:
    return [first[number] / again[number] for number in sorted(first.keys() & again.keys())]


def _of_base(base: str, first: str, costs: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """What the arm that others are compared with took in each round: the first one, the mean of its two turns."""
    again = costs.get(CONTROL, {}) if base == first else {}
    return {number: (cost + again.get(number, cost)) / 2 for number, cost in costs[base].items()}


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


def _refuse_miracles(rows: Sequence[Row]) -> None:
    """More ranks are not faster than they are more: then the arm with fewer was held up."""
    for row in rows:
        base = next((other for other in rows if other.arm.series == row.arm.series), row)
        more = row.arm.x / base.arm.x if base.arm.x else 1
        if row.ratio is not None and more > 1 and row.ratio > more * (1 + TOLERANCE):
            row.why_none = f"{row.name} came to {row.ratio:.2f} x with {more:g} x the ranks: {base.name} was held up"
            row.ratio = None


def _kept(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return ordered[1:-1] if len(ordered) >= _MANY else ordered


def noise(control: Sequence[float]) -> tuple[float, float]:
    """Between which ratios the first arm lies to itself, in either direction."""
    kept = _kept(control)
    width = max(max(kept), 1 / min(kept))
    return 1 / width, width


def _compare(
    row: Row, own: Mapping[int, float], base: Mapping[int, float], control: Sequence[float], problem: str
) -> None:
    row.ratios = [base[number] / own[number] for number in sorted(own.keys() & base.keys())]
    row.why_none = problem
    if problem:
        return
    if len(row.ratios) < FEWEST_ROUNDS:
        row.why_none = f"{row.name} was measured in {len(row.ratios)} rounds only"
        return
    median = statistics.median(row.ratios)
    kept = _kept(row.ratios)
    if min(kept) < 1 < max(kept):
        row.why_none = f"{row.name} came out now faster, now slower ({min(kept):.2f} to {max(kept):.2f} x)"
        return
    low, high = noise(control)
    if low <= median <= high:
        row.why_none = f"{row.name} came to {median:.2f} x, which is {WITHIN} ({low:.2f} to {high:.2f} x)"
        return
    row.ratio = median


def _compare_memory(rows: Mapping[str, Row], by_arm: Mapping[str, Mapping[int, Mapping[str, Any]]], first: str) -> None:
    """Ratios of memory, where the first arm takes as much in both of its turns."""
    mine = rows[first].memory_mb if first else None
    again = [max(one["memory_mb"]) for one in by_arm.get(CONTROL, {}).values() if one.get("memory_mb")]
    if not mine or not again or abs(statistics.median(again) / mine - 1) > TOLERANCE:
        return
    for row in rows.values():
        if row.name != first and row.memory_mb and abs(row.memory_mb / mine - 1) > TOLERANCE:
            row.memory_ratio = row.memory_mb / mine


def as_json(results: Results, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, samples included, so that whoever doubts a figure can compute it."""
    low, high = noise(results.control) if len(results.control) else (None, None)
    return {
        "bench": results.bench.name,
        "question": results.bench.question,
        "meaning": meaning_of(results),
        "preset": results.request.preset,
        "where": results.where,
        "ended": results.ended,
        "rounds": results.rounds,
        "updates": results.updates,
        "unit": results.bench.unit,
        "control": {"ratios": results.control, "median": results.control_median, "noise": [low, high]},
        "arms": [
            {
                "name": row.name,
                "overrides": list(row.arm.overrides),
                "rate": row.median,
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

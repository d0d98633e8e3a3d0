"""Deadlines: whether a run can be done in time, on how many nodes, for how many GPU-hours, and with which odds.

What a run needs comes from earlier runs, when the queue would start it from the scheduler, and the odds from the waits
of similar jobs in the site's accounts. What none of them tells stays unknown. Nothing is refused.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import Scheduler, named
from trainkit.cluster.site import Partition, Site
from trainkit.cluster.waits import DAYS, PastJob, chance
from trainkit.common import fileio, terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.common.moments import moment
from trainkit.common.process import NoAnswer
from trainkit.config.schema import Config
from trainkit.data.order import steps_per_epoch
from trainkit.data.registry import train_size
from trainkit.launch.planning import make_plan
from trainkit.launch.preparation import Prepared, by_names, not_with_join
from trainkit.launch.requests import earlier_runs
from trainkit.launch.validation import validate
from trainkit.report.facts import Facts
from trainkit.report.fit import price_in

SURE = 0.9
"""Odds from which a deadline counts as kept."""
_ASKED = 4
"""Most numbers of nodes for which the scheduler is asked, from the least: each is a scheduling pass of its own. None is
spent on one that is too dear, or costs more than one that is sure enough."""
_ALIKE = ("model.name", "data.name", "train.global_batch_size", "strategy.name")
MEASURED = "measured"
_LINEAR = "if N times the ranks are N times as fast; not measured"


class Pace(NamedTuple):
    """Time that an earlier run has taken, validation, saving and what restarts have lost included. Times in seconds."""

    nodes: int
    ranks: int
    seconds: float
    updates: int
    """A script's whole run counts as one."""
    start: float
    """Seconds until an attempt's first update."""
    per_epoch: int | None
    """Updates of an epoch."""
    device: str


class Row(NamedTuple):
    """Expectation of the run on so many nodes. Times in seconds, or since 1970."""

    nodes: int
    seconds: float
    hours: float
    """GPU-hours, or rank-hours without GPUs."""
    parts: int
    """Jobs one after another, for the time limit."""
    basis: str
    start: float | None = None
    """Start that the queue expects."""
    odds: float | None = None
    jobs: int = 0
    """Similar jobs of the past."""
    refusal: str = ""

    @property
    def done(self) -> float | None:
        """When it ends by the queue, but for the waits of later parts."""
        return None if self.start is None else self.start + self.seconds


@dataclass(frozen=True)
class Outlook:
    """The answer to a deadline, a budget, or both."""

    now: float
    deadline: float | None
    budget: float | None
    rows: Sequence[Row]
    nodes: int | None
    """The number of nodes to take; None: none is known to keep it."""
    says: str
    notes: Sequence[str]
    unit: str = "GPU-hours"
    price: tuple[float, str] | None = None


def deadline_of(by: str | None, budget: float | None, now: float) -> float | None:
    """Return the deadline, in seconds since 1970. Raises UserError, also for a wrong ``budget``."""
    if budget is not None and not 0 < budget < math.inf:
        what = f"--budget {budget:g} is not possible."
        raise UserError(what, why="It is a number of GPU-hours, above 0.", fix="For example --budget 40.")
    return None if by is None else moment(by, now)


# What the run needs


def pace_of(facts: Facts) -> Pace | None:
    """Return what a run has taken; None if it has not trained, or is a script that has not ended."""
    ranks = facts.started("world_size")
    seconds = sum(span.seconds for span in facts.spans)
    updates = int(facts.finished) if facts.is_script else facts.steps
    if not ranks or not updates or seconds <= 0:
        return None
    start = facts.spent.get("start", 0.0) / len(facts.spans)
    nodes = len(facts.started("hosts") or "1")
    device = str(facts.started("device") or "").lower()
    return Pace(nodes, ranks, seconds, updates, start, facts.started("steps_per_epoch"), device)


def update_seconds(paces: Sequence[Pace], ranks: int) -> tuple[float, str]:
    """Return the seconds of an update on so many ranks, and what that rests on."""
    measured = {}
    nodes = {}
    for count in {pace.ranks for pace in paces}:
        those = [pace for pace in paces if pace.ranks == count]
        measured[count] = sum(pace.seconds for pace in those) / sum(pace.updates for pace in those)
        nodes[count] = those[-1].nodes
    if ranks in measured:
        return measured[ranks], MEASURED
    near = sorted(measured, key=lambda count: abs(math.log(count / ranks)))[:2]
    seconds = [measured[count] for count in near]
    if len(near) == 2 and nodes[near[0]] != nodes[near[1]]:
        divided = (seconds[0] - seconds[1]) / (1 / near[0] - 1 / near[1])
        fixed = seconds[0] - divided / near[0]
        if divided > 0 and fixed >= 0:
            return fixed + divided / ranks, f"by the runs on {min(near)} and {max(near)} ranks"
    return seconds[0] * near[0] / ranks, _LINEAR


def updates_of(config: Config, paces: Sequence[Pace]) -> int | None:
    """Return how many updates a run makes; None if nobody knows its number of images."""
    if config.script is not None:
        return 1
    if config.train.max_steps:
        return config.train.max_steps
    images = train_size(config.data)
    per_epoch = paces[-1].per_epoch
    if images is not None:
        per_epoch = steps_per_epoch(images, config.train.global_batch_size)
    return config.train.epochs * per_epoch if per_epoch else None


def _paces(prepared: Prepared, plan: Plan, partition: Partition | None) -> list[Pace]:
    """Find the paces of earlier runs on such processors, the newest last."""
    kinds = [str(prepared.loadeds[0].config.launch.gpu_type or "").lower()]
    if not kinds[0] and partition is not None:
        kinds = [kind.lower() for node in partition.nodes for kind in node.gpu_types]
    found = []
    for run in earlier_runs(prepared, _ALIKE, finished=False):
        pace = pace_of(Facts(run, run.name))
        had = fileio.read_object(run.plan)
        if pace is None or had.get("executor") != plan.executor:
            continue
        on_cpu = pace.device == "cpu"
        if not pace.device:  # a script's ranks do not tell it
            on_cpu = not had.get("gpus_per_node")
        is_kind = on_cpu or not any(kinds) or not pace.device or any(kind in pace.device for kind in kinds)
        if on_cpu == (plan.gpus_per_node == 0) and is_kind:
            found.append(pace)
    return [pace for pace in found if pace.device == found[-1].device]


# The rows


def outlook(prepared: Prepared, deadline: float | None, budget: float | None, now: float, short: str) -> Outlook:
    """Say for 1, 2, 4, ... nodes what is to be expected. Asks the scheduler; writes and queues nothing.

    Args:
        now: seconds since 1970.
        short: the command of a short run, which would tell its pace.

    Raises UserError for a job that joins a swarm.
    """
    if prepared.request.join is not None:
        raise not_with_join("--by" if deadline is not None else "--budget")
    loaded = prepared.loadeds[0]
    config = loaded.config
    site = prepared.site
    plan = make_plan(loaded, site, prepared.folder)
    partition = site.partition(config.launch.partition)
    paces = _paces(prepared, plan, partition)
    updates = updates_of(config, paces) if paces else None
    unit = "GPU-hours" if plan.gpus_per_node else "rank-hours"
    price = price_in(config.launch.gpu_hour_price) if plan.gpus_per_node else None
    if updates is None:
        alike = "this model, data, batch and strategy"
        says = f"How long it takes is unknown. A short run tells: {short}"
        if config.script is not None:
            alike = "this script with these arguments"
            says = "How long it takes is unknown until it has run once."
        why = f"No such run, of {alike} on these processors, has trained here."
        return Outlook(now, deadline, budget, (), None, says, (why,), unit, price)
    queue = _Queue(prepared, partition, now)
    rows: list[Row] = []
    for other in _plans(prepared, site, plan, partition):
        row = row_of(other, paces, updates)
        if not row.refusal:
            row = queue.likely(row, other, deadline)
        too_dear = budget is not None and row.hours > budget
        sure = [before for before in rows if not before.refusal and (before.odds or 0.0) >= SURE]
        is_settled = any(before.hours <= row.hours for before in sure)
        if not (row.refusal or too_dear or is_settled):
            row = queue.ask(row, other, deadline)
        rows.append(row)
    notes = list(filter(None, [queue.whose, queue.unsaid]))
    if len(prepared.loadeds) > 1:
        notes.append(f"Each of the {len(prepared.loadeds)} runs needs this.")
    if any(row.parts > 1 for row in rows):
        notes.append("Each part waits anew. The odds take these waits as independent; `done` leaves them out.")
    nodes, says = advice(rows, deadline, budget, now, config, unit)
    return Outlook(now, deadline, budget, rows, nodes, says, notes, unit, price)


def _plans(prepared: Prepared, site: Site, plan: Plan, partition: Partition | None) -> Iterator[Plan]:
    """Plan it on 1, 2, 4, ... nodes and on as many as it asks for, where this is possible."""
    counts = {plan.nodes}
    if named(plan.executor).batch and partition is not None:
        most = min(len(partition.nodes), partition.max_nodes or len(partition.nodes))
        counts |= {2**power for power in range(most.bit_length()) if 2**power <= most}
    loaded = prepared.loadeds[0]
    for count in sorted(counts):
        launch = loaded.config.launch.model_copy(update={"nodes": count})
        chosen = replace(loaded, config=loaded.config.model_copy(update={"launch": launch}))
        try:
            other = by_names(make_plan(chosen, site, prepared.folder), prepared.env)
            validate(chosen, other, site, prepared.folder, Path.cwd())
        except TrainkitError:  # its batch does not divide, or the site does not allow it
            continue
        yield other


def row_of(plan: Plan, paces: Sequence[Pace], updates: int) -> Row:
    """Return what the run needs as planned: as many jobs as its time limit makes of it."""
    update, basis = update_seconds(paces, plan.world_size)
    start = statistics.median(pace.start for pace in paces)
    seconds = updates * update
    parts = 1
    refusal = ""
    limit = plan.time_limit_seconds
    usable = limit - start - plan.lead_seconds
    if not named(plan.executor).batch or start + seconds <= limit:
        usable = seconds
    if usable <= 0:
        refusal = "the time limit is shorter than its start"
    elif seconds > usable:
        parts = math.ceil(seconds / usable)
        if not plan.requeue:
            refusal = f"it needs {parts} jobs of {terminal.duration(limit)}, and launch.requeue is false"
    seconds += parts * start
    processors = (plan.nodes + plan.spare_nodes) * (plan.gpus_per_node or plan.ntasks_per_node)
    return Row(plan.nodes, seconds, seconds * processors / 3600, parts, basis, refusal=refusal)


class _Queue:
    """Answers of the scheduler and its accounts about a start. The accounts are read once."""

    def __init__(self, prepared: Prepared, partition: Partition | None, now: float) -> None:
        self._prepared = prepared
        self._partition = partition
        self._now = now
        self._asked = 0
        self._past: list[PastJob] | None = None
        self.unsaid = ""
        """Why the scheduler has told no start."""
        self.whose = ""
        """Owners of the jobs that the odds rest on, or why there are none."""

    def likely(self, row: Row, plan: Plan, deadline: float | None) -> Row:
        """Add the odds, unless it would be too late now; without a queue also the start."""
        scheduler = named(plan.executor)
        if not scheduler.batch:
            self.whose = "There is no queue here: it starts at once."
            return row._replace(start=self._now)
        if deadline is None or self._now + row.seconds > deadline:
            return row
        slack = deadline - self._now - row.seconds
        like = PastJob(0, 0, True, plan.gpus_per_node * plan.nodes or plan.nodes, plan.gpus_per_node > 0)
        like = like._replace(limit=plan.time_limit_seconds)
        known, jobs = chance(self._history(scheduler, plan), like, slack, self._now, row.parts)
        return row._replace(jobs=jobs, odds=known)

    def ask(self, row: Row, plan: Plan, deadline: float | None) -> Row:
        """Add the start that the queue expects, unless it would be too late now."""
        scheduler = named(plan.executor)
        is_late = deadline is not None and self._now + row.seconds > deadline
        if self._asked == _ASKED or is_late or not scheduler.batch:
            return row
        self._asked += 1
        script = scheduler.script(plan, self._prepared.folder, Path.cwd()) or ""
        found = scheduler.earliest_start(script, _partition_of(plan, self._partition), self._prepared.env)
        if not found.answered:
            self._asked = _ASKED
            self.unsaid = f"When it would start, the queue does not tell: {found.refusal.rstrip('.')}."
            return row
        if found.when is None:
            return row._replace(refusal=found.refusal)
        return row._replace(start=max(found.when.timestamp(), self._now))

    def _history(self, scheduler: Scheduler, plan: Plan) -> list[PastJob]:
        if self._past is None:
            name = _partition_of(plan, self._partition)
            try:
                self._past = scheduler.past_jobs(name, self._now)
            except NoAnswer as error:
                self._past = []
                self.whose = f"No odds: {error.words.rstrip('.')}."
                return self._past
            if not self._past:
                self.whose = f"No odds: the accounts tell of no job in {name or 'the queue'} in {DAYS} days."
                return self._past
            users = len({job.user for job in self._past})
            of = terminal.plural(len(self._past), "job")
            by = f"of {users} users" if users > 1 else "of one user alone: the site may hide those of others"
            self.whose = f"Odds: by {of} in {name or 'the queue'} in {DAYS} days, {by}."
        return self._past


def _partition_of(plan: Plan, partition: Partition | None) -> str:
    for item in plan.directives:
        if item.name == "partition":
            return str(item.value)
    return partition.name if partition is not None else ""


# The answer


def advice(
    rows: Sequence[Row], deadline: float | None, budget: float | None, now: float, config: Config, unit: str
) -> tuple[int | None, str]:
    """Choose the cheapest number of nodes that keeps the deadline, or with a budget alone the soonest; say why.

    Args:
        unit: of `Row.hours`, in words.
    """
    able = [row for row in rows if not row.refusal]
    if not able:
        return None, f"Cannot be done: {rows[0].refusal}." if rows else "Cannot be done on this site as it is."
    paid = [row for row in able if budget is None or row.hours <= budget]
    if not paid:
        least = min(able, key=lambda row: row.hours)
        share = (budget or 0.0) / least.hours
        return None, f"Cannot be done: it takes at least {least.hours:.3g} {unit}.{_shorter(config, share)}"
    if deadline is None:
        soonest = min(paid, key=lambda row: (row.done or math.inf, row.seconds))
        return soonest.nodes, f"Within the budget, {_nodes(soonest)} would be done first."
    in_time = [row for row in paid if now + row.seconds <= deadline]
    if not in_time:
        fastest = min(paid, key=lambda row: row.seconds)
        words = f"even if it started now, {_nodes(fastest)} would need until {_when(now + fastest.seconds)}"
        return None, f"Cannot be done: {words}.{_shorter(config, (deadline - now) / fastest.seconds)}"
    for row in sorted(in_time, key=lambda row: row.hours):
        if row.odds is not None and row.odds >= SURE:
            late = row.done is not None and row.done > deadline
            return row.nodes, f"Take {_nodes(row)}{', though the queue itself expects a later start' if late else ''}."
    for row in sorted(in_time, key=lambda row: row.hours):
        if row.odds is None and row.done is not None and row.done <= deadline:
            without = "" if row.jobs == 0 and row.start == now else ", by the queue's word alone"
            return row.nodes, f"Take {_nodes(row)}{without}."
    best = max(in_time, key=lambda row: row.odds or 0.0)
    if all(row.odds is None and row.start is None for row in in_time):
        return None, "Unknown: neither the queue nor the accounts tell when it would start."
    if best.odds is None:
        return None, "Not likely: by the queue every start is too late, and the accounts tell too little."
    return None, f"Not sure: the best odds are {_percent(best.odds)}, on {_nodes(best)}. Fewer epochs would help."


def _shorter(config: Config, share: float) -> str:
    """Say how much of the training would fit."""
    if config.script is not None:
        return ""
    key = "max_steps" if config.train.max_steps else "epochs"
    fitting = math.floor(getattr(config.train, key) * share)
    if fitting:
        return f" train.{key}={fitting} would fit."
    return " Not one update would fit." if config.train.max_steps else " Not one epoch would fit."


def _nodes(row: Row) -> str:
    return terminal.plural(row.nodes, "node")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%a %b %d %H:%M}"


def lines(found: Outlook) -> list[str]:
    """Lines of what was asked, a table, and the answer."""
    asked = []
    if found.deadline is not None:
        asked.append(f"by {_when(found.deadline)}")
    if found.budget is not None:
        asked.append(f"for at most {found.budget:g} {found.unit}")
    told = [f"Can it be done {' and '.join(asked)}?"]
    if found.rows:
        header = ["nodes", "needs", "parts", found.unit, "queue starts", "done", "odds (jobs)"]
        if found.price is not None:
            header.insert(4, "price")
        cells = [_cells(row, found) for row in found.rows]
        notes = []
        for row in found.rows:
            notes.append(", ".join(filter(None, [row.refusal, "" if row.basis == MEASURED else row.basis])))
        told += terminal.table(header, cells, notes, dispensable=("queue starts", "parts"))
    for sentence in [*found.notes, found.says]:
        told += terminal.wrapped(sentence)
    return told


def _cells(row: Row, found: Outlook) -> list[str]:
    likely = f"- ({row.jobs})" if row.jobs else "-"
    if row.odds is not None:
        likely = f"{_percent(row.odds)} ({row.jobs})"
    elif found.deadline is not None and found.now + row.seconds > found.deadline:
        likely = "too late"
    times = []
    for when in (row.start, row.done):
        times.append("-" if when is None else f"{datetime.fromtimestamp(when):%a %d %H:%M}")
    hours = f"{row.hours:.0f}" if row.hours >= 100 else f"{row.hours:.3g}"
    cells = [str(row.nodes), terminal.duration(row.seconds), str(row.parts), hours, *times, likely]
    if found.price is not None:
        cells.insert(4, f"{row.hours * found.price[0]:.2f} {found.price[1]}")
    return cells


def to_json(found: Outlook) -> dict[str, Any]:
    """Plain values, for programs."""
    rows = []
    for row in found.rows:
        plain = row._asdict() | {"done": row.done, "odds": None if row.odds is None else round(100 * row.odds, 1)}
        plain["price"] = None if found.price is None else round(row.hours * found.price[0], 2)
        rows.append(plain)
    currency = None if found.price is None else found.price[1]
    return {
        "deadline": found.deadline, "budget": found.budget, "nodes": found.nodes, "says": found.says,
        "notes": list(found.notes), "unit": found.unit, "currency": currency, "rows": rows,
    }  # fmt: skip

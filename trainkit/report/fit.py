"""Requests that fit: what a job was given, what its ranks used of it, and the flags to ask for next time.

Only finished runs of a batch job are judged: what was asked for is in the plan, what was used in the hardware samples
and the events. A figure without samples proposes nothing. The margin on each covers what its own samples leave open:
how much they vary, and how few they are.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.config.slurm_options import slurm_time
from trainkit.report.document import Part, ReportRow, Table
from trainkit.report.facts import Facts
from trainkit.report.values import NONE, duration, number

_LEAST_MARGIN = 0.10
_FEW = 3.0
"""With n samples the margin grows by this over n: by 30 % with ten, by 3 % with a hundred."""
_WORTH = 1.25
"""A request up to so many times the proposal is left as it is."""
_IDLE_PERCENT = 5.0
"""Mean use below which a GPU counts as not used."""
_LEAST_MINUTES = 5.0
_LEAST_MB = 512.0


@dataclass(frozen=True)
class Resource:
    """One thing that was asked for. Times in seconds, memory in MB per node, CPUs per rank, GPUs per node."""

    name: str
    asked: float | None
    """None: it was left to the site."""
    used: float
    where: str
    """Node or ranks of the highest use."""
    margin: float
    """Share of the use that is added to it."""
    samples: int
    next: float
    """To ask for next time."""
    flag: str

    @property
    def is_wasteful(self) -> bool:
        """True if it was asked for, and clearly more than needed."""
        return self.asked is not None and self.asked > _WORTH * self.next

    @property
    def is_short(self) -> bool:
        """True if the next run may need more than was asked for."""
        return self.asked is not None and self.next > self.asked and self.used * (1 + _LEAST_MARGIN) > self.asked


@dataclass(frozen=True)
class Fit:
    """Resources that one run, or all runs of a sweep together, had and used."""

    resources: tuple[Resource, ...]
    idle_gpu_hours: float | None
    """Hours of GPUs in which they computed nothing; None without GPUs or their samples."""
    gpu_hours: float | None
    price: tuple[float, str] | None
    """Price of a GPU-hour and its currency, where the settings say it."""

    @property
    def flags(self) -> list[str]:
        """Flags for the next time, for what did not fit; empty where all did."""
        return [item.flag for item in self.resources if item.is_wasteful or item.is_short]

    @property
    def waste(self) -> str:
        """The GPU-hours that were wasted, and their price, in words; empty where none are known."""
        if not self.idle_gpu_hours or not self.gpu_hours:
            return ""
        words = f"{self.idle_gpu_hours:.3g} of {self.gpu_hours:.3g} GPU-hours idle"
        if self.price is not None:
            amount, unit = self.price
            words += f", {self.idle_gpu_hours * amount:.2f} of {self.gpu_hours * amount:.2f} {unit}".rstrip()
        return words

    def to_json(self) -> dict[str, Any]:
        """Plain values, for programs. Times in seconds, memory in MB per node."""
        rows = []
        for item in self.resources:
            rows.append({
                "name": item.name, "asked": item.asked, "used": item.used, "where": item.where,
                "margin": round(item.margin, 3), "samples": item.samples, "next": item.next, "flag": item.flag,
                "fits": not (item.is_wasteful or item.is_short),
            })  # fmt: skip
        return {
            "resources": rows,
            "flags": self.flags,
            "gpu_hours": self.gpu_hours,
            "idle_gpu_hours": self.idle_gpu_hours,
            "price_per_gpu_hour": None if self.price is None else self.price[0],
            "currency": None if self.price is None else self.price[1],
        }


def fit_of(runs: Sequence[Facts], accounted: Mapping[Path, float] | None = None) -> Fit | None:
    """Compare what finished runs had with what they used; for several, each resource by the run that used most.

    Args:
        accounted: the most memory that a rank of a run had, in MB, where its scheduler has accounted for it.

    Returns:
        None where there is nothing to compare: no run has finished, or no scheduler was asked for anything.
    """
    most: dict[str, Resource] = {}
    hours: list[tuple[float, float]] = []
    price = None
    for facts in runs:
        plan = fileio.read_object(facts.run_dir.plan)
        if not facts.finished or not plan.get("directives") or not facts.spans:
            continue
        of_a_rank = (accounted or {}).get(facts.run_dir.path, 0.0)
        for item in (_time(facts, plan), _memory(facts, plan, of_a_rank), _cpus(facts, plan), _gpus(facts, plan)):
            if item is not None and (item.name not in most or item.next > most[item.name].next):
                most[item.name] = item
        hours += _gpu_hours(facts)
        price = price_in(facts.setting("launch.gpu_hour_price")) or price
    if not most:
        return None
    held = sum(all_of for all_of, _ in hours) if hours else None
    idle = sum(of_it for _, of_it in hours) if hours else None
    return Fit(tuple(most.values()), idle, held, price)


def _margin(values: Sequence[float]) -> float:
    """Share to add to the highest of these values: their spread, a little, and more where they are few."""
    mean = statistics.fmean(values)
    spread = statistics.pstdev(values) / mean if mean > 0 else 0.0
    return _LEAST_MARGIN + min(spread, 1.0) + _FEW / len(values)


def _time(facts: Facts, plan: Mapping[str, Any]) -> Resource | None:
    """The time that one job takes for all of it, starts included; the margin is that of the pace."""
    asked = plan.get("time_limit_seconds")
    if not jsonl.is_number(asked):
        return None
    start = facts.spent.get("start", 0.0) / max(len(facts.spans), 1)
    used = sum(span.seconds for span in facts.spans) + start
    paces = [1 / speed for speed in facts.speeds if speed > 0]
    margin = _margin(paces or [1.0])
    minutes = max(math.ceil(used * (1 + margin) / 60), _LEAST_MINUTES)
    where = terminal.plural(len(facts.spans), "attempt")
    flag = f"--time {slurm_time(minutes)}"
    return Resource("time", float(asked), round(used, 1), where, margin, len(paces), minutes * 60, flag)


def _ranks_per_node(plan: Mapping[str, Any]) -> int:
    count = plan.get("ntasks_per_node")
    return count if jsonl.is_whole(count) and count > 0 else 1


def _highest(facts: Facts, key: str) -> tuple[list[float], str]:
    """Samples of the node whose first rank had most of something, and its name."""
    found: list[float] = []
    where = ""
    for host in facts.hosts:
        values = [value for _, value in host.curve(key)]
        if values and max(values) > max(found, default=0.0):
            found = values
            where = host.host
    return found, where


def _memory(facts: Facts, plan: Mapping[str, Any], accounted: float) -> Resource | None:
    """Memory of a node: what the first rank of one had with its data loaders, or any rank by the scheduler's accounts,
    for each of its ranks."""
    values, where = _highest(facts, "process_memory_mb")
    if not values:
        return None
    ranks = _ranks_per_node(plan)
    used = max(*values, accounted) * ranks
    margin = _margin(values)
    mb = max(_LEAST_MB, used * (1 + margin))
    gb = math.ceil(mb / 1024)
    place = f"{ranks} x the first rank of {where}" if ranks > 1 else where
    if accounted > max(values):
        place = f"{ranks} x the largest rank, by the accounts"
    return Resource("mem", _megabytes(plan), round(used, 1), place, margin, len(values), gb * 1024.0, f"--mem {gb}G")


def _megabytes(plan: Mapping[str, Any]) -> float | None:
    """The memory per node that was asked for; None: the site's default, or all of the node."""
    for item in plan.get("directives", ()):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", str(item.get("value")).upper())
        if item.get("name") == "mem" and match and float(match[1]):
            return float(match[1]) * 1024.0 ** ("KMGT".index(match[2] or "M") - 1)
    return None


def _cpus(facts: Facts, plan: Mapping[str, Any]) -> Resource | None:
    """CPUs of a rank: the use of the first rank of a node, with its data loaders, at all but one time in twenty."""
    values, where = _highest(facts, "process_cpu_percent")
    if not values or facts.hindered_by:  # what it would have used alone is not known
        return None
    asked = plan.get("cpus_per_task")
    used = sorted(values)[int(0.95 * (len(values) - 1))] / 100
    cpus = max(math.ceil(used * (1 + _LEAST_MARGIN)), 1)
    place = f"first rank of {where}"
    known = float(asked) if jsonl.is_number(asked) else None
    flag = f"--cpus-per-task {cpus}"
    return Resource("cpus", known, round(used, 2), place, _LEAST_MARGIN, len(values), float(cpus), flag)


def _gpus(facts: Facts, plan: Mapping[str, Any]) -> Resource | None:
    """GPUs of a node that were used at all."""
    asked = plan.get("gpus_per_node")
    if not jsonl.is_whole(asked) or not asked:
        return None
    most = 0
    samples = 0
    where = ""
    for host in facts.hosts:
        means = [usage.mean for usage in host.gpu_use()]
        used = sum(mean >= _IDLE_PERCENT for mean in means)
        samples = max(samples, len(host.samples))
        if means and used >= most:
            most = used
            where = host.host
    if not where:
        return None
    count = max(most, 1)
    return Resource("gpus", float(asked), float(most), where, 0.0, samples, float(count), f"--gpus-per-node {count}")


def _gpu_hours(facts: Facts) -> list[tuple[float, float]]:
    """For each sampled GPU, the hours for which the run held it, and those in which it computed nothing."""
    held = sum(span.seconds for span in facts.spans) / 3600
    found = []
    for host in facts.hosts:
        found += [(held, held * (1 - usage.mean / 100)) for usage in host.gpu_use()]
    return found


def price_in(text: Any) -> tuple[float, str] | None:
    """Read an amount and its unit: ``0.45 EUR``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(.*)", str(text or ""))
    return (float(match[1]), match[2]) if match else None


# In words


def lines(fit: Fit) -> list[str]:
    """Lines of a table, what to ask for next time, and what was wasted."""
    told = terminal.table(_HEADER, [tuple(map(str, row)) for row in _rows(fit)], dispensable=_DISPENSABLE)
    if fit.flags:
        told.append(f"next time: {' '.join(fit.flags)}")
    else:
        told.append("next time: the same; what was asked for fits")
    if fit.waste:
        told.append(f"wasted: {fit.waste}")
    return told


_HEADER = ("resource", "asked", "used", "by", "margin", "samples", "next time")
_DISPENSABLE = ("samples", "margin", "by")


def _rows(fit: Fit) -> list[ReportRow]:
    return [
        (
            _TITLES[item.name], _shown(item.name, item.asked), _shown(item.name, item.used), item.where,
            number(100 * item.margin, ".0f", " %"), str(item.samples), item.flag.partition(" ")[2],
        )
        for item in fit.resources
    ]  # fmt: skip


_TITLES = {"time": "time", "mem": "memory per node", "cpus": "CPUs per rank", "gpus": "GPUs per node"}


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return NONE
    if name == "time":
        return duration(value)
    if name == "mem":
        return f"{value / 1024:.1f}G"
    return f"{value:g}"


def section(facts: Facts) -> list[Part]:
    """The same for the log book; nothing of a run that asked nobody."""
    fit = fit_of([facts])
    if fit is None:
        return []
    rows = _rows(fit)
    flags = " ".join(fit.flags) or "the same"
    return [Table(_HEADER, [*rows, ("ask for", "", "", fit.waste, "", "", flags)], 1)]

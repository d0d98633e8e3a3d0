"""``submit --estimate``: when the job would start in each partition that takes it. Nothing is queued or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from jobs.starting import by_names
from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError, TrainkitError
from trainkit.launch.plan import make_plan, validate
from trainkit.schedulers.base import Start, named
from trainkit.site.profile import Site

MOST = 4
"""Partitions that are asked for: with the two calls that found them, six, as many as a scheduler hears in a minute."""


def estimate(
    load: Callable[[str], Loaded], loaded: Loaded, site: Site, folder: Path, cwd: Path, env: Mapping[str, str]
) -> int:
    """Print the earliest start for each partition, the soonest first.

    Args:
        load: the configuration as it is for a partition.
        loaded: the configuration as it was given; where it names partitions, only those are asked for.

    Raises RefusedError where no partition takes the job.
    """
    starts, calls = {}, 0
    for name in _partitions(loaded, site):
        try:
            chosen = load(name)
            plan = by_names(make_plan(chosen, site, folder), env)
            validate(chosen, plan, site, folder, cwd)
        except TrainkitError as error:
            starts[name] = Start(refusal=error.what)
            continue
        calls += 1
        if calls > MOST:
            starts[name] = Start(refusal=f"not asked: it is {MOST} at a time; give --partition {name}")
            continue
        scheduler = named(plan.executor)
        starts[name] = scheduler.earliest_start(scheduler.script(plan, folder, cwd) or "", name, env)
    if not starts:
        raise RefusedError(
            "No partition of this cluster takes jobs.",
            why="sinfo and scontrol name none that is up.",
            fix="Ask for one with --partition NAME, or try again when one is up.",
        )
    print("\n".join(_lines(starts, datetime.now())))
    if not any(start.when for start in starts.values()):
        name, first = next(iter(starts.items()))
        raise RefusedError(
            "No partition would take this job now.",
            why=f"{name}: {first.refusal.removesuffix('.')}.",
            fix="Ask for less, or for another partition with --partition NAME.",
        )
    return 0


def _partitions(loaded: Loaded, site: Site) -> list[str]:
    """Those that were asked for on the command line or in the environment, else all that take jobs."""
    if not site.scheduler or site.unknown:
        raise RefusedError(
            "Nobody can tell here when a job would start.",
            why=f"{site.unknown or 'There is no SLURM on this machine'}.",
            fix="Do this on a login node.",
        )
    named = loaded.config.launch.partition
    if named is not None and loaded.source("launch.partition").kind in ("flag", "override", "environment"):
        return named.split(",")
    return [partition.name for partition in site.partitions if partition.up]


def _lines(starts: Mapping[str, Start], now: datetime) -> list[str]:
    width = max(map(len, starts), default=0)
    soonest = sorted(starts.items(), key=lambda item: (item[1].when is None, item[1].when or now))
    return [f"{name:{width}}  {_words(start, now)}" for name, start in soonest]


def _words(start: Start, now: datetime) -> str:
    if start.when is None:
        return f"no: {start.refusal}"
    minutes = max(0, round((start.when - now).total_seconds() / 60))
    wait = "now" if not minutes else f"in {minutes} min" if minutes < 120 else f"in {minutes / 60:.0f} h"
    return f"{start.when:%Y-%m-%d %H:%M}  {wait}, on {start.nodes}"

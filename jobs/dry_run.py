"""Output of `--dry-run` on a plan, and of `--estimate` on the queue: nothing is written or queued."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import output
from trainkit.cluster.plan import Plan, Row
from trainkit.cluster.scheduler import ExpectedStart, named
from trainkit.cluster.site import ON_CPUS, ON_GPUS, Site
from trainkit.cluster.survey import cpu_formats
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, SchedulerError, TrainkitError
from trainkit.config.checks import strategy_traits
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.data.order import steps_per_epoch
from trainkit.data.registry import train_size
from trainkit.launch.planning import config_rows, make_plan, plan_rows
from trainkit.launch.preparation import by_names
from trainkit.launch.validation import validate

if TYPE_CHECKING:
    from jobs.shapes import OutlookPart

DERIVED = "derived"
MOST = 4
"""Partitions that are asked for: with the two calls that found them, six, as many as a scheduler hears in a minute."""


def print_plan(
    plan: Plan, loaded: Loaded, folder: Path, script: str | None, outlook: "OutlookPart | None" = None
) -> None:
    """Print on stdout what would be submitted, on stderr every value with its source and reason. Write nothing."""
    rows = plan_rows(plan) + config_rows(loaded) + expected_rows(plan, loaded.config)
    if output.is_on():
        _answer(plan, folder, script, rows, outlook)
        return
    if script is None:
        script = named(plan.executor).preview(plan, folder)
    sys.stdout.write(script)
    sys.stdout.flush()
    # What follows from it all comes last, where the prompt is.
    if sys.stderr.isatty():
        listed = []
        for name, value, source, reason in rows:
            remark = f"{source}: {reason}" if reason else source
            listed.append((name, value, remark))
        print("\n".join(terminal.listing(listed, shutil.get_terminal_size().columns)), file=sys.stderr)
        return
    print("\n".join(terminal.table(rows[0], rows[1:])), file=sys.stderr)


def _answer(plan: Plan, folder: Path, script: str | None, rows: Sequence[Row], outlook: "OutlookPart | None") -> None:
    from jobs.shapes import Decided, DryRun

    plain = fileio.parse_object(plan.to_json()) or {}
    told = {key: plain[key] for key in DryRun.model_fields if key in plain}
    settings = [Decided(name=name, value=value, source=by, reason=why) for name, value, by, why in rows]
    told |= {"settings": settings, "folder": str(folder), "script": script, "outlook": outlook}
    output.emit(DryRun.model_validate(told))


def expected_rows(plan: Plan, config: Config) -> list[Row]:
    """Setting, value, source and reason of what follows from the settings."""
    if config.script is not None:  # which decides that
        return []
    rows = [_precision(plan, config)]
    if config.data.fake:
        rows.insert(0, ("images", "made up", DERIVED, "data.fake; metrics on them mean nothing"))
    if strategy_traits(config.strategy.name).loop == "collaborative":
        return rows
    augment = config.augment
    if augment.min_size is not None and augment.ramp_epochs is not None:
        start, end = augment.ramp_epochs
        why = f"up to epoch {start}, then multiples of {augment.size_increment}, and full size from epoch {end} on"
        rows.insert(0, ("training images", f"{augment.min_size} px, growing", DERIVED, why))
    return [_steps(config), *rows]


def _steps(config: Config) -> Row:
    train = config.train
    images = train_size(config.data)
    total = train.max_steps
    why = "the images are counted when the run starts"
    if images is not None:
        per_epoch = steps_per_epoch(images, train.global_batch_size)
        by = "train.max_steps; "
        if not total:
            total = train.epochs * per_epoch
            by = f"{train.epochs} epochs, "
        why = f"{by}{per_epoch} an epoch: {images:,} images in batches of {train.global_batch_size}"
    if train.early_stopping_patience is not None:
        why += ", fewer if it stops early"
    return "total_steps", str(total or "?"), DERIVED, why


def _precision(plan: Plan, config: Config) -> Row:
    value = str(config.train.precision)
    if value != "auto":
        return "precision", value, DERIVED, "train.precision"
    if plan.gpus_per_node:
        return "precision", value, DERIVED, ON_GPUS
    if named(plan.executor).batch:
        return "precision", value, DERIVED, ON_CPUS
    return "precision", cpu_formats()[0], DERIVED, f"this machine's; auto is {ON_CPUS}"


def estimate(
    load: Callable[[str], Loaded], loaded: Loaded, site: Site, folder: Path, cwd: Path, env: Mapping[str, str]
) -> int:
    """Print the earliest start for each partition, the soonest first.

    Args:
        load: the configuration as it is for a partition.
        loaded: the configuration as it was given; where it names partitions, only those are asked for.

    Raises RefusedError where no partition takes the job, SchedulerError where nobody tells.
    """
    starts = {}
    calls = 0
    for name in _partitions(loaded, site):
        try:
            chosen = load(name)
            plan = by_names(make_plan(chosen, site, folder), env)
            validate(chosen, plan, site, folder, cwd)
        except TrainkitError as error:
            starts[name] = ExpectedStart(refusal=error.what)
            continue
        calls += 1
        if calls > MOST:
            refusal = f"not asked: at most {MOST} at a time; give --partition {name}"
            starts[name] = ExpectedStart(refusal=refusal, answered=False)
            continue
        scheduler = named(plan.executor)
        starts[name] = scheduler.earliest_start(scheduler.script(plan, folder, cwd) or "", name, env)
    if not starts:
        fix = "Name one with --partition NAME, or try again when one is up."
        raise RefusedError("No partition of this cluster takes jobs.", why="scontrol shows none that is up.", fix=fix)
    now = datetime.now()
    soonest_first = sorted(starts.items(), key=lambda item: (item[1].when is None, item[1].when or now))
    if output.is_on():
        from jobs.shapes import Estimate, PartitionStart

        told = []
        for name, start in soonest_first:
            when = start.when.isoformat() if start.when else None
            told.append(PartitionStart(partition=name, start=when, nodes=start.nodes, refusal=start.refusal))
        output.emit(Estimate(partitions=told))
        return 0
    width = max(map(len, starts))
    for name, start in soonest_first:
        print(f"{name:{width}}  {_words(start, now)}")
    if not any(start.when for start in starts.values()):
        name, first = next(iter(starts.items()))
        why = f"{name}: {first.refusal.removesuffix('.')}."
        if not any(start.answered for start in starts.values()):
            raise SchedulerError("Nobody tells when this job would start.", why=why, fix="Try again in a minute.")
        fix = "Request less, or another partition with --partition NAME."
        raise RefusedError("No partition would take this job now.", why=why, fix=fix)
    return 0


def _partitions(loaded: Loaded, site: Site) -> list[str]:
    """Partitions that were asked for on the command line or in the environment, else all that take jobs."""
    if not site.scheduler or site.unknown:
        why = f"{site.unknown or 'There is no SLURM on this machine'}."
        raise RefusedError("This machine cannot tell when a job would start.", why=why, fix="Do this on a login node.")
    asked = loaded.config.launch.partition
    if asked is not None and loaded.source("launch.partition").kind in ("flag", "override", "environment"):
        return asked.split(",")
    return [partition.name for partition in site.partitions if partition.up]


def _words(start: ExpectedStart, now: datetime) -> str:
    if start.when is None:
        return f"{'no' if start.answered else 'unknown'}: {start.refusal}"
    wait = terminal.age((start.when - now).total_seconds())
    return f"{start.when:%Y-%m-%d %H:%M}  in {wait}, on {start.nodes}"

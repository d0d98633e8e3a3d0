"""Submission: from a checked request to run folders and jobs."""

import json
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from trainkit.cluster.job_states import job_states
from trainkit.cluster.plan import Plan, Side
from trainkit.cluster.scheduler import JobState, QueueFullError, named
from trainkit.cluster.site import Site
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config, is_one_line
from trainkit.config.sweep import changed_resources
from trainkit.launch import notify, run_folders
from trainkit.launch.follow import full_name
from trainkit.launch.lab import is_lab
from trainkit.launch.planning import make_plan, sides
from trainkit.launch.preparation import Prepared, Request, by_names, record_data
from trainkit.launch.scripts import begins_anew
from trainkit.launch.validation import validate
from trainkit.run import labels
from trainkit.run.code_files import code_digest, present_code, project_of
from trainkit.run.find import next_path, runs_root
from trainkit.run.folder import PRUNING, SAMPLER, RunDir, sweep_of
from trainkit.run.history import history_of
from trainkit.run.run_manifest import fingerprint, same_runs
from trainkit.run.trash import empty_trash

RANK = "trainkit.worker:run_rank"
"""The function that each rank of a run calls with the run's folder. Versions agree on its name."""


class Planned(NamedTuple):
    """Launch of runs, planned and checked against the site."""

    plan: Plan
    script: str | None
    notes: Sequence[str]
    site: Site
    largest: int
    """Maximum tasks of one array."""


class KnownRun(NamedTuple):
    """A run with the same settings, code and data that was there before."""

    run: RunDir
    state: JobState
    is_finished: bool


class Started(NamedTuple):
    """All requested runs, those of them that are running now, and their executor."""

    runs: Sequence[RunDir]
    going_on: Sequence[RunDir]
    executor: str


def plan_runs(prepared: Prepared, site: Site | None = None) -> Planned:
    """Plan the launch of the prepared runs and check it against the site. Writes nothing.

    Args:
        site: as it has answered already; None: it is asked.
    """
    loadeds = prepared.loadeds
    folder = prepared.folder
    env = prepared.env
    cwd = Path.cwd()
    site = site or prepared.site
    points = len(loadeds)
    largest = points
    if points > 1 and site.scheduler:
        largest = named(site.scheduler).largest_array()
    plans = [make_plan(loaded, site, folder, points=min(points, largest)) for loaded in loadeds]
    plan = plans[0]
    scheduler = named(plan.executor)
    for other in plans:
        if (other.world_size, other.directives) != (plan.world_size, plan.directives):
            raise changed_resources()
    if not scheduler.batch:
        largest = points
        if prepared.request.array is not None and points > 1:
            fix = f"Join with this machine as one peer: {terminal.command('join', 'TOKEN')}, with --nproc for its GPUs."
            raise UserError(
                "--array is for SLURM.", why="On this machine the peers would run one after the other.", fix=fix
            )
    plan = by_names(plan, env)
    notes = validate(loadeds[0], plan, site, folder, cwd)
    notes += filter(None, [begins_anew(loadeds[0].config)])
    untold = notify.objection(env, reaches_internet=loadeds[0].config.launch.internet or not scheduler.batch)
    if untold:
        notes.append(untold)
    return Planned(plan, scheduler.script(plan, folder, cwd, min(points, largest)), notes, site, largest)


def submit(prepared: Prepared) -> Started:
    """Write and start the runs; report those that exist already."""
    request = prepared.request
    folder = prepared.folder
    configs = [run_folders.stored_config(loaded, Path.cwd()) for loaded in prepared.loadeds]
    marks = _fingerprints(request, configs)
    there: dict[str, KnownRun] = {}
    if not request.again and configs[0].launch.executor != "debug":
        there = runs_there(marks, is_lab=is_lab(configs[0]))
    known = []
    new = replace(prepared, loadeds=[], variants=[])  # of a sweep, only these are started
    new_configs = []
    new_marks = []
    for loaded, variant, config, mark in zip(prepared.loadeds, prepared.variants, configs, marks, strict=True):
        if mark in there:
            known.append(there[mark])
            continue
        new.loadeds.append(loaded)
        new.variants.append(variant)
        new_configs.append(config)
        new_marks.append(mark)
    if not new.loadeds:
        going_on = say_there(known)
        executor = next((item.state.executor for item in known if not item.is_finished), "")
        return Started([item.run for item in known], going_on, executor)
    planned = plan_runs(new, prepared.site)
    run_folders.require_executor(planned.plan, planned.site)
    is_debug = planned.plan.executor == "debug"
    if is_debug and len(new.loadeds) > 1:
        raise UserError("A sweep does not run with --executor debug.", why="debug is one run.", fix="Use local.")
    empty_trash(folder.parent)
    try:
        runs = _write(new, planned, new_configs, new_marks, known)
    except UserError:
        if request.run_dir is None and folder.exists():  # another submission took this number: take the next
            return submit(replace(prepared, folder=next_path(folder.parent, new.loadeds[0].name)))
        raise
    with run_folders.undone_on_error(folder, unless=is_debug):
        if new_configs[0].script is None:
            record_data(runs, new_configs)
        for run in runs:
            labels.say(run, tags=request.tags, notes=request.notes)
        arrays = Arrays(folder, new.loadeds[0], planned.site, Path.cwd(), prepared.env)
        _start_all(runs, planned, arrays)
    for note in planned.notes:
        terminal.warn(note)
    new_runs = iter(runs)
    asked_for = [there[mark].run if mark in there else next(new_runs) for mark in marks]
    return Started(asked_for, [*runs, *say_there(known)], planned.plan.executor)


def _fingerprints(request: Request, configs: Sequence[Config]) -> list[str]:
    """Identify each run by its configuration, code and data; a sampler makes the runs of its sweep others."""
    digest = code_digest(present_code(project_of(configs[0].script)))
    if request.sampler != "random":
        digest += json.dumps({"sampler": request.sampler, "sweep": list(request.sweep)})
    return [fingerprint(config, digest) for config in configs]


def _write(
    prepared: Prepared, planned: Planned, configs: Sequence[Config], marks: Sequence[str], known: Sequence[KnownRun]
) -> list[RunDir]:
    """Write the folders of new runs. Raises UserError if the folder is taken."""
    request = prepared.request
    folder = prepared.folder
    plan = planned.plan
    if len(configs) == 1:
        return [run_folders.write_run(folder, configs[0], plan, planned.script, request.command, marks[0])]
    runs = run_folders.write_sweep(folder, configs, plan, planned.script, request.command, prepared.variants, marks)
    if request.prune is not None:
        fileio.write(folder / PRUNING, json.dumps({"eta": request.prune}), folder)
    if request.sampler != "random":
        others = [str(item.run.path) for item in known]
        chosen = {"sampler": request.sampler, "sweep": list(request.sweep), "others": others}
        fileio.write(folder / SAMPLER, json.dumps(chosen), folder)
    return runs


def _start_all(runs: Sequence[RunDir], planned: Planned, arrays: "Arrays") -> None:
    """Start all runs: side by side on this machine, as one array, or as arrays that the queue may take bit by bit."""
    plan = planned.plan
    folder = arrays.sweep
    launch = arrays.loaded.config.launch
    at_once = len(sides(launch, plan, planned.site, len(runs)))
    if at_once > 1:
        list(arrays.queue(runs, len(runs)))
        beside = f"{at_once} of {len(runs)} runs side by side"
        terminal.say(f"Running locally: {beside}, through submitit's local execution.")
        say_commands(folder, folder / "0")
        return
    first = runs[: planned.largest]
    rest = runs[planned.largest :]
    why = ""
    if not rest:
        try:
            start(folder, first, plan, arrays.cwd, arrays.env)
            return
        except QueueFullError as full:
            if len(runs) == 1:
                raise
            why = full.why
    others = [(list(rest[at : at + planned.largest]), Side()) for at in range(0, len(rest), planned.largest)]
    arrays.queue_later([(folder, first), *map(arrays.write, others)], plan, why)
    say_commands(folder, folder / "0")


def new_folder(text: str) -> Path:
    """Check the name of a new folder, which goes into scripts and onto terminals. Raises UserError."""
    if not text.strip():
        raise UserError("The name of the folder is empty.", why="A shell variable may be unset.", fix="Give one.")
    if not is_one_line(text):
        what = f"{text!r} cannot be the name of a folder."
        raise UserError(what, why="It has a control character, such as a line break.", fix="Give another name.")
    return Path(text).expanduser()


def named_folder(name: str, env: Mapping[str, str]) -> Path:
    """Return the folder of a new run with this name. Raises UserError if the name is invalid or taken."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name) or name.isdecimal():
        why = "It is used as the name of a folder in runs/, and in commands."
        fix = "Use letters, digits, . + - and _, with a letter among them: --name vit-lr3."
        raise UserError(f"{name!r:.120} is not a valid name of a run.", why=why, fix=fix)
    path = runs_root(env) / name
    if os.path.lexists(path):
        fix = f"Give another --name; `{terminal.command('resume', name)}` continues that one."
        raise UserError(f"There is already a run {name}.", why=f"It is in {path}.", fix=fix)
    return path


def start(folder: Path, runs: Sequence[RunDir], plan: Plan, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Start written runs and say how. Returns their job ids; none for the debug executor."""
    why = {item.name: item.reason for item in plan.decisions}
    function = pkgutil.resolve_name(RANK)
    if plan.executor == "debug":
        terminal.say(f"{runs[0].name}: rank 0 of 1 in this process. {why.get('nodes', '')}".rstrip())
        run_folders.run_here(runs[0], plan, function, env)
        return []
    scheduler = named(plan.executor)
    job_ids = scheduler.submit(folder, runs, plan, function, cwd=cwd, env=env)
    ranks = f"{terminal.plural(plan.nodes, 'node')} x {terminal.plural(plan.ntasks_per_node, 'rank')}"
    if plan.spare_nodes:
        ranks += f", {terminal.plural(plan.spare_nodes, 'spare node')}"
    if not scheduler.batch:
        if plan.nodes > 1:
            ranks = f"simulating {ranks}"
        asked = why.get("executor") or "as asked"
        terminal.say(f"Running locally ({asked}): {ranks} on this machine through submitit's local execution.")
    elif len(job_ids) == 1:
        terminal.say(f"Submitted job {job_ids[0]}: {ranks}.")
    else:
        terminal.say(f"Submitted job {job_ids[0].partition('_')[0]} (array of {len(job_ids)}): {ranks}.")
    say_commands(folder, folder if len(job_ids) == 1 else folder / "0")
    return job_ids


# Sweeps


class Arrays(NamedTuple):
    """Further job arrays of a sweep: for runs beyond the first array, and for resumed ones."""

    sweep: Path
    loaded: Loaded
    site: Site
    cwd: Path
    env: Mapping[str, str]

    def plan(self, runs: Sequence[RunDir]) -> tuple[Path, Plan, str | None]:
        """Plan another array of these runs, or a single run: its folder, plan and script. Writes nothing."""
        folder = runs[0].path if len(runs) == 1 else run_folders.part_folder(self.sweep)
        plan = by_names(make_plan(self.loaded, self.site, folder, points=len(runs)), self.env)
        return folder, plan, named(plan.executor).script(plan, folder, self.cwd, len(runs))

    def queue(self, runs: Sequence[RunDir], largest: int) -> Iterator[tuple[str, list[RunDir]]]:
        """Queue an array, or as many as share this machine, and yield id and runs of each; several arrays of at most
        ``largest`` tasks as `queue_later` does."""
        found = sides(self.loaded.config.launch, self.plan(runs[:largest])[1], self.site, len(runs))
        if len(found) > 1:
            parts = [(list(runs[side.index :: side.count]), side) for side in found]
        else:
            parts = [(list(runs[at : at + largest]), found[0]) for at in range(0, len(runs), largest)]
        if len(parts) > len(found):
            plan = self.plan(parts[0][0])[1]
            if named(plan.executor).batch:
                self.queue_later(list(map(self.write, parts)), plan)
                return
        function = pkgutil.resolve_name(RANK)
        for at, (part, side) in enumerate(parts):
            folder, plan = self._written(part, side)
            try:
                job_ids = named(plan.executor).submit(folder, part, plan, function, cwd=self.cwd, env=self.env)
            except QueueFullError as full:
                self.queue_later([(folder, part), *map(self.write, parts[at + 1 :])], plan, full.why)
                return
            yield job_ids[0].partition("_")[0], part

    def write(self, part: tuple[list[RunDir], Side]) -> tuple[Path, list[RunDir]]:
        """Write the folder of another array, with everything that its job needs. Returns it with its runs."""
        runs, side = part
        return self._written(runs, side)[0], runs

    def _written(self, part: Sequence[RunDir], side: Side) -> tuple[Path, Plan]:
        folder, plan, script = self.plan(part)
        plan = replace(plan, side=side)
        run_folders.require_executor(plan, self.site)
        if len(part) > 1:
            run_folders.link_runs(folder, part)
        run_folders.write_launch(folder, plan, script)
        return folder, plan

    def queue_later(self, arrays: Sequence[tuple[Path, Sequence[RunDir]]], plan: Plan, why: str = "") -> None:
        """Queue as much of these arrays as the queue takes now, and a job that queues the rest. It comes first, so that
        the arrays leave a place for it. ``why``: the queue has refused all of them.

        Raises SchedulerError where it takes not even that.
        """
        function = pkgutil.resolve_name(RANK)
        scheduler = named(plan.executor)
        feeder = scheduler.submit_later(arrays, plan, function, cwd=self.cwd, env=self.env, why=why.rstrip("."))
        runs = list(chain.from_iterable(part for _, part in arrays))
        waiting = 0
        for run in runs:
            newest = history_of(run).submission
            waiting += newest is not None and bool(newest.waits)
        terminal.say(f"Submitted {len(runs) - waiting} of {len(runs)} runs. {why}".rstrip())
        if feeder:
            terminal.say(f"Job {feeder} submits the other {waiting} as those end; nothing has to run here.")


# Runs with the same settings, code and data that are there already: they are named, and not trained again


_MOST_SAID = 3
"""Failed earlier runs of a sweep to name."""


def say_commands(folder: Path, run: Path) -> None:
    """Say the folder of a run or sweep, and the commands to watch and cancel it."""
    terminal.say(f"  run folder  {folder}")
    terminal.say(f"  watch       {terminal.command('logs', run, '-f')}")
    terminal.say(f"  state       {terminal.command('status', folder)}")
    terminal.say(f"  cancel      {terminal.command('cancel', folder)}")


def runs_there(fingerprints: Sequence[str], *, is_lab: bool = False) -> dict[str, KnownRun]:
    """Map fingerprints to the runs that train or have finished already. Warns of those that have failed.

    Of labs only those that run count: one that is over has nothing to show.
    """
    same = same_runs(fingerprints)
    known = _known(list(chain.from_iterable(same.values())))
    found: dict[str, KnownRun] = {}
    failed: list[KnownRun] = []
    for mark, runs in same.items():
        unknown = None
        for run in runs:
            item = known[run]
            if (item.is_finished and not is_lab) or item.state.alive == "yes":
                found[mark] = item
            elif item.state.alive == "unknown":
                unknown = item
        if mark in found:
            continue
        if unknown is not None:
            what = f"{full_name(unknown.run)} is the same run, and it is unknown whether it is still running."
            fix = f"`{terminal.command('status', unknown.run.path)}` asks again; add --again to train it once more."
            raise RefusedError(what, why=unknown.state.reason or "Its scheduler does not answer.", fix=fix)
        if not is_lab:
            failed.append(known[runs[-1]])
    _say_failed(failed)
    return found


def _known(runs: Sequence[RunDir]) -> dict[RunDir, KnownRun]:
    """Look up the states of runs; the scheduler is asked only for jobs whose end is not recorded."""
    found = {}
    asked = []
    for run in runs:
        past = history_of(run)
        state = JobState("COMPLETED" if past.finished else past.outcome or "FAILED")
        found[run] = KnownRun(run, state, past.finished)
        if not past.finished and (past.cut_short or (past.submission and past.submission.ended is None)):
            asked.append(run)
    if asked:
        for run, state in zip(asked, job_states(asked), strict=True):
            found[run] = KnownRun(run, state, False)
    return found


def _say_failed(runs: Sequence[KnownRun]) -> None:
    """Say that the same command starts new runs, and what the failed ones are still good for."""
    for run, state, _ in runs[:_MOST_SAID]:
        ended = "was cancelled" if state.state == "CANCELLED" else f"has ended ({state.state})"
        why = f"`{terminal.command('why', run.path)}` says why"
        resume = f"`{terminal.command('resume', run.path)}` continues it"
        terminal.warn(
            f"{full_name(run)} is the same run, and it {ended}: {why}, {resume}. This one starts from the beginning."
        )
    if len(runs) > _MOST_SAID:
        terminal.warn(f"So do {len(runs) - _MOST_SAID} more.")


def say_there(known: Sequence[KnownRun]) -> list[RunDir]:
    """Describe runs that need not be started; returns those that are still running."""
    if not known:
        return []
    from trainkit.report.end_lines import summary_lines

    is_one = len(known) == 1
    for run, state, is_finished in known:
        if is_finished:
            terminal.say(f"{full_name(run)} is up to date: it has finished with this configuration, code and data.")
            lines = summary_lines(run)
            if not is_one:
                lines = [f"  {lines[-1]}  {run.path}"]
            terminal.say("\n".join(lines))
        else:
            terminal.say(f"{full_name(run)} is the same run, and it is {state.state} (job {state.job_id}).")
            if is_one:
                say_commands(run.path, run.path)
    if not is_one:
        places = dict.fromkeys(sweep_of(item.run) or item.run.path for item in known)
        terminal.say(f"  results     {terminal.command('report', *places)}")
    terminal.say("Add --again, or give --run-dir or --job-name, to train it once more.")
    return [item.run for item in known if not item.is_finished]

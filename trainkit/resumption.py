"""Queue runs again, so that they go on from their newest checkpoints: what `resume` does, in notebooks too."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.bench.base import refuse_bench
from trainkit.config import loading, yaml
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.data import check_data
from trainkit.errors import RefusedError, UserError
from trainkit.finish import full_name
from trainkit.launch import submission
from trainkit.launch.batch_job import excluded_nodes
from trainkit.launch.plan import Plan, validate
from trainkit.prolongation import Change, prolongation
from trainkit.report.facts import points_of
from trainkit.run.events import Holder, RunHistory, history_of, lease_on
from trainkit.run.folder import RunDir, remember, runs_root
from trainkit.run.ownership import require_own_code, vouch, why_others_may_write
from trainkit.run.snapshot import restore_code
from trainkit.schedulers.base import JobState, job_states, named, require_no_job
from trainkit.site.profile import discover
from trainkit.start import Arrays, Started, start

Flags = Mapping[str, tuple[Any, str]]
"""Launch setting -> (value, flag), see `trainkit.start.launch_settings`."""
Preview = Callable[[Plan, Loaded, Path, "str | None"], None]
NO_CHANGE = Change()
_MOST_NAMED = 5


def is_by_hand(run: RunDir) -> bool:
    """Whether the run was started in a terminal, by `swarm create` or `join`."""
    submission = history_of(run).submission
    return submission is not None and submission.executor == "swarm"


def resume(
    runs: Sequence[RunDir],
    flags: Flags,
    env: Mapping[str, str],
    *,
    force: bool = False,
    allow_code: bool = False,
    preview: Preview | None = None,
    change: Change = NO_CHANGE,
) -> Started:
    """Queue a run, or the failed runs of a sweep, again. For a finished run, upload what `checkpoint.remote` lacks.

    Args:
        change: other settings to go on with, by which finished runs train on, and all runs of a sweep.
        preview: called with the plan for a dry run: nothing is written or queued.
    """
    run, total = runs[0], len(runs)
    refuse_bench(run.path)
    is_sweep = total > 1
    is_pruned = not is_sweep and history_of(run).pruned
    if not (is_sweep or change or is_pruned) and history_of(run).finished and preview is None:
        loaded = _load(run, flags)
        if url := loaded.config.checkpoint.remote:
            from trainkit.checkpoint.remote import send_rest

            require_own_code(run.path, loaded, allow_code=allow_code)
            print(f"{run.name} has finished, and all that it keeps in {send_rest(run, url)} is there.")
            return Started([run], [], "")
    if is_sweep:
        runs = sorted(runs, key=lambda run: (len(run.path.name), run.path.name))
        runs = _all_at_rest(runs, change) if change else _lost(runs, force=force)
    else:
        if not change and not is_pruned:
            refuse_finished(run)
        require_no_job(run, force=force)
    lives, states = {run: history_of(run) for run in runs}, dict(zip(runs, job_states(runs), strict=True))
    goings_on = [prolongation(run, change, partial(_load, run, flags)) for run in runs] if change or is_pruned else []
    loadeds = [item.loaded for item in goings_on] or [_load(run, flags) for run in runs]
    found = [
        require_own_code(run.path, loaded, allow_code=allow_code, starts_snapshot=True)
        for run, loaded in zip(runs, loadeds, strict=True)
    ]
    _say_diverged(states)
    print("".join(f"{item.told}\n" for item in goings_on if item.told), end="", flush=True)
    if not is_sweep and (left_out := excluded_nodes(run)):
        nodes = ", ".join(f"{node} ({why})" for node, why in left_out.items())
        print(f"The run did without {terminal.one_line(nodes, 1000)}; now it may start there again, unless given")
        print(f"  --exclude {terminal.one_line(','.join(left_out), 1000)}", flush=True)
    for loaded in loadeds:
        if ":" not in loaded.config.data.name:  # else its module is in the run's snapshot
            check_data(loaded.config.data)
    site, cwd = discover(env), first_folder(runs[0])
    largest = named(site.scheduler).largest_array() if is_sweep and site.scheduler else len(runs)
    arrays = Arrays(run.path.parent, loadeds[0], site, cwd, env)
    folder, plan, script = arrays.plan(runs[:largest])
    validate(loadeds[0], plan, site, folder, cwd)
    if preview is not None:
        preview(plan, loadeds[0], folder, script)
        return Started([], [], "")
    submission.require_executor(plan, site)
    with ExitStack() as held:
        for index, (one, loaded, code) in enumerate(zip(runs, loadeds, found, strict=True)):
            # The lease makes simultaneous resumes take turns; the second then finds the job of the first.
            held.enter_context(lease_on(one, Holder.me(), is_dead=_of_ended_job(lives[one], states[one])))
            if history_of(one).submission != lives[one].submission:
                require_no_job(one, force=force)
                if change:  # what was said of it above may be wrong by now
                    why = "Another command has queued it meanwhile, and its job has ended already."
                    raise UserError(f"{one.name} is not what it was.", why=why, fix="Give the same command again.")
            restore_code(one, code.content)
            with goings_on[index].recorded() if goings_on else nullcontext():
                _store(one, loaded.config, own=code.own)
        if is_sweep:
            for array, part in arrays.queue(runs, largest):
                names = ", ".join(run.path.name for run in part[:20]) + (", ..." if len(part) > 20 else "")
                print(f"Submitted job {array} for {len(part)} of {total} runs: {names}", flush=True)
        else:
            submission.write_launch(folder, plan, script)
            if plan.executor == "debug":  # this process becomes the run's writer
                held.close()
            start(folder, runs, plan, cwd, env)
    return Started(runs, runs, plan.executor)


def _lost(runs: Sequence[RunDir], *, force: bool) -> list[RunDir]:
    """The runs of a sweep that failed or were never queued. Raises UserError if there are none."""
    states = dict(zip(runs, job_states(runs), strict=True))
    over = ("no", "unknown") if force else ("no",)
    if lost := [run for run, state in states.items() if state.alive in over and not history_of(run).finished]:
        return lost
    for run, state in states.items():
        if state.alive == "unknown":
            require_no_job(run, force=False)
    told = ", ".join(sorted({state.state for state in states.values()}))
    why = "Only what has failed, or was stopped, needs that."
    fix = f"`{terminal.command('status', runs[0].path.parent)}` shows them."
    raise UserError(f"Nothing of this sweep is to be queued again: its {len(runs)} runs are {told}.", why=why, fix=fix)


def _all_at_rest(runs: Sequence[RunDir], change: Change) -> Sequence[RunDir]:
    """All runs of a sweep. Raises UserError if one may run, or if the sweep is about what is to change."""
    asked = {text.partition("=")[0] for text in change.overrides}
    varied = {key for point in points_of(runs[0].path.parent).values() for key in point}
    if both := sorted(asked & varied):
        why = "Its runs differ in that, and would all be alike."
        fix = f"Resume one of them: `{terminal.command('resume', runs[0].path, *change.overrides)}`."
        raise UserError(f"{both[0]} is what the sweep varies.", why=why, fix=fix, key=both[0])
    if living := [run for run, state in zip(runs, job_states(runs), strict=True) if state.alive != "no"]:
        why = f"{', '.join(full_name(run) for run in living[:_MOST_NAMED])} may run still."
        fix = f"Wait for them, or `{terminal.command('cancel', runs[0].path.parent)}` first."
        raise UserError(f"{len(living)} of {len(runs)} runs have not ended.", why=why, fix=fix)
    return runs


def fetched(url: str, env: Mapping[str, str], *, allow_code: bool) -> RunDir:
    """Download a run from its remote copy. Raises RefusedError unless its code may be run."""
    if not allow_code:
        why = "Whoever can write there decides what that program does here, with your rights."
        fix = "If only you, or people you trust, can write there, give the same command with --allow-code."
        raise RefusedError(f"{url} brings the program that it runs.", why=why, fix=fix)
    from trainkit.checkpoint.remote import fetch_run

    run = fetch_run(url, runs_root(env))
    remember(run.path)  # now it is found by its name
    print(f"Fetched {url} to {run.path}.", flush=True)
    return run


def _load(run: RunDir, flags: Flags, overrides: Sequence[str] = ()) -> Loaded:
    """Load the run's configuration with the new flags and settings.

    It is complete: neither the environment's SBATCH_* nor the site's profile are read again.
    """
    # The job that the first submission waited for is over.
    flags = {"launch.dependency": (None, "a resumed run waits for nothing"), **flags}
    moved_to = flags.get("launch.cluster", (None, ""))[0]
    loaded = loading.load(str(run.config), overrides, flags=flags, moved_to=moved_to)
    return replace(loaded, config=submission.stored_config(loaded, Path.cwd()))


def _say_diverged(states: Mapping[RunDir, JobState]) -> None:
    """Warn that runs which diverged may do so again with the same settings."""
    from trainkit.diagnosis.causes import cause_of

    causes = {run: cause_of(run, state) for run, state in states.items()}
    if diverged := {run: cause for run, cause in causes.items() if cause is not None and cause.name == "nonfinite"}:
        names = ", ".join(map(full_name, list(diverged)[:20])) + (", ..." if len(diverged) > 20 else "")
        advice = next(iter(diverged.values())).advice
        print(f"{names} diverged, and may do so again with the same settings. {advice}", file=sys.stderr)


def refuse_finished(run: RunDir) -> None:
    """Raise UserError if there is nothing left to train."""
    if not history_of(run).finished:
        return
    if isinstance(early := fileio.read_object(run.summary).get("stopped_early"), str):
        again = terminal.command("resume", run.path, "train.early_stopping_patience=null")
        fix = f"`{again}` goes on to the end."
        raise UserError(f"{run.name} has stopped early.", why=f"{terminal.one_line(early)}.", fix=fix)
    longer, anew = (terminal.command(verb, run.path) for verb in ("resume", "submit"))
    fix = f"`{longer} train.epochs=N` trains it longer; `{anew} train.epochs=N` starts a new run with its settings."
    raise UserError(f"{run.name} has finished.", why="There is nothing left to train.", fix=fix)


def _of_ended_job(life: RunHistory, state: JobState) -> Callable[[Holder], bool]:
    """Whether a lease's holder belongs to a job that the scheduler reports as ended."""
    ended = {item.job_id for item in life.submissions if item.job_id} if state.alive == "no" else set()
    return lambda other: other.job_id in ended


def first_folder(run: RunDir) -> Path:
    """The folder of the first submission, which relative paths refer to; if it is gone, the current one.

    A job also imports modules from there. If others may write the record of that folder and the folder itself, the
    current one is used.
    """
    text = fileio.read_object(run.manifest).get("cwd")
    folder = Path(text) if isinstance(text, str) and os.path.isdir(text) else Path.cwd()
    mine = (os.geteuid(), 0)
    if why_others_may_write(run.manifest, owners=mine) and why_others_may_write(folder, owners=mine):
        return Path.cwd()
    return folder


def _store(run: RunDir, config: Config, *, own: bool) -> None:
    """Write the configuration that the run is resumed with.

    The run's own, possibly older code reads it: keys that the stored file does not have are left out, except launch
    settings that differ from their defaults. (`prolongation` has refused others that it would need.)
    """
    if own:
        vouch(run, config)
    stored, _ = yaml.read(run.config, follow=False)
    default = type(config.launch)().model_dump(mode="json")
    tree = config.model_dump(mode="json", include=set(stored))
    for name, section in tree.items():
        old = stored[name]
        if isinstance(section, dict) and isinstance(old, dict):
            tree[name] = {
                key: value
                for key, value in section.items()
                if key in old or (name == "launch" and value != default.get(key))
            }
    fileio.write(run.config, yaml.dump(tree), run.path)

"""Queue runs again, so that they go on from their newest checkpoints: what `resume` does, in notebooks too."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from trainkit.cluster.job_states import job_states, require_no_job
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import JobState, built_in, named
from trainkit.cluster.survey import discover
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.config import loading, yaml
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.data.registry import check_data
from trainkit.launch import run_folders
from trainkit.launch.follow import full_name
from trainkit.launch.preparation import check_all_data
from trainkit.launch.prolong import (
    Change,
    Prolongation,
    changed_settings,
    prolongation,
    settings_are_of_all,
    to_the_end,
)
from trainkit.launch.scripts import refuse_script
from trainkit.launch.submission import Arrays, Started, start
from trainkit.launch.validation import validate
from trainkit.recovery.retries import excluded_nodes
from trainkit.report.sweep_points import points_of
from trainkit.run.code_files import project_of
from trainkit.run.events import refused
from trainkit.run.find import runs_root
from trainkit.run.folder import RunDir, refuse_bench
from trainkit.run.history import RunHistory, history_of
from trainkit.run.ownership import ImportableCode, require_own_code, vouch, why_others_may_write
from trainkit.run.run_lease import Holder, lease_on
from trainkit.run.snapshot import has_code, restore_code, take_code
from trainkit.run.user_lists import remember

Flags = Mapping[str, tuple[Any, str]]
"""Launch setting -> (value, flag), see `trainkit.launch.preparation.launch_settings`."""
Preview = Callable[[Plan, Loaded, Path, "str | None"], None]
NO_CHANGE = Change()
_MOST_NAMED = 20


class _Resumed(NamedTuple):
    """A run that is to be queued again, as it stands."""

    run: RunDir
    history: RunHistory
    state: JobState
    loaded: Loaded
    code: ImportableCode
    prolongation: Prolongation | None
    """None for a run that goes on with the settings that it has."""


def is_by_hand(run: RunDir) -> bool:
    """Return True for a run that was started in a terminal, by `swarm create` or `join`."""
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
    first = runs[0]
    total = len(runs)
    is_sweep = total > 1
    refuse_bench(first.path)
    is_pruned = not is_sweep and history_of(first).pruned
    if not is_sweep and not change and not is_pruned:
        if preview is None and _send_rest(first, flags, allow_code=allow_code):
            return Started([first], [], "")
        refuse_finished(first)
    if not is_sweep:
        require_no_job(first, force=force)
    elif change:
        runs = _all_at_rest(runs, change)
    else:
        runs = _lost(runs, force=force)
    histories = [history_of(run) for run in runs]  # before the states: a job that comes later is noticed below
    resumed = []
    for run, history, state in zip(runs, histories, job_states(runs), strict=True):
        prolonged = None
        loaded = _load(run, flags)
        if loaded.config.script is not None:
            _refuse_of_script(loaded, change)
            loaded = _load(run, flags, change.overrides)
        elif change or is_pruned:
            prolonged = prolongation(run, change, partial(_load, run, flags))
            loaded = prolonged.loaded
        code = require_own_code(run.path, loaded, allow_code=allow_code, starts_snapshot=has_code(run))
        resumed.append(_Resumed(run, history, state, loaded, code, prolonged))
    _say_what_changes(resumed)
    _look([item.loaded for item in resumed])
    site = discover(env)
    cwd = first_folder(runs[0])
    loaded = resumed[0].loaded
    largest = len(runs)
    if is_sweep and site.scheduler:
        largest = named(site.scheduler).largest_array()
    arrays = Arrays(first.path.parent, loaded, site, cwd, env)
    folder, plan, script = arrays.plan(runs[:largest])
    for item in resumed:
        _require_scheduler_of(item.run, item.history, plan, loaded)
    for note in validate(loaded, plan, site, folder, cwd):
        terminal.warn(note)
    if preview is not None:
        preview(plan, loaded, folder, script)
        return Started([], [], "")
    run_folders.require_executor(plan, site)
    with ExitStack() as held:
        for item in resumed:
            held.enter_context(_lease_on(item, force=force))
        for run, _, _, loaded, code, _ in resumed:
            if has_code(run):
                restore_code(run, code.content)
            else:
                take_code(run, loaded.config.plugin_names(), first_folder(run), project_of(loaded.config.script))
        held.enter_context(_as_before_without_job(resumed))
        for item in resumed:
            with item.prolongation.recorded() if item.prolongation is not None else nullcontext():
                _store(item.run, item.loaded.config, own=item.code.own)
        if is_sweep:
            for array, part in arrays.queue(runs, largest):
                names = _names([run.path.name for run in part])
                terminal.say(f"Submitted job {array} for {len(part)} of {total} runs: {names}")
        else:
            run_folders.write_launch(folder, plan, script)
            if plan.executor == "debug":  # this process becomes the run's writer
                held.close()
            start(folder, runs, plan, cwd, env)
    return Started(runs, runs, plan.executor)


def _refuse_of_script(loaded: Loaded, change: Change) -> None:
    """Refuse to prolong a script, whose length only the script knows; what it is launched with may change."""
    for text in change.overrides:
        if not text.startswith("launch."):
            refuse_script(loaded.config, f"resume with {text}")
    if change.schedule is not None:
        refuse_script(loaded.config, f"--{change.schedule}-schedule")


def _send_rest(run: RunDir, flags: Flags, *, allow_code: bool) -> bool:
    """Upload what the copy of a finished run lacks; False if it has not finished, or has no copy."""
    if not history_of(run).finished:
        return False
    loaded = _load(run, flags)
    url = loaded.config.checkpoint.remote
    if not url:
        return False
    from trainkit.checkpoint.uploads import send_rest

    require_own_code(run.path, loaded, allow_code=allow_code)
    terminal.say(f"{run.name} has finished, and everything for {send_rest(run, url)} is there.")
    return True


def _say_what_changes(resumed: Sequence[_Resumed]) -> None:
    """Say what is different from now on: settings, code, nodes."""
    for item in resumed:
        if item.prolongation is not None and item.prolongation.told:
            terminal.say(item.prolongation.told)
    without = [full_name(item.run) for item in resumed if not has_code(item.run)]
    if without:
        terminal.say(f"{_names(without)} has no copy of its code, as `train` makes none: it goes on with the")
        terminal.say("  code that is here now, and keeps a copy of that.")
    left_out = excluded_nodes(resumed[0].run)
    if len(resumed) == 1 and left_out:
        nodes = ", ".join(f"{node} ({why})" for node, why in left_out.items())
        terminal.say(
            f"The run did without {terminal.one_line(nodes, 1000)}; now it may start there again, unless given"
        )
        terminal.say(f"  --exclude {terminal.one_line(','.join(left_out), 1000)}")


def _names(names: Sequence[str]) -> str:
    """List the first of many names."""
    return ", ".join(names) if len(names) <= _MOST_NAMED else ", ".join([*names[:_MOST_NAMED], "..."])


def _look(loadeds: Sequence[Loaded]) -> None:
    """Check the data; a module of the user's own is in the run's snapshot."""
    here = [item for item in loadeds if ":" not in item.config.data.name and item.config.script is None]
    for loaded in here:
        check_data(loaded.config.data)
    check_all_data(here)


@contextmanager
def _lease_on(item: _Resumed, *, force: bool) -> Iterator[None]:
    """Hold the lease on a run, by which simultaneous resumes take turns; the second then finds the job of the first."""
    run, history, state, *_ = item
    ended = set()
    if state.alive == "no":
        ended = {submission.job_id for submission in history.submissions if submission.job_id}
    with lease_on(run, Holder.me(), is_dead=lambda other: other.job_id in ended):
        if history_of(run).submission != history.submission:
            require_no_job(run, force=force)
            if item.prolongation is not None:  # what was said of it above may be wrong by now
                why = "Another command has queued it in the meantime, and its job has already ended."
                raise UserError(f"{run.name} has changed in the meantime.", why=why, fix="Repeat the command.")
        yield


@contextmanager
def _as_before_without_job(resumed: Sequence[_Resumed]) -> Iterator[None]:
    """Give the runs back what they said of themselves, if the body fails before there is a job for them."""
    before: dict[Path, bytes | None] = {}
    for item in resumed:
        for file in _own_files(item.run):
            before[file] = fileio.read_bytes(file) if file.is_file() else None
    try:
        yield
    except BaseException as error:
        for run, history, *_, prolonged in resumed:
            now = history_of(run)
            if now.cut_short or now.submission != history.submission:
                continue  # it has a job, or may have
            if prolonged is not None:  # it was recorded that it trains on
                refused(run, str(error))
            for file in _own_files(run):
                content = before[file]
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    fileio.write(file, content, run.path)
        raise


def _own_files(run: RunDir) -> list[Path]:
    return [run.config, run.manifest, run.summary, run.plan, run.script]


def _require_scheduler_of(run: RunDir, history: RunHistory, plan: Plan, loaded: Loaded) -> None:
    """Refuse to train here, on what may be a login node, what was a job of a queue, unless that is asked for."""
    if named(plan.executor).batch or loaded.source("launch.executor").kind in ("flag", "override"):
        return
    scheduler = built_in(history.submission.executor) if history.submission is not None else None
    if scheduler is not None and scheduler.batch:
        title = scheduler.title
        what = f"{full_name(run)} was a job of {title}, and there is none on this machine."
        fix = f"Load {title}'s programs (often `module load slurm`), or add --executor local to continue here."
        raise RefusedError(what, why="The run would train here.", fix=fix, key="launch.executor")


def _lost(runs: Sequence[RunDir], *, force: bool) -> list[RunDir]:
    """The runs of a sweep that failed or were never queued. Raises UserError if there are none."""
    states = dict(zip(runs, job_states(runs), strict=True))
    over = ("no", "unknown") if force else ("no",)
    lost = [run for run, state in states.items() if state.alive in over and not history_of(run).finished]
    if lost:
        return lost
    for run, state in states.items():
        if state.alive == "unknown":
            require_no_job(run, force=False)
    told = ", ".join(sorted({state.state for state in states.values()}))
    fix = f"`{terminal.command('status', runs[0].path.parent)}` shows them."
    raise UserError("No run of this sweep needs to be queued again.", why=f"Its {len(runs)} runs are {told}.", fix=fix)


def _all_at_rest(runs: Sequence[RunDir], change: Change) -> Sequence[RunDir]:
    """All runs of a sweep. Raises UserError if one may run, or if the sweep is about what is to change."""
    asked = {text.partition("=")[0] for text in change.overrides}
    varied = set().union(*points_of(runs[0].path.parent).values())
    for key in sorted(asked & varied):
        why = "Its runs differ in this setting, and would all become the same."
        fix = f"Resume one of them: `{terminal.command('resume', runs[0].path, *change.overrides)}`."
        raise UserError(f"{key} is varied by the sweep.", why=why, fix=fix, key=key)
    living = [run for run, state in zip(runs, job_states(runs), strict=True) if state.alive != "no"]
    if living:
        why = f"{_names([full_name(run) for run in living])} may still be running."
        fix = f"Wait for them, or `{terminal.command('cancel', runs[0].path.parent)}` first."
        raise UserError(f"{len(living)} of {len(runs)} runs have not ended.", why=why, fix=fix)
    return runs


def fetched(
    url: str, flags: Flags, env: Mapping[str, str], *, allow_code: bool, change: Change, preview: Preview | None = None
) -> RunDir | None:
    """Download a run from its remote copy. Raises RefusedError unless its code may be run.

    What its records show that `resume` would refuse is refused before the checkpoints are fetched, and nothing is kept.

    Args:
        preview: called with the plan for a dry run, as far as the records tell; then nothing is kept, and it is None.
    """
    if not allow_code:
        why = "Anybody who can write there decides what this program does here, with your rights."
        fix = "If only you, or people you trust, can write there, repeat the command with --allow-code."
        raise RefusedError(f"{url} brings the program that it runs.", why=why, fix=fix)
    from trainkit.checkpoint.remote import fetch_run

    check = partial(_require_possible, flags=flags, env=env, change=change, preview=preview)
    if preview is not None:
        with TemporaryDirectory(prefix="trainkit-") as folder:
            fetch_run(url, Path(folder), check=check, records_only=True)
        return None
    run = fetch_run(url, runs_root(env), check=check)
    remember(run.path)  # now it is found by its name
    terminal.say(f"Fetched {url} to {run.path}.")
    return run


def _require_possible(
    run: RunDir, flags: Flags, env: Mapping[str, str], change: Change, preview: Preview | None
) -> None:
    """Refuse to go on with a run where its records are enough to tell: settings, data, machine."""
    if is_by_hand(run):
        if change:
            raise settings_are_of_all(run)
        return
    loaded = _load(run, flags, change.overrides)
    try:
        changed_settings(run, _load(run, flags).config, loaded)
    except UserError as error:  # its advice names the folder of the run, which will not be here
        fix = "Omit it; once the run is here, `submit` starts a new one with other settings."
        raise UserError(error.what, why=error.why, fix=fix, key=error.key) from None
    _look([loaded])
    site = discover(env)
    root = runs_root(env)
    _, plan, script = Arrays(root, loaded, site, first_folder(run), env).plan([RunDir(root / run.name)])
    _require_scheduler_of(run, history_of(run), plan, loaded)
    run_folders.require_executor(plan, site)
    if preview is not None:
        preview(plan, loaded, root / run.name, script)


def _load(run: RunDir, flags: Flags, overrides: Sequence[str] = ()) -> Loaded:
    """Load the run's configuration with the new flags and settings.

    It is complete: neither the environment's SBATCH_* nor the site's profile are read again.
    """
    # The job that the first submission waited for is over.
    flags = {"launch.dependency": (None, "a resumed run waits for no other job"), **flags}
    moved_to = flags.get("launch.cluster", (None, ""))[0]
    loaded = loading.load(str(run.config), overrides, flags=flags, moved_to=moved_to)
    # What the run was started with counts from its folder: `train` stores a path as it was given.
    where = Path.cwd() if loaded.source("data.root").kind == "override" else first_folder(run)
    return replace(loaded, config=run_folders.stored_config(loaded, where))


def refuse_finished(run: RunDir) -> None:
    """Raise UserError if there is nothing left to train."""
    if not history_of(run).finished:
        return
    early = fileio.read_object(run.summary).get("stopped_early")
    if isinstance(early, str):
        again = terminal.command("resume", run.path, *to_the_end(_load(run, {}).config))
        fix = f"`{again}` continues to the end."
        raise UserError(f"{run.name} has stopped early.", why=f"{terminal.one_line(early)}.", fix=fix)
    if _load(run, {}).config.script is not None:
        fix = f"`{terminal.command('submit', run.path, '--again')}` runs it once more."
        raise UserError(f"{run.name} has finished.", why="Its script has ended without an error.", fix=fix)
    fix = f"`{terminal.command('resume', run.path)} train.epochs=N` trains it longer; "
    fix += f"`{terminal.command('submit', run.path)} train.epochs=N` starts a new run with its settings."
    raise UserError(f"{run.name} has finished.", why="There is nothing left to train.", fix=fix)


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
        if not isinstance(section, dict) or not isinstance(old, dict):
            continue
        for key, value in list(section.items()):
            is_needed = name == "launch" and value != default.get(key)
            if key not in old and not is_needed:
                del section[key]
    fileio.write(run.config, yaml.dump(tree), run.path)

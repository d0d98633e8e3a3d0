"""Queue a run again, so that it goes on from its newest checkpoint: what `resume` does, in notebooks too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.bench.request import refuse_bench
from trainkit.config import loading, yaml
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.data import check_data
from trainkit.errors import RefusedError, UserError
from trainkit.finish import full_name
from trainkit.launch import submission
from trainkit.launch.plan import Plan, make_plan, validate
from trainkit.launch.restarts import excluded_nodes
from trainkit.run import folder as run_folder
from trainkit.run.events import RunHistory, history_of
from trainkit.run.folder import RunDir, runs_root
from trainkit.run.lease import Holder, lease_on
from trainkit.run.ownership import require_own_code, vouch, why_others_may_write
from trainkit.run.snapshot import restore_code
from trainkit.schedulers.base import JobState, named
from trainkit.schedulers.states import job_state, job_states, require_no_job
from trainkit.site.profile import discover
from trainkit.start import Further, Started, by_names, start

Preview = Callable[[Plan, Loaded, Path, "str | None"], None]


@dataclass(frozen=True)
class Asked:
    """How somebody wants runs to go on."""

    flags: Mapping[str, tuple[Any, str]]
    """Launch settings by their keys, each with the flag that gave it (`trainkit.start.launch_settings`)."""
    force: bool = False
    allow_code: bool = False
    preview: Preview | None = None
    """Gets the plan; then nothing is written or queued."""

    def shown(self, plan: Plan, loaded: Loaded, folder: Path, script: str | None) -> Started:
        assert self.preview is not None
        self.preview(plan, loaded, folder, script)
        return Started([], [], "")


def is_by_hand(run: RunDir) -> bool:
    """Whether a person has started it in a terminal, by `swarm create` or `join`."""
    submission = history_of(run).submission
    return submission is not None and submission.executor == "swarm"


def resume(runs: Sequence[RunDir], asked: Asked, env: Mapping[str, str]) -> Started:
    """Queue a run again, or of a sweep what has failed; of a finished one send what is not elsewhere yet."""
    if len(runs) > 1:
        return _resume_sweep(runs, asked, env)
    run = runs[0]
    if (
        history_of(run).finished
        and asked.preview is None
        and (url := (loaded := _load(run, asked)).config.checkpoint.remote)
    ):
        require_own_code(run.path, loaded, allow_code=asked.allow_code)
        _send(run, url)
        return Started([run], [], "")
    refuse_finished(run)
    require_no_job(run, force=asked.force)
    before = history_of(run).submission
    # One at a time: of two that come together, the second finds the job of the first.
    with (
        nullcontext()
        if asked.preview is not None
        else lease_on(run, Holder.me(), is_dead=_of_ended_job(history_of(run), job_state(run)))
    ):
        if history_of(run).submission != before:
            require_no_job(run, force=asked.force)
        loaded = _load(run, asked)
        found = require_own_code(run.path, loaded, allow_code=asked.allow_code, starts_snapshot=True)
        _say_diverged([run], [job_state(run)])
        if left_out := excluded_nodes(run):
            nodes = ", ".join(f"{node} ({why})" for node, why in left_out.items())
            print(f"The run did without {terminal.one_line(nodes, 1000)}; now it may start there again, unless given")
            print(f"  --exclude {terminal.one_line(','.join(left_out), 1000)}", flush=True)
        _check_data(loaded)
        site, cwd = discover(env), first_folder(run)
        plan = by_names(make_plan(loaded, site, run.path), env)
        validate(loaded, plan, site, run.path, cwd)
        script = named(plan.executor).script(plan, run.path, cwd)
        if asked.preview is not None:
            return asked.shown(plan, loaded, run.path, script)
        submission.require_executor(plan, site)
        restore_code(run, found.content)
        submission.write_launch(run.path, plan, script)
        _store(run, loaded.config, own=found.own)
        if plan.executor != "debug":
            start(run.path, [run], plan, cwd, env)
    if plan.executor == "debug":  # this very process becomes the run's writer
        start(run.path, [run], plan, cwd, env)
    return Started([run], [run], plan.executor)


def fetched(url: str, env: Mapping[str, str], *, allow_code: bool) -> RunDir:
    """The run whose copy is elsewhere, with a folder here; what it would run is somebody's code."""
    if not allow_code:
        raise RefusedError(
            f"{url} brings the program that it runs.",
            why="Whoever can write there decides what that program does here, with your rights.",
            fix="If only you, or people you trust, can write there, give the same command with --allow-code.",
        )
    from trainkit.checkpoint.transfer import fetch_run

    run = fetch_run(url, runs_root(env))
    run_folder.remember(run.path)  # from now on it is found by its name
    print(f"Fetched {url} to {run.path}.", flush=True)
    return run


def _send(run: RunDir, url: str) -> None:
    """Of a finished run whatever is not in its copy elsewhere yet."""
    from trainkit.checkpoint.transfer import send_rest

    where = send_rest(run, url)
    print(f"{run.name} has finished, and all that it keeps in {where} is there.")


def _resume_sweep(runs: Sequence[RunDir], asked: Asked, env: Mapping[str, str]) -> Started:
    """Queue what has failed, or was never queued, of a sweep, as one array."""
    runs = sorted(runs, key=lambda run: (len(run.path.name), run.path.name))
    lives = {run: history_of(run) for run in runs}
    states = dict(zip(runs, job_states(runs), strict=True))
    alive = {"no"} | ({"unknown"} if asked.force else set())
    lost = [run for run in runs if states[run].alive in alive and not lives[run].finished]
    if not lost:
        for run in runs:
            if states[run].alive == "unknown":
                require_no_job(run, force=False)
        told = ", ".join(sorted({state.state for state in states.values()}))
        raise UserError(
            f"Nothing of this sweep is to be queued again: its {len(runs)} runs are {told}.",
            why="Only what has failed, or was stopped, needs that.",
            fix=f"`{terminal.command('status', runs[0].path.parent)}` shows them.",
        )
    loadeds = [_load(run, asked) for run in lost]
    found = [
        require_own_code(run.path, loaded, allow_code=asked.allow_code, starts_snapshot=True)
        for run, loaded in zip(lost, loadeds, strict=True)
    ]
    site = discover(env)
    largest = named(site.scheduler).largest_array() if site.scheduler else len(lost)
    further = Further(runs[0].path.parent, loadeds[0], site, first_folder(lost[0]), env)
    folder, plan, script = further.plan(lost[:largest])
    for loaded in loadeds:
        _check_data(loaded)
    validate(loadeds[0], plan, site, folder, first_folder(lost[0]))
    _say_diverged(lost, [states[run] for run in lost])
    if asked.preview is not None:
        return asked.shown(plan, loadeds[0], folder, script)
    with ExitStack() as held:
        for run, loaded, code in zip(lost, loadeds, found, strict=True):
            # One at a time: of two that come together, the second finds the job of the first.
            held.enter_context(lease_on(run, Holder.me(), is_dead=_of_ended_job(lives[run], states[run])))
            if history_of(run).submission != lives[run].submission:
                require_no_job(run, force=asked.force)
            restore_code(run, code.content)
            _store(run, loaded.config, own=code.own)
        for array, part in further.start_all(lost, largest):
            names = ", ".join(run.path.name for run in part[:20]) + (", ..." if len(part) > 20 else "")
            print(f"Submitted job {array} for {len(part)} of {len(runs)} runs: {names}", flush=True)
    return Started(lost, lost, plan.executor)


def _load(run: RunDir, asked: Asked) -> Loaded:
    """With what is asked for now. The environment's SBATCH_* were part of the first submission, and stay as they were.

    The configuration that a run keeps is complete, so that its own site's profile is not asked again.
    """
    flags = dict(asked.flags)
    # It waited for another job once; that is over.
    flags.setdefault("launch.dependency", (None, "a resumed run waits for nothing"))
    return loading.load(
        str(run.config), flags=flags, moved_to=flags["launch.cluster"][0] if "launch.cluster" in flags else None
    )


def _say_diverged(runs: Sequence[RunDir], states: Sequence[JobState]) -> None:
    """Settings stay as they were, so the same loss that was no number may come again: what helps is another run."""
    from trainkit.diagnosis.causes import cause_of

    causes = [(run, cause_of(run, state)) for run, state in zip(runs, states, strict=True)]
    diverged = [(run, cause) for run, cause in causes if cause is not None and cause.name == "nonfinite"]
    if diverged:
        names = ", ".join(full_name(run) for run, _ in diverged[:20]) + (", ..." if len(diverged) > 20 else "")
        print(f"{names} diverged, and may do so again with the same settings. {diverged[0][1].advice}", file=sys.stderr)


def _check_data(loaded: Loaded) -> None:
    if ":" not in loaded.config.data.name:  # the user's own modules are in the run's snapshot, wherever this is called
        check_data(loaded.config.data)


def refuse_finished(run: RunDir) -> None:
    """Raises UserError where there is nothing left to train."""
    refuse_bench(run.path)
    early = fileio.read_object(run.summary).get("stopped_early")
    if history_of(run).finished and isinstance(early, str):
        again = terminal.command("submit", run.path, "train.early_stopping_patience=null")
        raise UserError(
            f"{run.name} has stopped early.",
            why=f"{terminal.one_line(early)}.",
            fix=f"`{again}` trains anew, to the end.",
        )
    if history_of(run).finished:
        raise UserError(
            f"{run.name} has finished.",
            why="There is nothing left to train.",
            fix=f"`{terminal.command('submit', run.path)} train.epochs=N` starts a new run with its settings.",
        )


def _of_ended_job(life: RunHistory, state: JobState) -> Callable[[Holder], bool]:
    """Whether the writer is of a job that the scheduler knows to have ended, however that left its lease."""
    ended = {item.job_id for item in life.submissions if item.job_id} if state.alive == "no" else set()
    return lambda other: other.job_id in ended


def first_folder(run: RunDir) -> Path:
    """Where the run was submitted from, so that paths of its own keep their meaning; else here.

    A job finds modules there, too: where others may write what is known of that folder, they must not write in it.
    """
    text = fileio.read_object(run.manifest).get("cwd")
    folder = Path(text) if isinstance(text, str) and os.path.isdir(text) else Path.cwd()
    mine = (os.geteuid(), 0)
    if why_others_may_write(run.manifest, owners=mine) and why_others_may_write(folder, owners=mine):
        return Path.cwd()
    return folder


def _store(run: RunDir, config: Config, *, own: bool) -> None:
    """Write down what a run is resumed with. The code that reads it is the run's own, and may be older than this: keys
    that it does not have are left out as long as they are as by default."""
    if own:
        vouch(run, config)
    path = run.config
    stored, _ = yaml.read(path, follow=False)
    default = {"launch": type(config.launch)().model_dump(mode="json")}
    dumped = config.model_dump(mode="json")
    tree = {name: _known(value, stored[name], default.get(name)) for name, value in dumped.items() if name in stored}
    fileio.write(path, yaml.dump(tree), path.parent)


def _known(value: Any, stored: Any, default: Mapping[str, Any] | None) -> Any:
    """Of a section other than `launch` nothing can have changed."""
    if not isinstance(value, dict) or not isinstance(stored, dict):
        return value
    return {
        key: item for key, item in value.items() if key in stored or (default is not None and item != default.get(key))
    }

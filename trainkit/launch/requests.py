"""Requests that fit, with what the scheduler has accounted for, and from the runs that there were before."""

from collections.abc import Sequence
from typing import Any

from trainkit.cluster.scheduler import built_in
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.launch.preparation import Prepared
from trainkit.report.facts import Facts
from trainkit.report.fit import Fit, fit_of
from trainkit.run.find import known_runs
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.selection import presets_of

_MOST = 20
"""Runs to learn from, and to ask the accounts about: the newest."""
_ALIKE = ("model.name", "data.name", "train.global_batch_size", "train.epochs", "train.max_steps", "strategy.name")
"""Settings in which runs are alike that need the same."""


def fit_of_runs(runs: Sequence[RunDir]) -> Fit | None:
    """Compare what runs were given with what they used, by their own samples and by the scheduler's accounts."""
    facts = [Facts(run, run.name) for run in runs]
    accounted = {}
    for run in runs[-_MOST:]:
        life = history_of(run)
        submission = life.submission
        if submission is not None and submission.job_id and life.outcome is not None:
            memory = built_in(submission.executor).peak_memory_mb(submission.job_id)
            if memory is not None:
                accounted[run.path] = memory
    return fit_of(facts, accounted)


def _values(config: Config, alike: Sequence[str]) -> dict[str, Any]:
    if config.script is not None:
        script = config.script
        return {"script": (script.path, script.module, script.program, script.arguments)}
    found = {}
    for key in alike:
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(config, section), name)
    return found


def earlier_runs(prepared: Prepared, alike: Sequence[str] = _ALIKE, *, finished: bool = True) -> list[RunDir]:
    """Find the newest runs of the same preset, or script, that are alike, but for what is swept. Oldest first.

    Args:
        alike: the settings that are to be the same.
        finished: only runs that have come to their end.
    """
    swept = {text.partition("=")[0] for text in prepared.request.sweep}
    loaded = prepared.loadeds[0]
    wanted = _values(loaded.config, alike)
    found: list[RunDir] = []
    for run in reversed(known_runs(prepared.env)):
        is_named = loaded.is_run or loaded.config.script is not None or loaded.name in presets_of(run)
        if not is_named or (finished and not history_of(run).finished):
            continue
        try:
            had = _values(load(str(run.config), []).config, alike)
        except UserError:  # of another version, or damaged
            continue
        if all(had.get(key) == value for key, value in wanted.items() if key not in swept):
            found.insert(0, run)
        if len(found) == _MOST:
            break
    return found


def propose(prepared: Prepared) -> tuple[Fit, list[RunDir]]:
    """Say what runs like these have needed.

    Raises:
        UserError: there are none that tell.
    """
    runs = earlier_runs(prepared)
    fit = fit_of_runs(runs) if runs else None
    if fit is None:
        alike = "the same model, data, batch, length and strategy"
        if prepared.loadeds[0].config.script is not None:
            alike = "the same arguments"
        why = f"No run of it with {alike} has finished as a batch job here."
        fix = "Submit it once as it is; without measurements nothing is proposed."
        raise UserError(f"Nothing is known of what {prepared.loadeds[0].name} needs.", why=why, fix=fix)
    return fit, runs


def beyond_limit(fit: Fit, prepared: Prepared) -> str:
    """Say where the time to ask for is longer than the partition lets a job run; else nothing."""
    partition = prepared.site.partition(prepared.loadeds[0].config.launch.partition)
    limit = partition.max_time_min if partition is not None else None
    for item in fit.resources:
        if partition is not None and limit is not None and item.name == "time" and item.next > limit * 60:
            longest = terminal.duration(limit * 60)
            return f"{partition.name} lets a job run for {longest}: it would be queued again, and go on."
    return ""

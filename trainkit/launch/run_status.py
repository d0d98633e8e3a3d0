"""Status of runs: state, progress, problems and the expected end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cluster.job_states import job_states
from trainkit.cluster.scheduler import JobState
from trainkit.common import fileio, terminal
from trainkit.common.errors import TrainkitError
from trainkit.run import run_progress
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import RunHistory, history_of
from trainkit.run.labels import NO_LABELS, Labels, labels_of
from trainkit.run.run_progress import Forecast, RunProgress

if TYPE_CHECKING:
    from trainkit.diagnosis.causes import Cause


Aged = Callable[[float], None]
GOING_ON = ("RUNNING", "PENDING", "CONFIGURING", "COMPLETING", "REQUEUED")


@dataclass(frozen=True)
class StatusRow:
    """Everything to show of one run."""

    run: RunDir
    name: str
    state: JobState
    history: RunHistory = field(default_factory=RunHistory)
    progress: RunProgress = field(default_factory=RunProgress)
    problems: Sequence[str] = ()
    forecast: Forecast | None = None
    """Time to the end of training, further attempts included; None if unknown."""
    diverged: str = ""
    """Divergence of the loss in words; empty if there was none."""
    labels: Labels = NO_LABELS
    measured: float | None = None
    """Value that it is sorted by."""

    @property
    def total_steps(self) -> Any:
        return self.history.started.get("total_steps")

    @property
    def cause(self) -> Cause | None:
        from trainkit.diagnosis.causes import cause_of

        with suppress(TrainkitError):  # shown in its row
            return cause_of(self.run, self.state)
        return None

    @property
    def notes(self) -> list[str]:
        """Remarks for the last column."""
        state = self.state
        notes = [" ".join(f"#{tag}" for tag in self.labels.tags), state.reason, *self.problems]
        if self.history.started.get("made_up") is True:
            notes.append("made-up images")
        if state.start:
            notes.append(f"to start about {state.start.replace('T', ' ')[:16]}")
        for job in state.also:
            notes.append(f"job {job.job_id or '?'} is {job.state} too")
        if state.state == "COMPLETED" and self.progress.last.get("step") != self.total_steps:
            early = fileio.read_object(self.run.summary).get("stopped_early")
            if isinstance(early, str):
                notes.append(f"{'pruned' if self.history.pruned else 'stopped early'}: {early}")
        if self.diverged:
            notes.append(f"DIVERGED: {self.diverged}")
        if state.alive == "no" and state.state not in ("COMPLETED", "CANCELLED", "NOT SUBMITTED"):
            notes += [self._error(), fileio.full(self.run.path)]
        return list(dict.fromkeys(filter(None, notes)))

    def _error(self) -> str:
        """Return the first error of the last attempt that failed; else the cause: ranks that fail early write none."""
        failures = self.history.failures
        last = max((item.attempt or 0 for item in failures), default=0)
        for item in failures:
            if (item.attempt or 0) == last:
                return item.error
        cause = self.cause
        return cause.what if cause else ""


def status_rows(
    runs: Sequence[RunDir], root: Path, states: Mapping[Path, JobState] | None = None, aged: Aged | None = None
) -> list[StatusRow]:
    """Collect what is known of the runs, asking each scheduler once. An unreadable run does not hide the others.

    Args:
        root: folder to which names of runs are relative.
        states: recent answers of the scheduler to this process.
        aged: see `job_states`.
    """
    histories: dict[RunDir, RunHistory] = {}
    unreadable: dict[RunDir, JobState] = {}
    for run in runs:
        try:
            histories[run] = history_of(run)
        except TrainkitError as error:
            unreadable[run] = JobState("UNKNOWN", reason=f"{error.what} {error.why}")
    if states is None:
        asked = job_states(list(histories), list(histories.values()), aged=aged)
        states = {run.path: state for run, state in zip(histories, asked, strict=True)}
    rows = []
    for run in runs:
        name = str(run.path.relative_to(root) if run.path.is_relative_to(root) else run.path)
        if run in unreadable:
            rows.append(StatusRow(run, name, unreadable[run]))
        else:
            rows.append(_row(run, name, histories[run], states[run.path]))
    return rows


def _row(run: RunDir, name: str, history: RunHistory, state: JobState) -> StatusRow:
    progress = RunProgress()
    ends = None
    labels = NO_LABELS
    problems = []
    since = history.started.get("time", 0.0) if state.state in GOING_ON else None
    try:
        progress = run_progress.progress_of(run, pace_since=since)
        ends = forecast_of(run, state, history, progress)
    except TrainkitError as error:
        problems.append(f"{error.what} {error.why}")
    try:
        labels = labels_of(run)
    except TrainkitError as error:
        problems.append(f"{error.what} {error.why}")
    if not os.path.isfile(run.config):
        problems.append("config.yaml is no file")
    diverged = ""
    if progress.train.get("loss", 0.0) is None:  # only then read the whole record
        diverged = run_progress.divergence_of(run)
    return StatusRow(run, name, state, history, progress, problems, ends, diverged, labels)


def forecast_of(run: RunDir, state: JobState, history: RunHistory, progress: RunProgress) -> Forecast | None:
    """Extrapolate the present pace and the past waits between attempts; None if too little is known."""
    from trainkit.cluster.plan import Plan

    left = progress.seconds_to(history.started.get("total_steps"))
    if left is None or history.finished or state.state not in GOING_ON:
        return None
    now = time.time()
    limit = math.inf
    runs = state.state == "RUNNING"
    if runs:
        left = max(left - (now - progress.last.get("time", now)), 0.0)
    if history.submission is not None and history.submission.executor != "launch":
        with suppress(OSError, ValueError, TrainkitError):  # runs of templates have no plan
            plan = Plan.read(run.plan)
            limit = max(float(plan.time_limit_seconds - plan.lead_seconds), 1.0)
    events = read_events(run, run_progress.FORECAST_EVENTS)
    return run_progress.forecast(events, left, now=now, attempt_seconds=limit, runs=runs)


def words(found: Forecast) -> str:
    """Assumptions of a forecast, for people."""
    if not found.restarts:
        return "at the present pace"
    many = f"with {terminal.plural(found.restarts, 'further start')}"
    if found.restart_seconds is None:
        return f"{many}, and without waiting in the queue for them"
    return f"{many}, if each takes {found.restart_seconds:.0f} s as before, the wait in the queue included"

"""When a run will have ended, over all the attempts that it takes."""

from __future__ import annotations

import math
import time

from trainkit.errors import TrainkitError
from trainkit.launch.plan import Plan
from trainkit.run.events import Life, read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import FORECAST_EVENTS, Forecast, Standing, forecast
from trainkit.schedulers.base import JobState

GOING_ON = ("RUNNING", "PENDING", "CONFIGURING", "COMPLETING", "REQUEUED")


def forecast_of(run: RunDir, state: JobState, life: Life, standing: Standing) -> Forecast | None:
    """If it goes on as it does, and waits between attempts as it has; None where too little is known."""
    left = standing.seconds_to(life.started.get("total_steps"))
    if left is None or life.finished or state.state not in GOING_ON:
        return None
    now, runs = time.time(), state.state == "RUNNING"
    if runs:
        left = max(left - (now - standing.last.get("time", now)), 0.0)
    limit = _attempt_seconds(run, life)
    return forecast(read_events(run, FORECAST_EVENTS), left, now=now, attempt_seconds=limit, runs=runs)


def words(found: Forecast) -> str:
    """How it comes to that, for people."""
    if not found.restarts:
        return "if it goes on as it does"
    many = f"{found.restarts} further start{'s' * (found.restarts > 1)}"
    if found.restart_seconds is None:
        return f"with {many}, and without waiting in the queue for them"
    return f"with {many}, if each takes {found.restart_seconds:.0f} s as before, the wait in the queue included"


def _attempt_seconds(run: RunDir, life: Life) -> float:
    if life.submission is None or life.submission.executor == "launch":
        return math.inf
    try:
        plan = Plan.read(run.plan)
    except (OSError, ValueError, TrainkitError):  # of a template
        return math.inf
    return max(float(plan.time_limit_seconds - plan.lead_seconds), 1.0)

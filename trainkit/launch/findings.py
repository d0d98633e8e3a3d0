"""Findings of `why` about a run, for people and for programs."""

import re
import time
from collections.abc import Sequence
from typing import Any

from trainkit.cluster.scheduler import JobState
from trainkit.common import terminal
from trainkit.diagnosis.activity import activity_of
from trainkit.diagnosis.causes import cause_of
from trainkit.diagnosis.evidence import Quote
from trainkit.launch.run_status import forecast_of, words
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_progress import progress_of

_LINE = re.compile(r"(.+):(\d+)")


def nothing_of(run: RunDir, state: JobState) -> str:
    """Say what a run does, or has come to, where nothing has failed."""
    if state.state == "RUNNING":
        life = history_of(run)
        left = forecast_of(run, state, life, progress_of(run, pace_since=life.started.get("time", 0.0)))
        if left is None:
            return str(activity_of(run, ends=""))
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left.seconds))
        return str(activity_of(run, ends=f"It ends about {end}, {words(left)}."))
    if state.state == "COMPLETED":
        return "It has finished; nothing failed."
    if state.state == "UNKNOWN":
        return f"Its state is unknown: {state.reason}."
    if state.state == "NOT SUBMITTED":
        return f"It was never queued; `{terminal.command('resume', run.path)}` queues it."
    said = "Nothing in its folder shows a failure."
    return f"{said} {state.reason}." if state.reason else said


def finding_of(
    run: RunDir, state: JobState, attempt: int | None = None, others: Sequence[RunDir] = ()
) -> dict[str, Any]:
    """Find the cause of what has become of a run, as plain values; docs/reference/json.md names the keys.

    Args:
        others: runs with the same cause.
    """
    cause = cause_of(run, state, attempt)
    found: dict[str, Any] = {
        "runs": [str(each.path) for each in (run, *others)],
        "state": state.state,
        "job_id": state.job_id or None,
        "start": state.start or None,
        **dict.fromkeys(("cause", "attempt", "rank", "node", "command")),
        "why": "",
        "evidence": [],
        "fix": "",
    }
    if cause is None:
        return found | {"what": nothing_of(run, state)}
    if cause.failure is not None:
        failure = cause.failure
        found |= {"attempt": failure.attempt, "rank": failure.rank, "node": failure.host or None}
    evidence = [_evidence(run, quote) for quote in cause.evidence]
    command = terminal.for_reader(cause.command) if cause.command else None
    return found | {
        "cause": cause.name, "what": cause.what, "why": cause.why, "evidence": evidence, "fix": cause.fix,
        "command": command,
    }  # fmt: skip


def _evidence(run: RunDir, quote: Quote) -> dict[str, Any]:
    """A line of evidence, with the file and the line that its place names."""
    match = _LINE.fullmatch(quote.where)
    name = match[1] if match else quote.where
    file = run.path / name
    return {
        "where": quote.where,
        "file": str(file) if file.is_file() else None,
        "line": int(match[2]) if match else None,
        "text": quote.text,
    }

"""Whether an attempt that was interrupted or has failed is worth another one, and which nodes it should do without.

A run may be interrupted as often as it likes while it makes progress: preemptions and time limits are no fault of its
own. Failures that another start may mend (a rank that was killed, a node that is gone, a hang) are tried again within a
budget; an error of the program is not, for it would come again. `jobs.resume` gives a run all its tries back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainkit import fileio
from trainkit.diagnosis.evidence import batch_text, is_lost_connection, last_error
from trainkit.launch.supervisor import is_killed
from trainkit.ranks.signals import is_hang
from trainkit.run.events import Attempt, history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.site.node_health import findings, table

MOST_FAILURES = 3
"""Attempts of one submission that may fail; the last of them ends the run."""
MOST_IN_VAIN = 2
"""Restarts in a row, of one submission, without a new checkpoint."""
HANGS_OF_A_BAD_NODE = 2
"""A rank that is behind once is bad luck or the program's; on the same node again, it is the node."""

# Of an srun that the controller, or the slurmd of a node, has not answered when it was to start the ranks. What else
# these lines say (an invalid account, more CPUs than there are) would be said again.
_UNANSWERED = re.compile(
    r"^srun: error: (.*(?:Unable to contact slurm controller|Communication connection failure|Connection refused"
    r"|Connection timed out|Socket timed out on send/recv|Zero Bytes were transmitted).*)",
    re.MULTILINE,
)
_MOST_SIGNALS = 64
PREFLIGHT = "preflight.json"
"""Among the attempt's logs: whatever the ranks of the check of its nodes print."""
REFUSED = 3
_WORD = "failed preflight: "


def budget_spent(run: RunDir) -> str:
    """Why the run is not started once more; empty while it may be."""
    events = read_events(run)
    first = first_attempt(run)
    attempts = [number for number in run.attempts() if number >= first]
    failed = {event.get("attempt") for event in events if event["event"] == "failed"}
    failures = [number for number in attempts if number in failed]
    if len(failures) >= MOST_FAILURES:
        return f"{len(failures)} attempts have failed"
    newest, made_progress = -1, {}
    for number in run.attempts():
        saved = [event.get("step") for event in events if event["event"] == "saved" and event.get("attempt") == number]
        furthest = max((step for step in saved if step is not None), default=-1)
        made_progress[number] = furthest > newest
        newest = max(newest, furthest)
    last = attempts[1:][-MOST_IN_VAIN:]
    if len(last) == MOST_IN_VAIN and not any(made_progress[number] for number in last):
        return f"{MOST_IN_VAIN} restarts have not come to a new checkpoint"
    return ""


def first_attempt(run: RunDir) -> int:
    """Of the newest submission that somebody has asked for: a further link of a chain is none."""
    opened = [event for event in read_events(run, "submitted") if not event.get("continues")]
    return opened[-1].get("attempts_before") or 0 if opened else 0


def excluded_nodes(run: RunDir) -> dict[str, str]:
    """Nodes that the run does without, oldest first, and why; `jobs.resume` takes all of them back."""
    first, found = first_attempt(run), {}
    for event in read_events(run, "excluded"):
        node, attempt = event.get("node"), event.get("attempt")
        if isinstance(node, str) and type(attempt) is int and attempt >= first:
            found[node] = str(event.get("why", ""))
    return found


def spared(bad: Sequence[str], usable: Iterable[str], needed: int) -> list[str]:
    """Those of the bad nodes, oldest first, that a job can do without and still start; the newest go first.

    Args:
        usable: nodes where it can start, bad ones included.
        needed: as many nodes it takes.
    """
    left, out = set(usable), []
    for node in reversed(bad):
        if len(left - {node}) >= needed:
            left.discard(node)
            out.append(node)
    return sorted(out)


def passing_failure(attempt: Attempt, code: int) -> str:
    """What ended the attempt, if another start may mend it; empty for an error of the program, which would come again.

    Args:
        code: exit code of its ranks; above 128 for a signal.
    """
    said = [failure.error for failure in history_of(attempt.run).failures if failure.attempt == attempt.number]
    hangs = [error for error in said if is_hang(error)]
    if hangs:
        return hangs[0]
    if before_it_began := [error for error in said if is_preflight(error)]:
        return before_it_began[0]
    said += [error for log in sorted(attempt.logs.glob("rank-*.err")) if (error := last_error(log))]
    if any(not is_lost_connection(error) and not is_killed(error) for error in said):
        return ""
    trained = any(event.get("attempt") == attempt.number for event in read_events(attempt.run, "started"))
    if not trained and (unanswered := _UNANSWERED.search(batch_text(attempt.run, attempt.number))):
        return f"srun could not start the ranks: {unanswered[1].strip()}"
    if killed := [error for error in said if is_killed(error)]:
        return killed[0]
    if 0 < code - 128 <= _MOST_SIGNALS:
        return f"a rank was killed by signal {code - 128}"
    return f"the ranks have lost one another: {said[0]}" if said else ""


def is_broken(state: str) -> bool:
    """Whether nothing will start on a node, by its state as sinfo writes it: ``down*`` does not answer either."""
    return state.rstrip("*~#!%$@+^-") in ("down", "drain", "drng", "drained", "draining", "fail", "failg", "err", "unk")


def culprits(attempt: Attempt, nodes: Sequence[str], states: Mapping[str, str]) -> dict[str, str]:
    """Nodes of an attempt that the next one should do without, and why.

    Args:
        nodes: of the job.
        states: of nodes, as sinfo writes them: ``idle``, ``down*``; empty if it did not answer.
    """
    found = {}
    for node in nodes:
        if is_broken(states.get(node, "")):
            found[node] = f"SLURM says that it is {states[node]}"
    found |= {node: why for node, why in bad_nodes(attempt).items() if node in nodes}
    hangs = Counter(
        host
        for number, host in {
            (failure.attempt, failure.host.partition(".")[0])
            for failure in history_of(attempt.run).failures
            if is_hang(failure.error) and failure.rank is not None
        }
    )
    for node in nodes:
        if hangs[node.partition(".")[0]] >= HANGS_OF_A_BAD_NODE:
            found.setdefault(node, f"its ranks were behind in {hangs[node.partition('.')[0]]} hangs")
    return found


# The check of a job's own nodes, before its ranks start


def pronounce(attempt: Attempt) -> int:
    """Show what was found; 3, and the attempt has failed, if a node is bad.

    Nodes that gave no answer are not held back: whether the ranks can start there, these say best.
    """
    report = _report(attempt)
    if report is None:
        print("The preflight gave no answer; the ranks are started nevertheless.", flush=True)
        return 0
    found = findings(report)
    print("\n".join(table(report, found)), flush=True)
    bad = [item for item in found if item.bad]
    for item in bad:
        attempt.failed(f"{_WORD}{item.node}: {item.check}: {item.what}", rank=None, host=item.node)
    return REFUSED if bad else 0


def is_preflight(error: str) -> bool:
    """Whether a failure is what `pronounce` has written."""
    return error.startswith(_WORD)


def bad_nodes(attempt: Attempt) -> dict[str, str]:
    """Nodes that the attempt's preflight found bad, and why; none without one."""
    report = _report(attempt)
    found = [item for item in findings(report) if item.bad] if report is not None else []
    return {node: f"{_WORD}{item.check}: {item.what}" for item in reversed(found) for node in item.node.split(",")}


def _report(attempt: Attempt) -> Mapping[str, Any] | None:
    try:
        lines = fileio.read_text(attempt.logs / PREFLIGHT).splitlines()
        report: Mapping[str, Any] | None = next(
            (fileio.parse(line) for line in lines if line.startswith('{"ranks"')), None
        )
    except (OSError, ValueError):
        return None
    return report

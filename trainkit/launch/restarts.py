"""Decide whether an attempt that was interrupted or failed is worth another one, and without which nodes.

A run may be interrupted as often as it likes while it makes progress: preemptions and time limits are no fault of its
own. Failures that another start may mend (a rank that was killed, a node that is gone, a hang) are tried again within a
budget; an error of the program is not, for it would come again. `jobs.resume` gives a run all its tries back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from trainkit import fileio
from trainkit.diagnosis.evidence import RankLog, batch_text, is_lost_connection
from trainkit.ranks.signals import is_hang
from trainkit.run.events import Attempt, history_of, read_events
from trainkit.run.folder import PREFLIGHT, RunDir
from trainkit.site.node_health import Finding, findings, table

MOST_FAILURES = 3
"""Attempts of one submission that may fail; the last of them ends the run."""
MOST_IN_VAIN = 2
"""Restarts in a row, of one submission, without a new checkpoint."""
HANGS_OF_A_BAD_NODE = 2
"""A rank that is behind once is bad luck or the program's; on the same node again, it is the node."""
KILLED = "killed by "
"""How the error of a rank begins that a signal has ended."""
REFUSED = 3
_FAILED_PREFLIGHT = "failed preflight: "
_MOST_SIGNALS = 64
# Of an srun that the controller, or the slurmd of a node, has not answered when it was to start the ranks. What else
# these lines say (an invalid account, more CPUs than there are) would be said again.
_UNANSWERED = re.compile(
    r"^srun: error: (.*(?:Unable to contact slurm controller|Communication connection failure|Connection refused"
    r"|Connection timed out|Socket timed out on send/recv|Zero Bytes were transmitted).*)",
    re.MULTILINE,
)


def budget_spent(run: RunDir) -> str:
    """Why the run is not started once more; empty while it may be."""
    events, first = read_events(run), first_attempt(run)
    failed = {event.get("attempt") for event in events if event["event"] == "failed"}
    attempts = [number for number in run.attempts() if number >= first]
    if (failures := sum(number in failed for number in attempts)) >= MOST_FAILURES:
        return f"{failures} attempts have failed"
    newest, progressed = -1, set()
    for number in run.attempts():
        saved = [event.get("step") for event in events if event["event"] == "saved" and event.get("attempt") == number]
        furthest = max((step for step in saved if step is not None), default=-1)
        if furthest > newest:
            newest = furthest
            progressed.add(number)
    restarts = attempts[1:][-MOST_IN_VAIN:]
    if len(restarts) == MOST_IN_VAIN and not progressed & set(restarts):
        return f"{MOST_IN_VAIN} restarts have not come to a new checkpoint"
    return ""


def first_attempt(run: RunDir) -> int:
    """The first attempt of the newest submission that somebody has asked for: a further link of a chain is none."""
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
        needed: how many nodes it takes.
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
    errors = [failure.error for failure in history_of(attempt.run).failures if failure.attempt == attempt.number]
    for mendable in ([*filter(is_hang, errors)], [error for error in errors if error.startswith(_FAILED_PREFLIGHT)]):
        if mendable:
            return mendable[0]
    errors += [error for log in sorted(attempt.logs.glob("rank-*.err")) if (error := RankLog(log).error)]
    if any(not is_lost_connection(error) and not error.startswith(KILLED) for error in errors):
        return ""
    trained = any(event.get("attempt") == attempt.number for event in read_events(attempt.run, "started"))
    if not trained and (unanswered := _UNANSWERED.search(batch_text(attempt.run, attempt.number))):
        return f"srun could not start the ranks: {unanswered[1].strip()}"
    if killed := [error for error in errors if error.startswith(KILLED)]:
        return killed[0]
    if 0 < code - 128 <= _MOST_SIGNALS:
        return f"a rank was killed by signal {code - 128}"
    return f"the ranks have lost one another: {errors[0]}" if errors else ""


def is_broken(state: str) -> bool:
    """Whether nothing will start on a node, by its state as sinfo writes it: ``down*`` does not answer either."""
    return state.rstrip("*~#!%$@+^-") in ("down", "drain", "drng", "drained", "draining", "fail", "failg", "err", "unk")


def culprits(attempt: Attempt, nodes: Sequence[str], states: Mapping[str, str]) -> dict[str, str]:
    """Nodes of an attempt that the next one should do without, and why.

    Args:
        nodes: of the job.
        states: of nodes, as sinfo writes them: ``idle``, ``down*``; empty if it did not answer.
    """
    failed_check = {
        node: f"{_FAILED_PREFLIGHT}{item.check}: {item.what}"
        for item in reversed([item for item in _preflight(attempt)[0] if item.bad])
        for node in item.node.split(",")
    }
    hangs = Counter(
        host
        for _, host in {
            (failure.attempt, failure.host.partition(".")[0])
            for failure in history_of(attempt.run).failures
            if is_hang(failure.error) and failure.rank is not None
        }
    )
    found = {}
    for node in nodes:
        behind = hangs[node.partition(".")[0]]
        if node in failed_check:
            found[node] = failed_check[node]
        elif is_broken(states.get(node, "")):
            found[node] = f"SLURM says that it is {states[node]}"
        elif behind >= HANGS_OF_A_BAD_NODE:
            found[node] = f"its ranks were behind in {behind} hangs"
    return found


def pronounce(attempt: Attempt) -> int:
    """Show what the check of the job's nodes found; 3, and the attempt has failed, if a node is bad.

    Nodes that gave no answer are not held back: the ranks themselves tell best whether they can start there.
    """
    found, lines = _preflight(attempt)
    print("\n".join(lines) or "The preflight gave no answer; the ranks are started nevertheless.", flush=True)
    bad = [item for item in found if item.bad]
    for item in bad:
        attempt.failed(f"{_FAILED_PREFLIGHT}{item.node}: {item.check}: {item.what}", rank=None, host=item.node)
    return REFUSED if bad else 0


def _preflight(attempt: Attempt) -> tuple[Sequence[Finding], list[str]]:
    """What the check of the attempt's nodes found, and that as a table; nothing where it gave no answer."""
    lines = PREFLIGHT.read(attempt.logs).splitlines()
    report = next((fileio.parse_object(line) for line in lines if line.startswith('{"ranks"')), None)
    found = [] if report is None else findings(report)
    return found, [] if report is None else table(report, found)

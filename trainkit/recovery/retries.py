"""Retries: when another start of a run is worth it, and without which nodes.

A run may be interrupted as often as it likes while it makes progress: preemptions and time limits are no fault of its
own. Failures that another start may mend (a rank that was killed, a node that is gone, a hang) are tried again within a
budget, without the nodes that caused them; an error of the program is not, for it would come again. `jobs.resume` gives
a run all its tries back.
"""

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from trainkit.cluster.node_health import NodeFinding, findings, table
from trainkit.cluster.scheduler import NodeState
from trainkit.cluster.signals import KILLED, ending_in_words, is_hang
from trainkit.common import fileio, jsonl
from trainkit.diagnosis.evidence import batch_text
from trainkit.diagnosis.rank_log import RankLog, is_lost_connection
from trainkit.run.events import Attempt, attempts_that, read_events
from trainkit.run.folder import PREFLIGHT, RunDir
from trainkit.run.history import history_of

MOST_FAILURES = 3
"""Attempts of one submission that may fail; the last of them ends the run."""
MOST_IN_VAIN = 2
"""Restarts in a row, of one submission, without a new checkpoint."""
MOST_ENDED = 20
"""Attempts in a row of a script that were ended, for it did not stop when it was told to."""
_TAKEN = ending_in_words(-signal.SIGTERM)
"""End of ranks whose job somebody else has queued again, and SLURM has ended: a script may do so by itself."""
HANGS_OF_A_BAD_NODE = 2
"""A rank that is behind once is bad luck or the program's; on the same node again, it is the node."""
FAILED_PREFLIGHT = "failed preflight: "
LOST_NODE = "the node does not answer"
_NOT_STARTED = "srun could not start the ranks: "
_KILLED = "a rank was killed by signal "
_PASSING = (FAILED_PREFLIGHT, LOST_NODE, _NOT_STARTED, _KILLED)
"""Failures recorded in these words are worth another start."""
_MOST_SIGNALS = 64
# Of an srun that the controller, or the slurmd of a node, has not answered when it was to start the ranks. What else
# these lines say (an invalid account, more CPUs than there are) would be said again.
_UNANSWERED = re.compile(
    r"^srun: error: (.*(?:Unable to contact slurm controller|Communication connection failure|Connection refused"
    r"|Connection timed out|Socket timed out on send/recv|Zero Bytes were transmitted).*)",
    re.MULTILINE,
)


def budget_spent(run: RunDir) -> str:
    """Say why the run is not started once more; empty while it may be."""
    events = read_events(run)
    first = first_attempt(run)
    attempts = [number for number in run.attempts() if number >= first]
    life = history_of(run)
    failed = {item.attempt for item in life.failures if item.error != _TAKEN or item.attempt in life.requeued}
    failures = len(failed.intersection(attempts))
    if failures >= MOST_FAILURES:
        return f"{failures} attempts have failed"
    recent = attempts[1:][-MOST_IN_VAIN:]
    new = old = -1
    for event in events:
        step = event.get("step")
        attempt = event.get("attempt")
        if event["event"] == "saved" and step is not None:
            if attempt in recent:
                new = max(new, step)
            else:
                old = max(old, step)
        elif event["event"] == "started" and step:  # of what ranks have left in memory nobody says that it is saved
            if attempt in recent[1:]:
                new = max(new, step)
            elif attempt in recent:
                old = max(old, step)
    for event in events:
        if event["event"] == "gpu_idle" and event.get("attempt") in attempts[-1:]:
            return str(event.get("why"))
    is_counted = not life.is_script or max(new, old) >= 0  # what a script saves, it need not tell
    if is_counted and len(recent) == MOST_IN_VAIN and new <= old:
        return f"{MOST_IN_VAIN} restarts have not come to a new checkpoint"
    ended = _ended_in_a_row(run, first)
    if ended >= MOST_ENDED:
        return f"its script was ended {ended} times without having said that it has saved, or come further"
    return ""


def _ended_in_a_row(run: RunDir, first: int) -> int:
    """Count the attempts of a script, from ``first`` on, that were ended since one saved, or wrote a record of a step
    that none before it had come to."""
    ended = dict[int, float]()
    for event in read_events(run, ("saved", "handed_back", "failed")):
        if event.get("was_ended") or event.get("error") == _TAKEN:
            if event.get("attempt", -1) >= first:
                ended[event["attempt"]] = event.get("time", 0.0)
        elif event["event"] != "failed":
            ended.clear()
    if len(ended) < MOST_ENDED:
        return len(ended)
    furthest = -1
    since = 0.0
    for record in jsonl.read_jsonl(run.metrics):
        step = record.get("step")
        if jsonl.is_whole(step) and step > furthest:
            furthest = step
            since = record.get("time", 0.0)
    return sum(when > since for when in ended.values())


def first_attempt(run: RunDir) -> int:
    """Return the first attempt of the newest submission that was asked for: a further link of a chain is none."""
    first = 0
    for event in read_events(run, "submitted"):
        if not event.get("continues"):
            first = event.get("attempts_before") or 0
    return first


def excluded_nodes(run: RunDir) -> dict[str, str]:
    """Map nodes that the run does without, oldest first, to reasons; `jobs.resume` takes all of them back."""
    first = first_attempt(run)
    found = {}
    for event in read_events(run, "excluded"):
        node = event.get("node")
        attempt = event.get("attempt")
        if isinstance(node, str) and type(attempt) is int and attempt >= first:
            found[node] = str(event.get("why", ""))
    return found


def spared(bad: Sequence[str], usable: Iterable[str], needed: int) -> list[str]:
    """Select the bad nodes, given oldest first, that a job can do without and still start; the newest go first.

    Args:
        usable: nodes where it can start, bad ones included.
        needed: how many nodes it takes.
    """
    left = set(usable)
    out = []
    for node in reversed(bad):
        if len(left - {node}) >= needed:
            left.discard(node)
            out.append(node)
    return sorted(out)


def passing_failure(attempt: Attempt, code: int) -> str:
    """Say what ended the attempt if another start may mend it; empty for an error of the program.

    Args:
        code: exit code of its ranks; above 128 for a signal.
    """
    errors = [failure.error for failure in history_of(attempt.run).failures if failure.attempt == attempt.number]
    for error in errors:
        if is_hang(error) or error.startswith(_PASSING):
            return error
    for log in sorted(attempt.logs.glob("rank-*.err")):
        error = RankLog(log).error
        if error:
            errors.append(error)
    killed = [error for error in errors if error.startswith(KILLED)]
    lost = [error for error in errors if is_lost_connection(error)]
    if set(errors) - {*killed, *lost}:
        return ""
    if attempt.number not in attempts_that(attempt.run, "started"):
        unanswered = _UNANSWERED.search(batch_text(attempt.run, attempt.number))
        if unanswered:
            return f"{_NOT_STARTED}{unanswered[1].strip()}"
    if killed:
        return killed[0]
    if 0 < code - 128 <= _MOST_SIGNALS:
        return f"{_KILLED}{code - 128}"
    if errors:
        return f"the ranks lost the connection to one another: {errors[0]}"
    return ""


def is_broken(state: str) -> bool:
    """Return True if nothing will start on a node in that state of sinfo; ``down*`` does not answer either."""
    return state.rstrip("*~#!%$@+^-") in ("down", "drain", "drng", "drained", "draining", "fail", "failg", "err", "unk")


def culprits(attempt: Attempt, nodes: Sequence[str], states: Mapping[str, NodeState]) -> dict[str, str]:
    """Name nodes of an attempt that the next one should do without, and why.

    Args:
        nodes: of the job.
        states: of nodes; empty if the scheduler did not answer.
    """
    failed_check: dict[str, str] = {}
    for item in preflight_findings(attempt)[0]:
        if item.bad:
            for node in item.node.split(","):
                failed_check.setdefault(node, f"{FAILED_PREFLIGHT}{item.check}: {item.what}")
    hangs: dict[str, set[int | None]] = defaultdict(set)
    silent = set()
    for failure in history_of(attempt.run).failures:
        if failure.attempt == attempt.number and failure.error.startswith(LOST_NODE):
            silent.add(failure.host.partition(".")[0])
        if is_hang(failure.error) and failure.rank is not None:
            hangs[failure.host.partition(".")[0]].add(failure.attempt)
    found = {}
    for node in nodes:
        many = len(hangs[node.partition(".")[0]])
        if node in failed_check:
            found[node] = failed_check[node]
        elif node.partition(".")[0] in silent:
            found[node] = "it did not answer"
        elif node in states and is_broken(states[node].state):
            found[node] = f"SLURM says that it is {states[node].state}"
        elif many >= HANGS_OF_A_BAD_NODE:
            found[node] = f"its ranks were behind in {many} hangs"
    return found


def preflight_findings(attempt: Attempt) -> tuple[Sequence[NodeFinding], list[str]]:
    """Read what the check of the attempt's nodes found, and that as a table; nothing where it gave no answer."""
    for line in PREFLIGHT.read(attempt.logs).splitlines():
        if line.startswith('{"ranks"'):
            report = fileio.parse_object(line)
            if report is None:
                break
            found = findings(report)
            return found, table(report, found)
    return [], []

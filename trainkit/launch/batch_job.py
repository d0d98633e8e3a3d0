"""What a batch script does on its first node before and after its ranks, for submitted runs and plain templates alike,
whatever the scheduler.

    begun=$(python -m trainkit.launch.batch_job begin)      shell lines: the attempt, where its ranks meet, their secret
    python -m trainkit.launch.batch_job preflight           what the check of the nodes found; 3 if one is bad
    python -m trainkit.launch.batch_job end CODE            queue the job again if that is worth it; its exit code

All find the run in TRAINKIT_RUN_DIR. ``end --no-requeue`` leaves a saved run as it is, ``end --chain`` queues another
job instead of this one.

A run may be interrupted as often as it likes while it makes progress: preemptions and time limits are no fault of its
own. Failures that another start may mend (a rank that was killed, a node that is gone, a hang) are tried again within a
budget, without the nodes that caused them; an error of the program is not, for it would come again. `jobs.resume` gives
a run all its tries back.
"""

import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from trainkit import fileio, terminal
from trainkit.diagnosis.evidence import RankLog, batch_text, is_lost_connection
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.launch import notify
from trainkit.launch.sampler import choose
from trainkit.process import NoAnswer, NoProgram, run_program
from trainkit.ranks import HEAD_SUFFIX, Secret, expand, free_port, job_port
from trainkit.ranks.signals import is_hang
from trainkit.run.events import RUN_DIR, Attempt, history_of, read_events
from trainkit.run.folder import NODES, PREFLIGHT, REQUEUE, RunDir, umask_of
from trainkit.schedulers.base import NodeState, OwnJob, Place, Scheduler, around
from trainkit.site.node_health import Finding, findings, table

CONTINUE = "TRAINKIT_CONTINUE"
"""Environment variable of the templates: the run folder that a job goes on with, instead of making its own."""
How = Literal["requeue", "chain", "no"]
END_SECONDS = 300
"""How long a scheduler may take to end a script whose job it has requeued."""
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


# Whether another start is worth it, and without which nodes


def budget_spent(run: RunDir) -> str:
    """Why the run is not started once more; empty while it may be."""
    events, first = read_events(run), first_attempt(run)
    failed = {event.get("attempt") for event in events if event["event"] == "failed"}
    attempts = [number for number in run.attempts() if number >= first]
    if (failures := sum(number in failed for number in attempts)) >= MOST_FAILURES:
        return f"{failures} attempts have failed"
    recent = attempts[1:][-MOST_IN_VAIN:]
    saved = [event for event in events if event["event"] == "saved" and event.get("step") is not None]
    new = max((event["step"] for event in saved if event.get("attempt") in recent), default=-1)
    old = max((event["step"] for event in saved if event.get("attempt") not in recent), default=-1)
    if len(recent) == MOST_IN_VAIN and new <= old:
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
    hangs = [error for error in errors if is_hang(error)]
    if mendable := hangs or [error for error in errors if error.startswith(_FAILED_PREFLIGHT)]:
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


def culprits(attempt: Attempt, nodes: Sequence[str], states: Mapping[str, NodeState]) -> dict[str, str]:
    """Nodes of an attempt that the next one should do without, and why.

    Args:
        nodes: of the job.
        states: of nodes; empty if the scheduler did not answer.
    """
    bad = [(node, item) for item in _preflight(attempt)[0] if item.bad for node in item.node.split(",")]
    failed_check = {node: f"{_FAILED_PREFLIGHT}{item.check}: {item.what}" for node, item in reversed(bad)}
    behind = [item for item in history_of(attempt.run).failures if is_hang(item.error) and item.rank is not None]
    hangs = Counter(host for _, host in {(item.attempt, item.host.partition(".")[0]) for item in behind})
    found = {}
    for node in nodes:
        many = hangs[node.partition(".")[0]]
        if node in failed_check:
            found[node] = failed_check[node]
        elif node in states and is_broken(states[node].state):
            found[node] = f"SLURM says that it is {states[node].state}"
        elif many >= HANGS_OF_A_BAD_NODE:
            found[node] = f"its ranks were behind in {many} hangs"
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


# Around the ranks


def begin(env: Mapping[str, str]) -> str:
    """Begin the next attempt; the shell lines that tell the ranks of it.

    Raises:
        RunFailedError: the job was started again and again, and nothing came of it.
    """
    run = RunDir(Path(env[RUN_DIR]))
    scheduler, place = around(env, run)
    cut = history_of(run).cut_short
    scheduler.claim(run, env)
    if cut is not None and cut.cancelled:
        raise RunFailedError(f"{run.name} was cancelled.", why="That was before it had a job.", fix=_resume(run))
    if place.restarts and (spent := budget_spent(run)):
        Attempt(run, run.attempts()[-1]).ended("FAILED", job_id=place.job_id, why=spent)
        why = "SLURM, a node or the program ends it each time; `python -m jobs.why` looks for the cause."
        raise RunFailedError(f"{run.name} is not started again: {spent}.", why=why, fix=_resume(run))
    if before := run.attempts():
        _Job(Attempt(run, before[-1]), scheduler, place).leave_lost_nodes()
    choose(run)
    attempt, nodes = Attempt.begin(run), place.nodelist
    NODES.send(attempt.logs, nodes, within=run.path)
    print(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}", file=sys.stderr, flush=True)
    variables = attempt.environment() | {
        "MASTER_ADDR": expand(nodes)[0] + env.get(HEAD_SUFFIX, ""),
        "MASTER_PORT": str(free_port(job_port(env))),
        "TRAINKIT_SECRET": Secret.generate().text,
    }
    umask = f"umask {umask_of(run.path):04o}"  # srun opens the ranks' logs
    return "\n".join([umask, *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())])


def _resume(run: RunDir) -> str:
    if not run.plan.is_file():  # of a template
        words = f"{CONTINUE}={shlex.quote(str(run.path))} sbatch"
        return f"`{words}`, with the same arguments as before, goes on from the newest checkpoint."
    return f"`{terminal.command('resume', run.path)}` goes on from the newest checkpoint."


def end(code: int, env: Mapping[str, str], *, how: How) -> int:
    """Record how the attempt ended, and queue the job again if it was handed back, or failed and may do better.

    Returns the job's exit code: never 0 while something is left to train, for jobs that wait for this one must not
    start.
    """
    # Of a preemption that signals the batch shell too, and of the requeue. Blocked, so that it can be waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if (attempt := Attempt.named_in(env)) is None:
        return code
    job = _Job(attempt, *around(env, attempt.run))
    job_id = job.place.job_id
    if not attempt.run.config.is_file():  # refused before there was a run that another command would know
        print("\n".join(RankLog(attempt.logs / "rank-0.err").words), file=sys.stderr, flush=True)
        return code
    newer = attempt.successor()
    if newer is not None:  # SLURM took this node for dead, and has started the job again elsewhere
        print(f"Attempt {newer} has taken over from this one, {attempt.number}: nothing is queued again.", flush=True)
        return code or 1
    history = history_of(attempt.run)
    failure = ""
    if attempt.number not in history.handed_back:
        if history.finished and not code:
            return 0
        code = code or 1
        failure = "" if history.finished else passing_failure(attempt, code)
        if not failure:
            attempt.ended("FAILED", job_id=job_id, exit_codes=[code])
            return code
    what = f"Failed ({failure})" if failure else "Saved"
    if how == "no":
        print(f"{what}; requeue is off. {_resume(attempt.run)}", flush=True)
        attempt.ended("FAILED" if failure else "PREEMPTED", job_id=job_id, exit_codes=[code])
        return code or 1
    if not (own := job.scheduler.own_job(job_id)).is_to_be_queued:  # cancelled, or on its way back already
        print(f"{what}. The job is {own.state}, so it is not queued again.", flush=True)
        job.exclude_bad_nodes(own, failed=bool(code))
        return code or 1
    if failure and failure not in [item.error for item in history.failures if item.attempt == attempt.number]:
        attempt.failed(failure, rank=None)
    if refusal := budget_spent(attempt.run) or job.queue_again(how, own, env, failed=bool(failure)):
        print(f"{what}, and not queued again: {refusal}. {_resume(attempt.run)}", flush=True)
        attempt.failed(f"not queued again: {refusal}", rank=None)
        attempt.ended("FAILED", job_id=job_id, why=refusal)
    return code or 1


@dataclass(frozen=True)
class _Job:
    """The job of this script, and an attempt of its run that is over."""

    attempt: Attempt
    scheduler: Scheduler
    place: Place

    @cached_property
    def nodes(self) -> dict[str, NodeState]:
        return self.scheduler.nodes(self.place.partition)

    def leave_lost_nodes(self) -> None:
        """Exclude the nodes that ended the attempt without a word. If this job has been given one of them again, queue
        it once more, for other nodes; only once, because no node is excluded twice."""
        if not (lost := self._lost_nodes()):
            return
        job_id = self.place.job_id
        out = self._without(self.scheduler.own_job(job_id), lost)
        if not (again := sorted(set(lost) & out & set(self.place.nodes))):
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self.scheduler.requeue(job_id)
            self.scheduler.exclude(job_id, sorted(out))
        except NoAnswer as refusal:
            print(f"{', '.join(again)} cannot be excluded: {refusal.words}", file=sys.stderr, flush=True)
            if self.scheduler.own_job(job_id).is_to_be_queued:
                return
        self.attempt.requeued(job_id)
        if _wait_for_the_end():
            return
        why = f"{', '.join(again)} has ended attempt {self.attempt.number}: {lost[again[0]]}."
        raise RunFailedError("The job is queued again, for other nodes.", why=why, fix="None is needed.")

    def _lost_nodes(self) -> dict[str, str]:
        """Nodes that ended the attempt without a word (after a power cut nobody is left to speak), and why."""
        attempt = self.attempt
        kinds = {event["event"] for event in read_events(attempt.run) if event.get("attempt") == attempt.number}
        is_earlier = attempt.number < first_attempt(attempt.run)  # of an earlier submission
        if is_earlier or {"handed_back", "requeued", "ended", "excluded"} & kinds:
            return {}
        try:  # the message is as old as the attempt
            nodes, began = expand(NODES.read(attempt.logs)), NODES.at(attempt.logs).stat().st_mtime
        except (OSError, UserError):
            return {}
        return culprits(attempt, nodes, self.nodes) or {
            node: f"{when}, while attempt {attempt.number} ran there"
            for node, when in self.scheduler.restarted(nodes, began).items()
        }

    def queue_again(self, how: How, own: OwnJob, env: Mapping[str, str], *, failed: bool) -> str:
        """Queue the job, or another one behind it. Why that was not possible; empty once it is done."""
        attempt, job_id, refusal = self.attempt, self.place.job_id, ""
        if how == "requeue":
            try:
                self.scheduler.requeue(job_id)
            except NoProgram:  # in a container
                REQUEUE.send(attempt.logs, job_id, within=attempt.run.path)
                attempt.requeued(job_id)
                return ""
            except NoAnswer as error:
                if self.scheduler.own_job(job_id).is_to_be_queued:  # else it was taken, and only the answer was lost
                    refusal = f"requeue refused: {error.words}"
            if not refusal:
                attempt.requeued(job_id)
                self.exclude_bad_nodes(own, failed=failed)
                return _wait_for_the_end()
        try:
            link = self.scheduler.next_link(attempt.run, sorted(self._bad_nodes(own, failed=failed)), env)
        except (NoAnswer, OSError) as error:
            return refusal or f"no further job: {error.words if isinstance(error, NoAnswer) else error}"
        print(f"Job {link} goes on when this one has ended.", flush=True)
        attempt.requeued(link)
        return ""

    def exclude_bad_nodes(self, own: OwnJob, *, failed: bool) -> None:
        """Exclude bad nodes from a job that is on its way back into the queue."""
        if (out := self._bad_nodes(own, failed=failed)) == set(own.excluded):
            return
        try:
            self.scheduler.exclude(self.place.job_id, sorted(out))
            print(f"Without {', '.join(sorted(out)) or 'no node'} from now on.", flush=True)
        except NoAnswer as refusal:
            print(f"{', '.join(sorted(out))} cannot be excluded: {refusal.words}", flush=True)

    def _bad_nodes(self, own: OwnJob, *, failed: bool) -> set[str]:
        """Nodes that the next start should do without: as the job does now, and those that have ended this attempt."""
        return self._without(own, culprits(self.attempt, self.place.nodes, self.nodes) if failed else {})

    def _without(self, own: OwnJob, found: Mapping[str, str]) -> set[str]:
        """The user's own exclusions, and bad nodes as long as enough are left: else the job would wait for ever.

        Args:
            found: nodes that have ended the attempt, and why. Those that are excluded are recorded.
        """
        known = excluded_nodes(self.attempt.run)
        bad = [node for node in {**known, **found} if node not in own.required]
        if not known and not found:
            return set(own.excluded)
        asked = set(own.excluded) - set(known)
        kinds = {self.nodes[name].kind for name in self.place.nodes if name in self.nodes}
        usable = {name for name, node in self.nodes.items() if not is_broken(node.state) and node.kind in kinds} - asked
        out = spared(bad, usable, self.place.needed)
        if kept := [node for node in {**known, **found} if node not in out]:
            why = "they are in --nodelist" if set(kept) <= set(own.required) else "too few nodes would be left"
            words = f"{', '.join(kept)} should be left out, but {why}: the run goes on with them."
            print(words, file=sys.stderr, flush=True)  # what `begin` says on stdout is for the shell
        for node in out:
            if node not in known:
                self.attempt.excluded(node, found[node])
        return asked | set(out)


def _wait_for_the_end() -> str:
    """Wait until the scheduler ends this script by a SIGTERM; what is wrong if it does not."""
    ended = signal.sigtimedwait([signal.SIGTERM], END_SECONDS)
    return "" if ended else "SLURM took the requeue and did not act on it"


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a verb. Only batch scripts call it, so that a mistake in the arguments is ours."""
    verb, *rest = arguments
    try:
        if verb == "begin":
            print(begin(env))
            verb = ""  # it goes on
            return 0
        if verb == "preflight":
            attempt = Attempt.named_in(env)
            return pronounce(attempt) if attempt is not None else 0
        how: How = "no" if "--no-requeue" in rest else "chain" if "--chain" in rest else "requeue"
        return end(int(rest[0]), env, how=how)
    except TrainkitError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if verb in ("begin", "end") and env.get(RUN_DIR):
            notify.tell(RunDir(Path(env[RUN_DIR])), env)


if __name__ == "__main__":
    run_program(main)

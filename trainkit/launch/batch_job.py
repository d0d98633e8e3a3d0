"""What a batch script does on its first node before and after its ranks, for submitted runs and plain templates alike,
whatever the scheduler.

    begun=$(python -m trainkit.launch.batch_job begin)      shell lines: the attempt, where its ranks meet, their secret
    python -m trainkit.launch.batch_job preflight           what the check of the nodes found; 3 if one is bad
    python -m trainkit.launch.batch_job end CODE            queue the job again if that is worth it; its exit code

All find the run in TRAINKIT_RUN_DIR. ``end --no-requeue`` leaves a saved run as it is, ``end --chain`` queues another
job instead of this one.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from trainkit import terminal
from trainkit.diagnosis.evidence import RankLog
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.launch.restarts import (
    budget_spent,
    culprits,
    excluded_nodes,
    first_attempt,
    is_broken,
    passing_failure,
    pronounce,
    spared,
)
from trainkit.process import run_program
from trainkit.programs import NoAnswer, NoProgram
from trainkit.ranks.env import Secret, expand, free_port, start_for
from trainkit.run.events import RUN_DIR, Attempt, history_of, read_events
from trainkit.run.folder import RunDir, umask_of
from trainkit.run.process_messages import NODES, REQUEUE
from trainkit.schedulers.base import NodeState, OwnJob, Place, Scheduler, around

END_SECONDS = 300
"""How long a scheduler may take to end a script whose job it has requeued."""
CONTINUE = "TRAINKIT_CONTINUE"
"""Environment variable of the templates: the run folder that a job goes on with, instead of making its own."""

How = Literal["requeue", "chain", "no"]


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
    attempt, nodes = Attempt.begin(run), place.nodelist
    NODES.send(attempt.logs, nodes, within=run.path)
    print(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}", file=sys.stderr, flush=True)
    variables = attempt.environment() | {
        "MASTER_ADDR": expand(nodes)[0],
        "MASTER_PORT": str(free_port(start_for(env))),
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
    attempt = Attempt.named_in(env)
    if attempt is None:
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
    own = job.scheduler.own_job(job_id)
    if not own.is_to_be_queued:  # cancelled, or on its way back already
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
        lost = self._lost_nodes()
        if not lost:
            return
        job_id = self.place.job_id
        out = self._without(self.scheduler.own_job(job_id), lost)
        again = sorted(set(lost) & out & set(self.place.nodes))
        if not again:
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
        return culprits(attempt, nodes, {name: node.state for name, node in self.nodes.items()}) or {
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
        out = self._bad_nodes(own, failed=failed)
        if out == set(own.excluded):
            return
        try:
            self.scheduler.exclude(self.place.job_id, sorted(out))
            print(f"Without {', '.join(sorted(out)) or 'no node'} from now on.", flush=True)
        except NoAnswer as refusal:
            print(f"{', '.join(sorted(out))} cannot be excluded: {refusal.words}", flush=True)

    def _bad_nodes(self, own: OwnJob, *, failed: bool) -> set[str]:
        """Nodes that the next start should do without: as the job does now, and those that have ended this attempt."""
        states = {name: node.state for name, node in self.nodes.items()} if failed else {}
        return self._without(own, culprits(self.attempt, self.place.nodes, states) if failed else {})

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
    if signal.sigtimedwait([signal.SIGTERM], END_SECONDS) is None:
        return "SLURM took the requeue and did not act on it"
    return ""


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a verb. Only batch scripts call it, so that a mistake in the arguments is ours."""
    verb, *rest = arguments
    try:
        if verb == "begin":
            print(begin(env))
            return 0
        if verb == "preflight":
            attempt = Attempt.named_in(env)
            return pronounce(attempt) if attempt is not None else 0
        how: How = "no" if "--no-requeue" in rest else "chain" if "--chain" in rest else "requeue"
        return end(int(rest[0]), env, how=how)
    except TrainkitError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    run_program(main)

"""What a batch script does on its first node before and after its ranks, for submitted runs and plain templates alike,
whatever the scheduler.

    begun=$(python -m trainkit.launch.batch_job begin)      shell lines: the attempt, where its ranks meet, their secret
    python -m trainkit.launch.batch_job preflight           what the check of the nodes found; 3 if one is bad
    python -m trainkit.launch.batch_job end CODE            queue the job again if that is worth it; its exit code

Both find the run in TRAINKIT_RUN_DIR. ``end --no-requeue`` leaves a saved run as it is, ``end --chain`` queues another
job instead of this one.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit import fileio, terminal
from trainkit.diagnosis.evidence import words_of
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
from trainkit.programs import NoAnswer, NoProgram
from trainkit.ranks.env import Secret, expand, free_port, start_for
from trainkit.run.events import RUN_DIR, Attempt, history_of, read_events
from trainkit.run.folder import RunDir, umask_of
from trainkit.schedulers.base import OwnJob, Place, Scheduler, around

END_SECONDS = 300
"""How long a scheduler may take to end a script whose job it has requeued."""
CONTINUE = "TRAINKIT_CONTINUE"
"""Environment variable of the templates: the run folder that a job goes on with, instead of making its own."""
NODES = "nodes"
"""A file among the attempt's logs, as old as the attempt: where it runs."""
MARKER = "requeue"
"""A file among the attempt's logs: asks the batch script, where this runs in a container without scontrol."""

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
    if place.restarts and (why := budget_spent(run)):
        attempt = Attempt(run, run.attempts()[-1])
        attempt.ended("FAILED", job_id=place.job_id, why=why)
        raise RunFailedError(f"{run.name} is not started again: {why}.", why=_LOOK, fix=_resume(run))
    if (before := run.attempts()) and (lost := _lost_nodes(Attempt(run, before[-1]), scheduler, place)):
        _without_lost_nodes(Attempt(run, before[-1]), lost, scheduler, place)
    attempt = Attempt.begin(run)
    nodes = place.nodelist
    fileio.write(attempt.logs / NODES, f"{nodes}\n", run.path)
    print(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}", file=sys.stderr, flush=True)
    variables = attempt.environment() | {
        "MASTER_ADDR": expand(nodes)[0],
        "MASTER_PORT": str(free_port(start_for(env))),
        "TRAINKIT_SECRET": Secret.generate().text,
    }
    umask = f"umask {umask_of(run.path):04o}"  # srun opens the ranks' logs
    return "\n".join([umask, *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())])


def _lost_nodes(attempt: Attempt, scheduler: Scheduler, place: Place) -> dict[str, str]:
    """Nodes that have ended this earlier attempt, without a word: a power cut leaves nobody to speak. And why so."""
    kinds = {event["event"] for event in read_events(attempt.run) if event.get("attempt") == attempt.number}
    if attempt.number < first_attempt(attempt.run):  # of an earlier submission
        return {}
    if {"handed_back", "requeued", "ended", "excluded"} & kinds:
        return {}
    file = attempt.logs / NODES
    try:
        nodes, began = expand(fileio.read_text(file).strip()), file.stat().st_mtime
    except (OSError, UserError):
        return {}
    states = {name: node.state for name, node in scheduler.nodes(place.partition).items()}
    found = culprits(attempt, nodes, states)
    return found or {
        node: f"{when}, while attempt {attempt.number} ran there"
        for node, when in scheduler.restarted(nodes, began).items()
    }


def _without_lost_nodes(attempt: Attempt, lost: Mapping[str, str], scheduler: Scheduler, place: Place) -> None:
    """Write them down. Has this job been given one of them again, it is queued once more, for others; no more often
    than that, because nobody writes down a node twice."""
    job_id = place.job_id
    job = scheduler.own_job(job_id)
    out = _to_exclude(attempt, job, lost, scheduler, place)
    again = sorted(set(lost) & out & set(place.nodes))
    if not again:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        scheduler.requeue(job_id)
        scheduler.exclude(job_id, sorted(out))
    except NoAnswer as refusal:
        print(f"{', '.join(again)} cannot be excluded: {refusal.words}", file=sys.stderr, flush=True)
        if scheduler.own_job(job_id).is_to_be_queued:
            return
    attempt.requeued(job_id)
    if _wait_for_the_end():
        return
    words = f"{', '.join(again)} has ended attempt {attempt.number}: {lost[again[0]]}."
    raise RunFailedError("The job is queued again, for other nodes.", why=words, fix="None is needed.")


_LOOK = "SLURM, a node or the program ends it each time; `python -m jobs.why` looks for the cause."


def _resume(run: RunDir) -> str:
    if not run.plan.is_file():  # of a template
        words = f"{CONTINUE}={shlex.quote(str(run.path))} sbatch"
        return f"`{words}`, with the same arguments as before, goes on from the newest checkpoint."
    return f"`{terminal.command('resume', run.path)}` goes on from the newest checkpoint."


def end(code: int, env: Mapping[str, str], *, how: How) -> int:
    """Write down how the attempt ended, and queue the job again if it was handed back, or failed and may do better.

    Returns the job's exit code: never 0 while something is left to train, for jobs that wait for this one must not
    start.
    """
    # Of a preemption that signals the batch shell too, and of the requeue. Blocked, so that it can be waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    attempt = Attempt.named_in(env)
    if attempt is None:
        return code
    scheduler, place = around(env, attempt.run)
    job_id = place.job_id
    if not attempt.run.config.is_file():  # refused before there was a run that another command would know
        print("\n".join(words_of(attempt.logs / "rank-0.err")), file=sys.stderr, flush=True)
        return code
    newer = attempt.successor()
    if newer is not None:  # SLURM took this node for dead, and has started the job again elsewhere
        print(f"Attempt {newer} has taken over from this one, {attempt.number}: nothing is queued again.", flush=True)
        return code or 1
    life = history_of(attempt.run)
    failure = ""
    if attempt.number not in life.handed_back:
        if life.finished and not code:
            return 0
        code = code or 1
        failure = "" if life.finished else passing_failure(attempt, code)
        if not failure:
            attempt.ended("FAILED", job_id=job_id, exit_codes=[code])
            return code
    what = f"Failed ({failure})" if failure else "Saved"
    if how == "no":
        print(f"{what}; requeue is off. {_resume(attempt.run)}", flush=True)
        attempt.ended("FAILED" if failure else "PREEMPTED", job_id=job_id, exit_codes=[code])
        return code or 1
    job = scheduler.own_job(job_id)
    if not job.is_to_be_queued:  # cancelled, or on its way back already
        print(f"{what}. The job is {job.state}, so it is not queued again.", flush=True)
        _do_without(attempt, job, scheduler, place, failed=bool(code))
        return code or 1
    if failure and failure not in [item.error for item in life.failures if item.attempt == attempt.number]:
        attempt.failed(failure, rank=None)
    words = budget_spent(attempt.run)
    words = words or _queue_again(attempt, how, job, scheduler, place, env, failed=bool(failure))
    if not words:
        return code or 1
    print(f"{what}, and not queued again: {words}. {_resume(attempt.run)}", flush=True)
    attempt.failed(f"not queued again: {words}", rank=None)
    attempt.ended("FAILED", job_id=job_id, why=words)
    return code or 1


def _queue_again(
    attempt: Attempt, how: How, job: OwnJob, scheduler: Scheduler, place: Place, env: Mapping[str, str], *, failed: bool
) -> str:  # fmt: skip
    """Empty once it is done; else why not."""
    job_id, words = place.job_id, ""
    if how == "requeue":
        try:
            scheduler.requeue(job_id)
        except NoProgram:  # in a container
            fileio.write(attempt.logs / MARKER, f"{job_id}\n", attempt.run.path)
            attempt.requeued(job_id)
            return ""
        except NoAnswer as refusal:
            words = f"requeue refused: {refusal.words}"
            if not scheduler.own_job(job_id).is_to_be_queued:  # it was taken, and only the answer was lost
                words = ""
        if not words:
            attempt.requeued(job_id)
            _do_without(attempt, job, scheduler, place, failed=failed)
            return _wait_for_the_end()
    try:
        excluded = sorted(_bad_nodes(attempt, job, scheduler, place, failed=failed))
        link = scheduler.next_link(attempt.run, excluded, env)
    except (NoAnswer, OSError) as refusal:
        return words or f"no further job: {refusal.words if isinstance(refusal, NoAnswer) else refusal}"
    print(f"Job {link} goes on when this one has ended.", flush=True)
    attempt.requeued(link)
    return ""


def _do_without(attempt: Attempt, job: OwnJob, scheduler: Scheduler, place: Place, *, failed: bool) -> None:
    """Exclude bad nodes from a job that is on its way back into the queue."""
    out = _bad_nodes(attempt, job, scheduler, place, failed=failed)
    if out == set(job.excluded):
        return
    try:
        scheduler.exclude(place.job_id, sorted(out))
        print(f"Without {', '.join(sorted(out)) or 'no node'} from now on.", flush=True)
    except NoAnswer as refusal:
        print(f"{', '.join(sorted(out))} cannot be excluded: {refusal.words}", flush=True)


def _bad_nodes(attempt: Attempt, job: OwnJob, scheduler: Scheduler, place: Place, *, failed: bool) -> set[str]:
    """Nodes that the next start should do without: as the job does now, and those that have ended this attempt."""
    if not failed and not excluded_nodes(attempt.run):
        return set(job.excluded)
    return _to_exclude(attempt, job, {} if not failed else None, scheduler, place)


def _to_exclude(
    attempt: Attempt, job: OwnJob, found: Mapping[str, str] | None, scheduler: Scheduler, place: Place
) -> set[str]:
    """The user's own exclusions, and bad nodes as long as enough are left for the job: it would wait for ever.

    Args:
        found: nodes that have ended the attempt, and why; None: those that can be told. They are written down.
    """
    nodes = scheduler.nodes(place.partition)
    mine = place.nodes
    if found is None:
        found = culprits(attempt, mine, {name: node.state for name, node in nodes.items()})
    known = excluded_nodes(attempt.run)
    asked = set(job.excluded) - set(known)
    kinds = {nodes[name].kind for name in mine if name in nodes}
    usable = {name for name, node in nodes.items() if not is_broken(node.state) and node.kind in kinds} - asked
    bad = [node for node in {**known, **found} if node not in job.required]
    out = spared(bad, usable, place.needed)
    if kept := [node for node in {**known, **found} if node not in out]:
        why = "they are in --nodelist" if set(kept) <= set(job.required) else "too few nodes would be left"
        words = f"{', '.join(kept)} should be left out, but {why}: the run goes on with them."
        print(words, file=sys.stderr, flush=True)  # what `begin` says on stdout is for the shell
    for node in out:
        if node not in known:
            attempt.excluded(node, found[node])
    return asked | set(out)


def _wait_for_the_end() -> str:
    """The scheduler ends this script, and says so by a SIGTERM."""
    if signal.sigtimedwait([signal.SIGTERM], END_SECONDS) is None:
        return "SLURM took the requeue and did not act on it"
    return ""


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Called by batch scripts only, so that a mistake in the arguments is ours."""
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
    raise SystemExit(main(sys.argv[1:], os.environ))

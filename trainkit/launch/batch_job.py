"""What a batch script does on its first node before and after its ranks, for submitted runs and plain templates alike.

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

from trainkit import terminal
from trainkit.errors import RunFailedError, TrainkitError
from trainkit.launch import scheduler
from trainkit.launch.preflight import pronounce
from trainkit.launch.restarts import budget_spent, culprits, is_broken, passing_failure
from trainkit.ranks.hostlist import expand
from trainkit.ranks.rendezvous import free_port, start_for
from trainkit.ranks.secret import Secret
from trainkit.records.attempts import RUN_DIR, Attempt, job_of
from trainkit.records.events import read_events
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

END_SECONDS = 300
"""How long SLURM may take to end a script whose job it has requeued."""
MARKER = "requeue"
"""A file among the attempt's logs: asks the batch script, where this runs in a container without scontrol."""

How = Literal["requeue", "chain", "no"]


def begin(env: Mapping[str, str]) -> str:
    """Begin the next attempt; the shell lines that tell the ranks of it.

    Raises:
        RunFailedError: SLURM has started the job again and again, and nothing came of it.
    """
    run = RunDir(Path(env[RUN_DIR]))
    if env.get("SLURM_RESTART_COUNT", "0") != "0" and (why := budget_spent(run)):
        attempt = Attempt(run, run.attempts()[-1])
        attempt.ended("FAILED", job_id=job_of(env), why=why)
        raise RunFailedError(f"{run.name} is not started again: {why}.", why=_LOOK, fix=_resume(run))
    attempt = Attempt.begin(run)
    scheduler.claim_pickle(run, env)
    _note_lost_nodes(attempt, env)
    nodes = env["SLURM_JOB_NODELIST"]
    print(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}", file=sys.stderr, flush=True)
    variables = attempt.environment() | {
        "MASTER_ADDR": expand(nodes)[0],
        "MASTER_PORT": str(free_port(start_for(env))),
        "TRAINKIT_SECRET": Secret.generate().text,
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _note_lost_nodes(attempt: Attempt, env: Mapping[str, str]) -> None:
    """Write down which nodes have ended the attempt before without a word: a power cut leaves nobody to do so then."""
    before = [event for event in read_events(attempt.run) if event.get("attempt") == attempt.number - 1]
    if {"handed_back", "requeued", "ended"} & {event["event"] for event in before}:
        return
    hosts = [str(host).partition(".")[0] for event in before for host in event.get("hosts", ())]
    if hosts and attempt.number:
        for node, why in culprits(attempt, hosts, scheduler.node_states(env.get("SLURM_JOB_PARTITION", ""))).items():
            attempt.excluded(node, why)


_LOOK = "SLURM, a node or the program ends it each time; `python -m jobs.why` looks for the cause."


def _resume(run: RunDir) -> str:
    return f"`{terminal.command('resume', run.path)}` goes on from the newest checkpoint."


def end(code: int, env: Mapping[str, str], *, how: How) -> int:
    """Write down how the attempt ended, and queue the job again if it was handed back, or failed and may do better.

    Returns the job's exit code: never 0 while something is left to train, for jobs that wait for this one must not
    start.
    """
    # Of a preemption that signals the batch shell too, and of the requeue. Blocked, so that it can be waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    attempt, job_id = Attempt.named_in(env), job_of(env)
    if attempt is None or not attempt.run.config.is_file():  # refused before there was a run
        return code
    newer = attempt.successor()
    if newer is not None:  # SLURM took this node for dead, and has started the job again elsewhere
        print(f"Attempt {newer} has taken over from this one, {attempt.number}: nothing is queued again.", flush=True)
        return code or 1
    life = life_of(attempt.run)
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
    state, excluded = scheduler.own_job(job_id)
    if state not in ("RUNNING", ""):  # cancelled, or on its way back already
        print(f"{what}. The job is {state}, so it is not queued again.", flush=True)
        _do_without(attempt, job_id, excluded, env, failed=bool(code))
        return code or 1
    if failure and failure not in [item.error for item in life.failures if item.attempt == attempt.number]:
        attempt.failed(failure, rank=None)
    words = budget_spent(attempt.run) or _queue_again(attempt, how, excluded, env, failed=bool(failure))
    if not words:
        return code or 1
    print(f"{what}, and not queued again: {words}. {_resume(attempt.run)}", flush=True)
    attempt.failed(f"not queued again: {words}", rank=None)
    attempt.ended("FAILED", job_id=job_id, why=words)
    return code or 1


def _queue_again(attempt: Attempt, how: How, excluded: Sequence[str], env: Mapping[str, str], *, failed: bool) -> str:
    """Empty once it is done; else why not."""
    job_id, words = job_of(env), ""
    if how == "requeue":
        if not scheduler.has_scontrol():
            attempt.logs.joinpath(MARKER).write_text(f"{job_id}\n", encoding="utf-8")
            attempt.requeued(job_id)
            return ""
        try:
            scheduler.requeue(job_id)
        except scheduler.NotDone as refusal:
            words = f"requeue refused: {refusal}"
            state, _ = scheduler.own_job(job_id)
            if state not in ("RUNNING", ""):  # it was taken, and only the answer was lost
                words = ""
        if not words:
            attempt.requeued(job_id)
            _do_without(attempt, job_id, excluded, env, failed=failed)
            return _wait_for_the_end()
    try:
        without = sorted({*excluded, *_bad_nodes(attempt, env, failed=failed)})
        link = scheduler.queue_next_link(attempt.run, without, env)
    except (scheduler.NotDone, OSError) as refusal:
        return words if how == "requeue" else f"no further job: {refusal}"
    print(f"Job {link} goes on when this one has ended.", flush=True)
    attempt.requeued(link)
    return ""


def _do_without(
    attempt: Attempt, job_id: str, excluded: Sequence[str], env: Mapping[str, str], *, failed: bool
) -> None:
    """Exclude bad nodes from a job that is on its way back into the queue."""
    bad = _bad_nodes(attempt, env, failed=failed)
    if not set(bad) - set(excluded):
        return
    try:
        scheduler.exclude(job_id, sorted({*excluded, *bad}))
        print(f"Without {', '.join(sorted(bad))} from now on.", flush=True)
    except scheduler.NotDone as refusal:
        print(f"{', '.join(sorted(bad))} cannot be excluded: {refusal}", flush=True)


def _bad_nodes(attempt: Attempt, env: Mapping[str, str], *, failed: bool) -> set[str]:
    """Nodes that this run should do without: those recorded before, and those that have ended this attempt; as long as
    enough are left for it."""
    bad = {node for event in read_events(attempt.run, "excluded") if isinstance(node := event.get("node"), str)}
    if not failed and not bad:
        return set()
    states = scheduler.node_states(env.get("SLURM_JOB_PARTITION", ""))
    found = culprits(attempt, scheduler.nodes_of(env), states) if failed else {}
    needed = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    usable = {node for node, state in states.items() if not is_broken(state)}
    if len(usable - bad - set(found)) < needed:
        print("Too few nodes would be left to do without the bad ones.", flush=True)
        return set()
    for node, why in found.items():
        if node not in bad:
            attempt.excluded(node, why)
    return bad | set(found)


def _wait_for_the_end() -> str:
    """SLURM ends this script, and says so by a SIGTERM."""
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

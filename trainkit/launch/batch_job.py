"""What a batch script does on its first node before and after its ranks, for submitted runs and plain templates alike.

    begun=$(python -m trainkit.launch.batch_job begin)      shell lines: the attempt, where its ranks meet, their secret
    python -m trainkit.launch.batch_job end CODE            requeue what was handed back; exits with the job's own code

Both find the run in TRAINKIT_RUN_DIR. ``end --no-requeue`` leaves a saved run as it is.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.ranks.hostlist import expand
from trainkit.ranks.rendezvous import free_port, start_for
from trainkit.ranks.secret import Secret
from trainkit.records.attempts import RUN_DIR, Attempt
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

ASK_SECONDS = 15.0
"""A scheduler that has not answered by then is asked again."""
PAUSES = (0.0, 2.0, 5.0)
"""Before each of the attempts to ask it something, in seconds."""
END_SECONDS = 300
"""How long SLURM may take to end a script whose job it has requeued."""


def begin(env: Mapping[str, str]) -> str:
    """Begin the next attempt; the shell lines that tell the ranks of it."""
    attempt = Attempt.begin(RunDir(Path(env[RUN_DIR])))
    nodes = env["SLURM_JOB_NODELIST"]
    print(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}", file=sys.stderr, flush=True)
    variables = attempt.environment() | {
        "MASTER_ADDR": expand(nodes)[0],
        "MASTER_PORT": str(free_port(start_for(env))),
        "TRAINKIT_SECRET": Secret.generate().text,
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def end(code: int, env: Mapping[str, str], *, requeue: bool) -> int:
    """Write down how the attempt ended, and queue the job again if it was handed back. The job's exit code.

    It is never 0 while something is left to train: jobs that wait for this one must not start.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a preemption that signals the batch shell too
    attempt, job_id = Attempt.named_in(env), env["SLURM_JOB_ID"]
    if attempt is None or not attempt.run.config.is_file():  # refused before there was a run
        return code
    life = life_of(attempt.run)
    if attempt.number not in life.handed_back:
        if code or not life.finished:
            attempt.ended("FAILED", job_id=job_id, exit_codes=[code])
        return code
    if not requeue:
        print("Saved; requeue is off: `python -m jobs.resume` goes on.", flush=True)
        attempt.ended("PREEMPTED", job_id=job_id)
        return code or 1
    state = _own_state(job_id)
    if state not in ("RUNNING", ""):  # cancelled, or on its way back already
        print(f"Saved. The job is {state}, so it is not queued again.", flush=True)
        return code or 1
    attempt.requeued(job_id)
    words = _ask("scontrol", "requeue", job_id)
    if words is None:
        time.sleep(END_SECONDS)  # SLURM ends this script
        words = "SLURM took the requeue and did not act on it"
    print(f"Saved, and not queued again: {words}. `python -m jobs.resume {attempt.run.path}` goes on.", flush=True)
    attempt.failed(f"requeue refused: {words}", rank=None)
    attempt.ended("FAILED", job_id=job_id)
    return 1


def _own_state(job_id: str) -> str:
    """The job's state by SLURM; empty if SLURM does not answer, which is no reason to lose the rest of a training."""
    for pause in PAUSES:
        time.sleep(pause)
        try:
            done = subprocess.run(
                ["squeue", "-h", "-j", job_id, "-o", "%T"],
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                check=True,
            )
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            continue
    return ""


def _ask(*command: str) -> str | None:
    """Give a command until it is taken: None; or what was said against it the last time."""
    words = ""
    for pause in PAUSES:
        time.sleep(pause)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            words = str(error)
            continue
        if done.returncode == 0:
            return None
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return words


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Called by batch scripts only, so that a mistake in the arguments is ours."""
    verb, *rest = arguments
    if verb == "begin":
        print(begin(env))
        return 0
    return end(int(rest[0]), env, requeue="--no-requeue" not in rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))

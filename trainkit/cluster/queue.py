"""What runs are doing now: asked from SLURM, or from this machine's processes for local runs. Never stored.

A run may have had many jobs. Its state is that of the newest, and it is alive as long as any of them may be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from trainkit import terminal
from trainkit.cluster.adoption import Search, adopt, is_job_of, read_scripts
from trainkit.cluster.recent import ask_seldom, mark
from trainkit.cluster.slurm_jobs import Answer, JobState, ask
from trainkit.cluster.slurm_jobs import run as slurm
from trainkit.errors import UserError
from trainkit.programs import NoAnswer
from trainkit.run import folder as run_folder
from trainkit.run.events import Life, Submission, life_of
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId

ENDING_SECONDS = 60.0
"""How long to wait for a job that is being ended; SLURM gives its tasks 30 s by default."""


def job_states(
    runs: Sequence[RunDir],
    lives: Sequence[Life] | None = None,
    *,
    heard: Callable[[str], None] = lambda command: None,
    aged: Callable[[float], None] | None = None,
) -> list[JobState]:
    """What each run does, with at most two calls to SLURM; two more where a submission was cut short.

    Args:
        lives: those of the runs, where they have been read already.
        heard: told of each call.
        aged: what SLURM has said to this user a moment ago will do, and this is told how many seconds ago that was.
            None: ask anew.
    """
    known = [life_of(run) for run in runs] if lives is None else list(lives)
    search = adopt([(run, life) for run, life in zip(runs, known, strict=True) if life.cut_short], heard=heard)
    known = [life_of(run) if run.path in search.adopted else life for run, life in zip(runs, known, strict=True)]
    newest: dict[str, str] = {}
    earlier: dict[str, str] = {}
    for life in known:
        on_slurm = dict.fromkeys((item.job_id for item in life.submissions if item.executor == "slurm"), mark(life))
        earlier.update(on_slurm)
        newest.update(list(on_slurm.items())[-1:])
    others = {job: said for job, said in earlier.items() if job not in newest}
    if aged is None:
        answer = ask(newest, only_if_queued=others, heard=heard)
    else:
        answer = ask_seldom(newest, others, heard=heard, aged=aged)
    return [_state(run, life, answer, search) for run, life in zip(runs, known, strict=True)]


def job_state(run: RunDir, *, heard: Callable[[str], None] = lambda command: None) -> JobState:
    """What one run does."""
    return job_states([run], heard=heard)[0]


def not_known_as_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
    """Those of the jobs that only the record in the run's folder names: who has written that, may have named any.

    Known are those that this user's own list has, those of which SLURM says that their script is the run's, and
    processes that were started with the run's folder as an argument.
    """
    unknown = [(run, job) for run, job in jobs if not _is_noted(run, job)]
    scripts: Mapping[str, str] = {}
    if any(job.executor == "slurm" for _, job in unknown):
        with suppress(NoAnswer):
            scripts = read_scripts(slurm("squeue", "-h", "-r", "-t", "all", "-u", str(os.geteuid()), "-o", "%i|%o"))
    return [
        (run, job)
        for run, job in unknown
        if not (
            is_job_of(run, job.job_id, scripts.get(job.job_id, ""))
            if job.executor == "slurm"
            else _has_folder_as_argument(process_of(run, job), run)
        )
    ]


def process_of(run: RunDir, job: JobState) -> ProcessId | None:
    """What looks after the ranks of a job that no scheduler knows, by the run's record."""
    return next((item.process for item in life_of(run).submissions if item.job_id == job.job_id), None)


def _is_noted(run: RunDir, job: JobState) -> bool:
    process = process_of(run, job) if job.executor != "slurm" else None
    return run_folder.has_started(run.path, job.executor, job.job_id, process.word() if process is not None else "")


def _has_folder_as_argument(process: ProcessId | None, run: RunDir) -> bool:
    import psutil

    if process is None or not process.is_here() or not process.is_alive():
        return False
    try:
        words = psutil.Process(process.pid).cmdline()
    except psutil.Error:
        return False
    folder = os.path.realpath(run.path)
    folders = {folder, os.path.dirname(folder)} if os.path.isfile(run.path.parent / "sweep.json") else {folder}
    return "trainkit.launch.controller" in words and any(os.path.realpath(word) in folders for word in words)


def require_no_job(run: RunDir, *, force: bool) -> None:
    """Refuse to start on a run whose job lives, or, unless ``force``, may live for all that anybody can tell.

    Waits for one that is just being ended.
    """
    state = job_state(run)
    deadline, pause = time.monotonic() + ENDING_SECONDS, 2.0
    while state.state == "COMPLETING" and time.monotonic() < deadline:  # cancelled a moment ago
        time.sleep(pause)
        pause *= 1.7
        state = job_state(run)
    living = state.living()
    which = ", ".join(job.job_id or "?" for job in living)
    jobs = "job" if len(living) == 1 else "jobs"
    if state.alive == "yes":
        one = next(job for job in living if job.alive == "yes")
        raise UserError(
            f"{run.name} is {one.state} ({jobs} {which}).",
            why="Two jobs on one run would write over each other.",
            fix=f"Wait for it, or `{terminal.command('cancel', run.path)}` first.",
        )
    if state.alive == "unknown" and not force:
        reason = next(job.reason for job in living)
        known = f"{jobs} {which} of {run.name} still {'runs' if len(living) == 1 else 'run'}"
        raise UserError(
            f"Nobody can tell whether {known if living[0].job_id else f'{run.name} has a job'}.",
            why=f"{reason}. Two jobs on one run would write over each other.",
            fix="Ask again later or elsewhere; if you know that it has ended, add --force.",
        )


def _state(run: RunDir, life: Life, answer: Answer, search: Search) -> JobState:
    states = [_of_submission(run, item, answer) for item in reversed(life.submissions)]
    state, *earlier = states or [_without_job(life)]
    lost = search.lost.get(run.path)
    if lost is not None:
        if lost.alive == "no":  # the command that was to submit it came to nothing
            state = replace(state, reason="; ".join(word for word in (state.reason, lost.reason) if word))
        else:
            state, earlier = lost, [state, *earlier]
    also = tuple(job for job in earlier if job.alive != "no")
    return replace(state, also=also) if also else state


def _of_submission(run: RunDir, submission: Submission, answer: Answer) -> JobState:
    if submission.executor != "slurm":
        return _local(run, submission)
    return answer.jobs.get(submission.job_id) or _by_record(submission, answer)


def _without_job(life: Life) -> JobState:
    """A run that nobody submitted: of torchrun, of `jobs.train`. Only its own record speaks of it."""
    if life.finished or life.outcome is not None:
        return JobState("COMPLETED" if life.finished else str(life.outcome), reason="by its own record")
    if life.started:
        return JobState("UNKNOWN", reason="started without jobs.submit, so nobody can be asked")
    return JobState("NOT SUBMITTED")


def _by_record(submission: Submission, answer: Answer) -> JobState:
    """SLURM does not know the job: long after its end where there is no accounting, or it does not answer."""
    is_gone = answer.has_answered
    if submission.finished or submission.ended is not None:
        reason = "by its own record; " + ("SLURM has forgotten the job" if is_gone else answer.complaint)
        state = "COMPLETED" if submission.finished else str(submission.ended)
        return JobState(state, submission.job_id, "slurm", reason, is_gone=is_gone)
    why = answer.complaint or "SLURM does not know the job"
    return JobState("UNKNOWN", submission.job_id, "slurm", why, is_gone=is_gone)


def _local(run: RunDir, submission: Submission) -> JobState:
    job_id, executor, process = submission.job_id, submission.executor or "local", submission.process
    if submission.ended is not None:
        return JobState(submission.ended, job_id, executor)
    if process is None or not process.is_here():
        where = f"it runs on {process.host}; ask there" if process else "its process is not recorded"
        return JobState("UNKNOWN", job_id, executor, where)
    if not process.is_alive():
        again = life_of(run).submission  # it may have ended between the two looks
        if again is not None and again.job_id == job_id and again.ended is not None:
            return JobState(again.ended, job_id, executor)
        return JobState("FAILED", job_id, executor, "the process that ran it is gone without a word")
    if len(run.attempts()) > submission.attempts_before:
        return JobState("RUNNING", job_id, executor, nodes=process.host)
    return JobState("PENDING", job_id, executor, "waits for its turn")

"""This machine: a controller process for each submission, which starts the ranks and looks after them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainkit import fileio
from trainkit.errors import RefusedError
from trainkit.launch.plan import Plan
from trainkit.process import scrubbed
from trainkit.run.events import ProcessId, Submission, cancelled, history_of, submitted
from trainkit.run.folder import RunDir, is_sweep
from trainkit.schedulers.base import Answer, Function, Job, JobState, Scheduler, job_state, pickled, process_of

_CONTROLLER = "trainkit.launch.controller"
PATIENCE_SECONDS = 20.0
"""A local run has less than this to save and end; then it is killed."""
CONTROLLERS: list[subprocess.Popen[bytes]] = []
"""Of the local runs that this process has started. Kept, or Python would warn that they still run when it forgets them;
they are meant to."""


class Local(Scheduler):
    """Processes of this machine; also those that `jobs.launch` and `jobs.join` have started."""

    name, title = "local", "This machine"

    def submit(
        self, folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
    ) -> list[str]:
        """Start a controller that runs the runs one after another and outlives this terminal."""

        def start() -> str:
            log = folder / "logs" / "batch.out"
            fileio.make_folder(log.parent, folder)
            with fileio.append(log, folder) as out:
                CONTROLLERS.append(subprocess.Popen(
                    [sys.executable, "-u", "-m", _CONTROLLER, str(folder), str(cwd)],
                    cwd=runs[0].code,  # the snapshot, so that edits cannot reach the attempts to come
                    env=scrubbed(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                ))  # fmt: skip
            return str(CONTROLLERS[-1].pid)

        before = [len(run.attempts()) for run in runs]  # the job may begin one before it is written down
        job_ids = pickled(folder, runs, function, start)
        controller = ProcessId.of(CONTROLLERS[-1].pid)
        for run, job_id, attempts in zip(runs, job_ids, before, strict=True):
            submitted(run, plan.executor, job_id, controller, attempts_before=attempts)
        return job_ids

    def states(self, jobs: Sequence[Job]) -> Answer:
        return Answer([_state(job.run, job.submission) for job in jobs])

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Those of controllers that were started for the run or its sweep: a home that is full has no list of them."""
        return [(run, job) for run, job in jobs if _is_of(run, process_of(run, job.job_id))]

    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        # Of a sweep, the runs that still wait come first: otherwise the next would start as soon as one has ended.
        for run, state in sorted(jobs, key=lambda job: job[1].state == "RUNNING"):
            if (process := process_of(run, state.job_id)) is None or not process.is_here():
                where = process.host if process else "another machine"
                why = "A local run can only be ended there."
                raise RefusedError(f"{run.name} runs on {where}.", why=why, fix=f"Log in to {where}.")
            cancelled(run, state.job_id)
            in_sweep, deadline = is_sweep(run.path.parent), time.monotonic() + PATIENCE_SECONDS
            if not in_sweep or job_state(run).state == "RUNNING":
                # INT ends one run of a sweep, TERM all that its process has to do.
                process.signal(signal.SIGINT if in_sweep else signal.SIGTERM)
                while job_state(run).alive != "no" if in_sweep else process.is_alive():
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.05)
            if not in_sweep:
                process.signal(signal.SIGKILL)  # its ranks die with it: each has asked the kernel for that
            ended(run, state)

    def by_hand(self, run: RunDir, job: JobState) -> str:
        if (process := process_of(run, job.job_id)) is None:
            return "`ps -fu $USER` shows your processes, and `kill NUMBER` ends one."
        where = "" if process.is_here() else f"on {process.host} "
        return f"{where}`ps -fp {process.pid}` shows what it is, and `kill {process.pid}` ends it."


def _is_of(run: RunDir, process: ProcessId | None) -> bool:
    """Whether a process is the controller of a run, by its command line as the kernel has it."""
    import psutil  # most commands do without both

    from trainkit.launch.submission import whole

    if process is None or not process.is_here() or not process.is_alive():
        return False
    with suppress(psutil.Error):
        words = psutil.Process(process.pid).cmdline()
        folders = {os.path.realpath(whole(Path(word))) for word in words}
        sweep = run.path.parent if is_sweep(run.path.parent) else run.path
        return _CONTROLLER in words and not folders.isdisjoint(map(os.path.realpath, (run.path, sweep)))
    return False


def _state(run: RunDir, submission: Submission) -> JobState:
    def state(name: str, reason: str = "", nodes: str = "") -> JobState:
        return JobState(name, submission.job_id, submission.executor or "local", reason, nodes)

    process = submission.process
    if submission.ended is not None:
        return state(submission.ended)
    if process is None or not process.is_here():
        return state("UNKNOWN", f"it runs on {process.host}; ask there" if process else "its process is not recorded")
    if process.is_alive():
        is_running = len(run.attempts()) > submission.attempts_before
        return state("RUNNING", nodes=process.host) if is_running else state("PENDING", "waits for its turn")
    again = history_of(run).submission  # it may have ended between the two looks
    if again is not None and again.job_id == submission.job_id and again.ended is not None:
        return state(again.ended)
    return state("FAILED", "the process that ran it is gone without a word")


def build() -> Scheduler:
    """Processes of this machine."""
    return Local()

"""This machine: a controller process for each submission, which starts the ranks and looks after them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainkit.cluster.job_states import job_state, process_of
from trainkit.cluster.pickles import PYTHON_FLAGS, environment_of_ranks, pickled, thread_variables
from trainkit.cluster.plan import Plan, whole
from trainkit.cluster.scheduler import Function, Job, JobState, QueueAnswer, Scheduler
from trainkit.common import fileio
from trainkit.common.accelerators import mask_variables
from trainkit.common.errors import RefusedError
from trainkit.run.events import cancelled, submitted
from trainkit.run.folder import RunDir, is_sweep
from trainkit.run.history import Submission, history_of
from trainkit.run.run_lease import ProcessId

_CONTROLLER = "trainkit.launch.controller"
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that a controller takes as requests."""
PATIENCE_SECONDS = 20.0
"""A local run has less than this to save and end; then it is killed."""
CONTROLLERS: list[subprocess.Popen[bytes]] = []
"""Controllers that this process has started. They outlive it; Python would warn of one that it forgets."""


class Local(Scheduler):
    """Processes of this machine; also those that `jobs.launch` and `jobs.join` have started."""

    name = "local"
    title = "This machine"

    def submit(
        self, folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
    ) -> list[str]:
        """Start a controller that runs the runs one after another and outlives this terminal."""

        own = environment_of_ranks(runs[0], plan, env)
        if plan.side.count == 1:  # else it has yet to take its share of the machine
            own |= thread_variables(plan, plan.world_size, env)
            if plan.nodes == 1:
                own |= mask_variables(env, 0, plan.gpus_per_node)

        def start() -> str:
            log = folder / "logs" / "batch.out"
            fileio.make_folder(log.parent, folder)
            # A signal that comes before the controller has its handlers must wait for these.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
            try:
                with fileio.append(log, folder) as out:
                    CONTROLLERS.append(subprocess.Popen(
                        [sys.executable, *PYTHON_FLAGS, "-m", _CONTROLLER, str(folder), str(cwd)],
                        cwd=runs[0].code, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                        start_new_session=True,
                    ))  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return str(CONTROLLERS[-1].pid)

        before = [len(run.attempts()) for run in runs]  # the job may begin one before it is written down
        job_ids = pickled(folder, runs, function, start)
        controller = ProcessId.of(CONTROLLERS[-1].pid)
        for run, job_id, attempts in zip(runs, job_ids, before, strict=True):
            submitted(run, plan.executor, job_id, controller, attempts_before=attempts)
        return job_ids

    def states(self, jobs: Sequence[Job]) -> QueueAnswer:
        return QueueAnswer([_state(job.run, job.submission) for job in jobs])

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Select the jobs whose controllers were started for the run or its sweep: a full home has no list of them."""
        return [(run, job) for run, job in jobs if _is_of(run, process_of(run, job.job_id))]

    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        processes: dict[tuple[RunDir, str], ProcessId] = {}
        for run, state in jobs:  # before one of them is ended
            process = process_of(run, state.job_id)
            if process is None or not process.is_here():
                where = "another machine" if process is None else process.host
                why = "A local run can only be ended there."
                raise RefusedError(f"{run.name} runs on {where}.", why=why, fix=f"Log in to {where}.")
            processes[run, state.job_id] = process
        # Runs of a sweep that still wait come first: otherwise the next would start as soon as one has ended.
        for run, state in sorted(jobs, key=lambda job: job[1].state == "RUNNING"):
            process = processes[run, state.job_id]
            cancelled(run, state.job_id)
            deadline = time.monotonic() + PATIENCE_SECONDS
            if not is_sweep(run.path.parent):
                process.signal(signal.SIGTERM)
                while process.is_alive() and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.signal(signal.SIGKILL)  # its ranks die with it: each has asked the kernel for that
            elif job_state(run).state == "RUNNING":
                process.signal(signal.SIGINT)  # TERM would end the rest of the sweep as well
                while job_state(run).alive != "no" and time.monotonic() < deadline:
                    time.sleep(0.05)
            ended(run, state)

    def by_hand(self, run: RunDir, job: JobState) -> str:
        process = process_of(run, job.job_id)
        if process is None:
            return "`ps -fu $USER` shows your processes, and `kill NUMBER` ends one."
        where = "" if process.is_here() else f"on {process.host} "
        return f"{where}`ps -fp {process.pid}` shows what it is, and `kill {process.pid}` ends it."


def _is_of(run: RunDir, process: ProcessId | None) -> bool:
    """Return True if a process is the controller of a run, by its command line as the kernel has it."""
    import psutil  # most commands do without

    if process is None or not process.is_here() or not process.is_alive():
        return False
    with suppress(psutil.Error):
        words = psutil.Process(process.pid).cmdline()
        folders = [os.path.realpath(whole(Path(word))) for word in words]
        is_own = os.path.realpath(run.path) in folders
        is_of_sweep = is_sweep(run.path.parent) and os.path.realpath(run.path.parent) in folders
        return _CONTROLLER in words and (is_own or is_of_sweep)
    return False


def _state(run: RunDir, submission: Submission) -> JobState:
    def state(name: str, reason: str = "", nodes: str = "") -> JobState:
        return JobState(name, submission.job_id, submission.executor or "local", reason, nodes)

    process = submission.process
    if submission.ended is not None:
        return state(submission.ended)
    if process is None:
        return state("UNKNOWN", "its process is not recorded")
    if not process.is_here():
        return state("UNKNOWN", f"it runs on {process.host}; ask there")
    if process.is_alive():
        if len(run.attempts()) > submission.attempts_before:
            return state("RUNNING", nodes=process.host)
        return state("PENDING", "waits for its turn")
    again = history_of(run).submission  # it may have ended between the two looks
    if again is not None and again.job_id == submission.job_id and again.ended is not None:
        return state(again.ended)
    return state("FAILED", "its process ended without a message")


def build() -> Scheduler:
    """Processes of this machine."""
    return Local()

"""Handing jobs over. The only file that knows submitit: its pickles, job objects, arrays, and the sbatch call.

Each task's pickle holds one path. The script's text, signals, requeueing and logs are ours (see `batch_script` and
`controller`), because submitit's would save inside a signal handler and loses the work of a preempted job.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from trainkit import fileio, programs, terminal
from trainkit.cluster.adoption import SBATCH_SECONDS
from trainkit.errors import SchedulerError
from trainkit.launch.environment import scrubbed
from trainkit.launch.scheduler import job_id_in, unclaimed
from trainkit.run.folder import RunDir, as_open_as
from trainkit.run.lease import ProcessId

CONTROLLERS: list[subprocess.Popen[bytes]] = []
"""Of the local runs that this process has started. Kept, or Python would warn that they still run when it forgets them;
they are meant to."""


# What a client of SLURM's says that has sent its request and got no answer, or half of one.
_NO_ANSWER = re.compile(
    r"socket timed out|unable to contact|zero bytes|communication|connection (refused|reset|timed out)|broken pipe"
    r"|transport endpoint|i/o error|failure\)|resource temporarily unavailable|temporarily unable",
    re.IGNORECASE,
)


class SbatchError(SchedulerError):
    """sbatch has failed, or has not said which job it has queued."""

    is_answer = False
    """The scheduler, or sbatch before it has asked, has said no."""


def submit_to_slurm(
    folder: Path,
    runs: Sequence[RunDir],
    function: Callable[[str], str],
    script: Path,
    *,
    nodes: int,
    ntasks_per_node: int,
    env: Mapping[str, str],
) -> list[str]:
    """Queue ``script`` with sbatch: one job, or one array with a task for each run. Returns the job id of each run.

    Raises:
        SbatchError: it failed; with its own words.
    """
    executor = _Batch(folder / ".submitit", script, env)
    executor.update_parameters(nodes=nodes, ntasks_per_node=ntasks_per_node)
    return [job.job_id for job in executor.submit_each(function, runs)]


def submit_locally(
    folder: Path,
    runs: Sequence[RunDir],
    function: Callable[[str], str],
    *,
    tasks: int,
    cwd: Path,
    env: Mapping[str, str],
) -> tuple[list[str], ProcessId]:
    """Start a controller process on this machine that runs the runs one after another and outlives this terminal.

    Returns the job id of each run, and the controller.
    """
    executor = _Local(folder / ".submitit", runs[0], cwd, tasks, env)
    jobs = executor.submit_each(function, runs)
    return [job.job_id for job in jobs], ProcessId.of(CONTROLLERS[-1].pid)


class _PickleEach:
    """One command for all runs, and a pickle for each of them.

    submitit's own arrays are made by a plain copy of its executor, which would forget our script.
    """

    folder: Path
    job_class: Any

    def submit_each(self, function: Callable[[str], str], runs: Sequence[RunDir]) -> list[Any]:
        """Submit ``function(path)`` for every run."""
        with as_open_as(self.folder.parent):  # submitit's files, SLURM's (it takes the umask over), the ranks'
            return self._submit_each(function, runs)

    def _submit_each(self, function: Callable[[str], str], runs: Sequence[RunDir]) -> list[Any]:
        pickles = []
        for index, run in enumerate(runs):
            path = self.folder / unclaimed(index)
            utils.DelayedSubmission(function, str(run.path)).dump(path)
            pickles.append(path)
        # Should this fail, the job may be there all the same: it claims its own.
        first = self._submit_command(self._submitit_command_str)  # type: ignore[attr-defined]
        jobs = [first] if len(runs) == 1 else [self._member(first, index) for index in range(len(runs))]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _member(self, first: Any, index: int) -> Any:
        return self.job_class(folder=self.folder, job_id=f"{first.job_id}_{index}", tasks=list(range(first.num_tasks)))


class _Batch(_PickleEach, SlurmExecutor):
    """submitit's SLURM executor with our script, and sbatch called without the variables of a job around it."""

    def __init__(self, folder: Path, script: Path, env: Mapping[str, str]) -> None:
        fileio.make_folder(folder, folder.parent)  # submitit would make it as open as the umask has it
        super().__init__(folder)
        self._script, self._env = script, scrubbed(env)

    def _submit_command(self, command: str) -> Any:
        call = ["sbatch", "--parsable", str(self._script)]
        try:
            answer = programs.ask(call, env=self._env, seconds=SBATCH_SECONDS)
        except programs.NoAnswer as error:
            raise _failed(error.words) from None
        if answer.code:
            killed = answer.code < 0 or 128 < answer.code <= 192  # 255 is its own, for an option that it does not know
            refusal = _failed(answer.words.replace("sbatch: ", ""))
            refusal.is_answer = not killed and bool(answer.err.strip()) and not _NO_ANSWER.search(answer.words)
            raise refusal
        if not (job_id := job_id_in(answer.out)):
            words = repr(terminal.one_line(answer.out, 200))
            raise SbatchError("sbatch gave no job id.", why=words, fix="`python -m jobs.status` looks for it.")
        return self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))


def _failed(words: str) -> SbatchError:
    return SbatchError("sbatch refused the job.", why=words, fix="`--dry-run` shows what is submitted.")


class _Local(_PickleEach, LocalExecutor):
    """submitit's local executor on simulated nodes (its own refuses more than one), by a controller of ours."""

    def __init__(self, folder: Path, first: RunDir, cwd: Path, tasks: int, env: Mapping[str, str]) -> None:
        fileio.make_folder(folder, folder.parent)
        super().__init__(folder)
        self._first, self._cwd, self._tasks, self._env = first, cwd, tasks, env

    def _num_tasks(self) -> int:
        return self._tasks

    def _submit_command(self, command: str) -> LocalJob[Any]:
        run_folder = self.folder.parent
        log = run_folder / "logs" / "batch.out"
        fileio.make_folder(log.parent, run_folder)
        with fileio.append(log, run_folder) as out:
            controller = subprocess.Popen(
                [sys.executable, "-u", "-m", "trainkit.launch.controller", str(run_folder), str(self._cwd)],
                cwd=self._first.code,  # the snapshot, so that edits cannot reach the attempts to come
                env=scrubbed(self._env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        CONTROLLERS.append(controller)
        return LocalJob(
            folder=self.folder, job_id=str(controller.pid), process=controller, tasks=list(range(self._tasks))
        )

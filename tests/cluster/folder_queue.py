"""A scheduler of somebody's own: a queue in a folder. A job is a file, and a worker runs the oldest, one at a time.

``python folder_queue.py FOLDER`` is the worker.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import Function, Job, JobPlace, JobState, OwnJob, QueueAnswer, Scheduler
from trainkit.run.events import cancelled, submitted
from trainkit.run.folder import RunDir

SCRIPT = """#!/bin/bash
cd "$QUEUED_FROM"
export TRAINKIT_RUN_DIR PYTHONPATH="$TRAINKIT_RUN_DIR/code:$PYTHONPATH"
job() {{ {python} -P -m trainkit.launch.batch_job "$@"; }}
begun=$(job begin) || exit
eval "$begun"
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
trap : USR2 TERM
logs="$TRAINKIT_RUN_DIR/logs/$TRAINKIT_ATTEMPT"
rc=0
(trap "" USR2; exec {python} -m jobs.train "$TRAINKIT_RUN_DIR" --allow-code) \\
    >"$logs/rank-0.out" 2>"$logs/rank-0.err" || rc=$?
job end "$rc"
"""


class FolderQueue(Scheduler):
    title, batch = "The folder queue", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def script(self, plan: Plan, folder: Path, cwd: Path, points: int = 1) -> str:
        return SCRIPT.format(python=sys.executable)

    def submit(
        self, folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
    ) -> list[str]:
        ids = []
        for run in runs:
            ids.append(str(1 + len(list(self._folder.glob("*")))))
            facts = {"script": str(folder / "submit.sbatch"), "run": str(run.path), "cwd": str(cwd), "state": "PENDING"}
            write(self._folder / ids[-1], facts)
            submitted(run, plan.executor, ids[-1])
        return ids

    def states(self, jobs: Sequence[Job]) -> QueueAnswer:
        return QueueAnswer([self._state(job.submission.job_id) for job in jobs])

    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        for run, job in jobs:
            cancelled(run, job.job_id)
            facts = read(self._folder / job.job_id)
            pid = facts.get("pid")
            write(self._folder / job.job_id, {**facts, "state": "COMPLETING" if pid else "CANCELLED"})
            if pid:
                os.killpg(pid, signal.SIGTERM)
            ended(run, job)

    def place(self, env: Mapping[str, str]) -> JobPlace:
        return JobPlace(env.get("QUEUED_AS", ""), ("localhost",), "localhost")

    def own_job(self, job_id: str) -> OwnJob:
        return OwnJob(read(self._folder / job_id)["state"])

    def requeue(self, job_id: str) -> None:
        facts = read(self._folder / job_id)
        write(self._folder / job_id, {**facts, "state": "PENDING", "pid": None})
        os.killpg(facts["pid"], signal.SIGTERM)

    def _state(self, job_id: str) -> JobState | None:
        if not (self._folder / job_id).is_file():
            return None
        state = read(self._folder / job_id)["state"]
        ahead = sum(read(file)["state"] in ("PENDING", "RUNNING") for file in self._folder.glob("*")) - 1
        return JobState(state, job_id, self.name, f"{ahead} jobs are before it" if state == "PENDING" else "")


def build() -> Scheduler:
    """The queue in the folder FOLDER_QUEUE."""
    return FolderQueue(Path(os.environ["FOLDER_QUEUE"]))


def read(file: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts


def write(file: Path, facts: Mapping[str, Any]) -> None:
    new = file.with_name(f".{file.name}")
    new.write_text(json.dumps(facts))
    new.rename(file)


def work(folder: Path) -> None:
    while True:
        waiting = [file for file in sorted(folder.glob("[0-9]*")) if read(file)["state"] == "PENDING"]
        if not waiting:
            time.sleep(0.05)
            continue
        file, facts = waiting[0], read(waiting[0])
        env = {**os.environ, "QUEUED_AS": file.name, "TRAINKIT_RUN_DIR": facts["run"], "QUEUED_FROM": facts["cwd"]}
        with subprocess.Popen(["bash", facts["script"]], env=env, start_new_session=True) as process:
            write(file, {**facts, "state": "RUNNING", "pid": process.pid})
            code = process.wait()
        state = read(file)["state"]
        if state in ("RUNNING", "COMPLETING"):  # else it was queued again
            ended = "CANCELLED" if state == "COMPLETING" else "FAILED" if code else "COMPLETED"
            write(file, {**facts, "state": ended})


if __name__ == "__main__":
    work(Path(sys.argv[1]))

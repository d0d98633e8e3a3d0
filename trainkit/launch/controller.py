"""What SLURM does for a job, done by one process for a local one: ``python -m trainkit.launch.controller FOLDER CWD``.

FOLDER is a run, or a sweep whose runs are its folders 0, 1, 2, ... For each run the controller supervises an attempt,
and starts the next one when the ranks have saved and handed back, or failed of what another start may mend: within the
same budgets as on SLURM, and as `launch.requeue` says.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.launch.batch_script import TASK
from trainkit.launch.environment import gpu_mask, python_path, scrubbed
from trainkit.launch.plan import Plan
from trainkit.launch.processes import Rank, caught_signals
from trainkit.launch.restarts import budget_spent, passing_failure
from trainkit.launch.supervise import SIGNALS, Limits, Requests, supervise
from trainkit.ranks.env import Secret, free_port
from trainkit.run.events import Attempt, life_of, never_began
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import restore_code
from trainkit.site.profile import local_cpus

CANCEL_SECONDS = 10.0
"""After a cancel, how long the ranks have to save before they are killed."""


@dataclass(frozen=True)
class Job:
    """A job's id, the folder with its pickle, and where its ranks run."""

    id: str
    pickles: Path
    cwd: Path


def run_to_its_end(run: RunDir, plan: Plan, job: Job, requests: Requests) -> str:
    """All attempts of one run. The state it ended in, in SLURM's words."""
    limits = Limits(plan.time_limit_seconds, plan.lead_seconds, plan.hang_seconds, CANCEL_SECONDS)
    while True:
        restore_code(run)
        attempt = Attempt.begin(run)
        ending = supervise(attempt, ranks_of(attempt, plan, job, os.environ), limits, requests, cwd=job.cwd)
        state = "CANCELLED" if requests.cancel else ending.state
        failure = passing_failure(attempt, 1) if state == "FAILED" else ""
        spent = ""
        if plan.requeue and (failure or state == "PREEMPTED"):
            spent = budget_spent(run)
            if not spent:
                attempt.requeued(job.id)
                print(f"Attempt {attempt.number}: {failure or 'saved'}; it goes on with the next.", flush=True)
                continue
            state = "FAILED"
            if not failure:
                attempt.failed(f"not queued again: {spent}", rank=None)
            print(f"{run.path.name} is not started again: {spent}.", flush=True)
        attempt.ended(state, job_id=job.id, exit_codes=list(ending.codes), **({"why": spent} if spent else {}))
        return state


def ranks_of(attempt: Attempt, plan: Plan, job: Job, env: Mapping[str, str]) -> list[Rank]:
    """Commands and environments of an attempt's ranks, on as many simulated nodes as planned."""
    per_node, world_size = plan.ntasks_per_node, plan.world_size
    common = scrubbed(env) | {
        **attempt.environment(),
        "TRAINKIT_SIMULATED_NODES": str(plan.nodes),
        "TRAINKIT_SECRET": Secret.generate().text,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": python_path(attempt.run.code, env),
        # Without this every rank starts as many threads as there are cores, and they get in one another's way.
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(local_cpus() // world_size, 1)),
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job.id,
        "SUBMITIT_LOCAL_NTASKS": str(world_size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": str(plan.nodes),
    }
    ranks = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, per_node)
        # submitit would not write its result over half of one that a killed attempt has left.
        (job.pickles / f"{job.id}_{rank}_result.pkl.save_tmp").unlink(missing_ok=True)
        own = {
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(local_rank),
            "SUBMITIT_LOCAL_NODEID": str(node),
            "CUDA_VISIBLE_DEVICES": gpu_mask(env.get("CUDA_VISIBLE_DEVICES"), node, plan.gpus_per_node),
        }
        command = [sys.executable, "-u", "-c", TASK, str(job.pickles)]
        files = (attempt.logs / f"rank-{rank}.out", attempt.logs / f"rank-{rank}.err")
        ranks.append(Rank(command, common | own, *files))
    return ranks


def _one(run: RunDir, plan: Plan, job: Job, requests: Requests) -> str:
    submission = life_of(run).submission
    if requests.cancel_all or (submission is not None and submission.cancelled):
        never_began(run, job.id, "CANCELLED")
        return "CANCELLED"
    requests.cancel = requests.preempt = requests.kill = False  # those were for the run before it
    try:
        return run_to_its_end(run, plan, job, requests)
    except Exception:
        traceback.print_exc()
        never_began(run, job.id, "FAILED")
        return "FAILED"


def main(folder: Path, cwd: Path) -> int:
    """Run what is in ``folder``; 0 if all of it completed."""
    plan = Plan.read(folder / "plan.json")
    sweep = not (folder / "config.yaml").exists()
    points = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    runs = points if sweep else [folder]
    requests, states = Requests(), []
    print(f"{len(runs)} run{'s' * sweep} on {socket.gethostname()}, process {os.getpid()}")
    with caught_signals(SIGNALS, requests.note):
        for index, path in enumerate(runs):
            job = Job(f"{os.getpid()}_{index}" if sweep else str(os.getpid()), folder / ".submitit", cwd)
            states.append(_one(RunDir(path.resolve() if sweep else path), plan, job, requests))
            print(f"{path.name}: {states[-1]}")
    return 0 if set(states) == {"COMPLETED"} else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))

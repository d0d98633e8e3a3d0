"""What starts ranks on a machine without a scheduler, and goes on with the next attempt: for a local job, and for each
node of `jobs.launch`.

``python -m trainkit.launch.controller FOLDER CWD`` does for a local job what SLURM does. FOLDER is
a run, or a sweep whose runs are its folders 0, 1, 2, ... For each run the controller supervises an attempt, and starts
the next one when the ranks have saved and handed back, or failed of what another start may mend: within the same
budgets as on SLURM, and as `launch.requeue` says.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit import fileio
from trainkit.launch.containers import CLIENT
from trainkit.launch.plan import Plan
from trainkit.launch.restarts import budget_spent, passing_failure
from trainkit.launch.supervisor import SIGNALS, Ending, Limits, Rank, Requests, caught_signals, supervise
from trainkit.programs import python_path, scrubbed
from trainkit.ranks.env import Secret, free_port
from trainkit.run.events import Attempt, history_of, never_began, submitted
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.run.snapshot import restore_code
from trainkit.schedulers.base import TASK
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


def gpu_mask(inherited: str | None, node: int, gpus_per_node: int) -> str:
    """CUDA_VISIBLE_DEVICES of a simulated node: its part of the devices that were visible; none for zero GPUs."""
    first, last = node * gpus_per_node, (node + 1) * gpus_per_node
    devices = [str(index) for index in range(last)] if inherited is None else inherited.split(",")
    return ",".join(devices[first:last])


def _one(run: RunDir, plan: Plan, job: Job, requests: Requests) -> str:
    submission = history_of(run).submission
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


@dataclass(frozen=True)
class Node:
    """Which node this is, and where all of them meet."""

    node_rank: int
    plan: Plan
    master_addr: str
    master_port: int
    secret: str
    """Known to the nodes of this run and to nobody else."""

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.plan.ntasks_per_node

    def rank_variables(self, local_rank: int) -> dict[str, str]:
        """What tells a rank its place among all."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.plan.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.plan.ntasks_per_node),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def run_node(run: RunDir, node: Node, env: Mapping[str, str]) -> Ending:
    """Train this node's share to its end. Node 0 also shows what rank 0 prints.

    The first INT, TERM or USR2 asks the ranks to save and end; another one ends them. A client that is gone asks them
    too.
    """
    me, plan = ProcessId.of(os.getpid()), node.plan
    submitted(run, "launch", str(me.pid), me)
    attempt = Attempt.begin(run, node_rank=node.node_rank)
    common = scrubbed(env) | {
        **attempt.environment(),
        "TRAINKIT_SECRET": node.secret,
        "PYTHONPATH": python_path(run.code, env),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(local_cpus() // plan.ntasks_per_node, 1)),
    }
    if not plan.gpus_per_node:
        common["CUDA_VISIBLE_DEVICES"] = ""
    # Whether the run's own code may be run was decided by whoever called this.
    older = not (run.code / "trainkit" / "__main__.py").is_file()  # than the command of its own
    entry = ["jobs.train"] if older else ["trainkit", "train"]
    command = [sys.executable, "-u", "-m", *entry, str(run.path), "--allow-code"]
    ranks = []
    for local_rank in range(plan.ntasks_per_node):
        log = attempt.logs / f"rank-{node.first_rank + local_rank}"
        files = (log.with_suffix(".out"), log.with_suffix(".err"))
        ranks.append(Rank(command, common | node.rank_variables(local_rank), *files))
    shown = _Shown(*((ranks[0].stdout, ranks[0].stderr) if node.node_rank == 0 else (None, None)))
    limits = Limits(time=math.inf, lead=0.0, hang=plan.hang_seconds, cancel=plan.lead_seconds)
    requests = Requests()
    client = ProcessId.seen_from_here(env.get(CLIENT, ""))

    def tick() -> None:
        shown.update()
        requests.cancel |= client is not None and not client.is_alive()

    with caught_signals(SIGNALS, requests.note):
        ending = supervise(attempt, ranks, limits, requests, first_rank=node.first_rank, tick=tick)
    shown.update()
    attempt.ended(ending.state, job_id=str(me.pid), exit_codes=list(ending.codes))
    return ending


class _Shown:
    """Prints what is written into two files, as it comes."""

    def __init__(self, stdout: Path | None, stderr: Path | None) -> None:
        self._files = [(stdout, sys.stdout), (stderr, sys.stderr)]
        self._offsets = [0, 0]

    def update(self) -> None:
        for index, (path, stream) in enumerate(self._files):
            if path is not None and path.is_file():
                while new := self._new(path, self._offsets[index]):
                    self._offsets[index] += len(new)
                    stream.write(new.decode(errors="replace"))
                    stream.flush()

    @staticmethod
    def _new(path: Path, offset: int) -> bytes:
        with fileio.open_regular(path) as file:
            file.seek(offset)
            return file.read(1 << 20)


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

"""Starts ranks on a machine without a scheduler, attempt after attempt: of a local job, and of a node of `jobs.launch`.

``python -m trainkit.launch.controller FOLDER CWD`` does for a local job what SLURM does. FOLDER is a run, or a sweep
whose runs are its folders 0, 1, 2, ... The controller supervises an attempt of each run, and starts the next one when
the ranks have saved and handed back, or failed of something that another start may mend: within the same budgets as on
SLURM, and as `launch.requeue` says.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.launch.containers import CLIENT
from trainkit.launch.plan import Plan
from trainkit.launch.restarts import budget_spent, passing_failure
from trainkit.launch.supervisor import Ending, Limits, Rank, Requests, signal_requests, supervise
from trainkit.diagnosis.evidence import RankLog
from trainkit.process import run_program, visible_cpus
from trainkit.programs import python_path, scrubbed
from trainkit.ranks import Secret, free_port
from trainkit.run.events import Attempt, history_of, never_began, submitted
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.run.snapshot import restore_code
from trainkit.schedulers.base import TASK

CANCEL_SECONDS = 10.0
"""After a cancel, how long the ranks have to save before they are killed."""


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run what is in FOLDER; 0 if all of it completed."""
    folder, cwd = map(Path, arguments)
    plan = Plan.read(folder / "plan.json")
    sweep = not (folder / "config.yaml").exists()
    points = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    runs = points if sweep else [folder]
    states = []
    print(f"{len(runs)} run{'s' * sweep} on {socket.gethostname()}, process {os.getpid()}")
    with signal_requests() as requests:
        for index, path in enumerate(runs):
            run = RunDir(path.resolve() if sweep else path)
            job_id = f"{os.getpid()}_{index}" if sweep else str(os.getpid())
            submission = history_of(run).submission
            if requests.cancel_all or (submission is not None and submission.cancelled):
                state = "CANCELLED"
                never_began(run, job_id, state)
            else:
                requests.cancel = requests.preempt = requests.kill = False  # those were for the run before it
                try:
                    state = _run_to_its_end(run, plan, job_id, folder / ".submitit", cwd, requests, env)
                except Exception:
                    traceback.print_exc()
                    state = "FAILED"
                    never_began(run, job_id, state)
            states.append(state)
            print(f"{path.name}: {state}")
    return 0 if set(states) == {"COMPLETED"} else 1


def _run_to_its_end(
    run: RunDir, plan: Plan, job_id: str, pickles: Path, cwd: Path, requests: Requests, env: Mapping[str, str]
) -> str:
    """Run all attempts of one run. The state that it ended in, in SLURM's words."""
    limits = Limits(plan.time_limit_seconds, plan.lead_seconds, plan.hang_seconds, CANCEL_SECONDS)
    while True:
        restore_code(run)
        attempt = Attempt.begin(run)
        ending = supervise(attempt, _ranks_of(attempt, plan, job_id, pickles, env), limits, requests, cwd=cwd)
        state = "CANCELLED" if requests.cancel else ending.state
        failure = passing_failure(attempt, 1) if state == "FAILED" else ""
        spent = ""
        if plan.requeue and (failure or state == "PREEMPTED"):
            spent = budget_spent(run)
            if not spent:
                attempt.requeued(job_id)
                print(f"Attempt {attempt.number}: {failure or 'saved'}; it goes on with the next.", flush=True)
                continue
            state = "FAILED"
            if not failure:
                attempt.failed(f"not queued again: {spent}", rank=None)
            print(f"{run.path.name} is not started again: {spent}.", flush=True)
        attempt.ended(state, job_id=job_id, exit_codes=list(ending.codes), **({"why": spent} if spent else {}))
        return state


def _ranks_of(attempt: Attempt, plan: Plan, job_id: str, pickles: Path, env: Mapping[str, str]) -> list[Rank]:
    """Commands and environments of an attempt's ranks, on as many simulated nodes as planned."""
    common = _common(attempt, attempt.run.code, Secret.generate().text, plan.world_size, env) | {
        "TRAINKIT_SIMULATED_NODES": str(plan.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job_id,
        "SUBMITIT_LOCAL_NTASKS": str(plan.world_size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": str(plan.nodes),
    }
    command = [sys.executable, "-u", "-c", TASK, str(pickles)]
    ranks = []
    for rank in range(plan.world_size):
        node, local_rank = divmod(rank, plan.ntasks_per_node)
        # submitit would not write its result over half of one that a killed attempt has left.
        (pickles / f"{job_id}_{rank}_result.pkl.save_tmp").unlink(missing_ok=True)
        own = {
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(local_rank),
            "SUBMITIT_LOCAL_NODEID": str(node),
            "CUDA_VISIBLE_DEVICES": gpu_mask(env.get("CUDA_VISIBLE_DEVICES"), node, plan.gpus_per_node),
        }
        ranks.append(Rank(command, common | own, attempt.logs / f"rank-{rank}"))
    return ranks


def _common(attempt: Attempt, code: Path, secret: str, ranks_here: int, env: Mapping[str, str]) -> dict[str, str]:
    return scrubbed(env) | {
        **attempt.environment(),
        "TRAINKIT_SECRET": secret,
        "PYTHONPATH": python_path(code, env),
        # Without this every rank starts as many threads as there are cores, and they get in one another's way.
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(visible_cpus() // ranks_here, 1)),
    }


def gpu_mask(inherited: str | None, node: int, gpus_per_node: int) -> str:
    """CUDA_VISIBLE_DEVICES of a simulated node: its part of the devices that were visible; none for zero GPUs."""
    first, last = node * gpus_per_node, (node + 1) * gpus_per_node
    devices = [str(index) for index in range(last)] if inherited is None else inherited.split(",")
    return ",".join(devices[first:last])


@dataclass(frozen=True)
class Node:
    """Which node of `jobs.launch` this is, and where all of them meet."""

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
        """The variables that tell a rank its place among all."""
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
    """Train this node's share to its end. Node 0 also prints what rank 0 prints.

    The first INT, TERM or USR2 asks the ranks to save and end, as does the end of the client; another one ends them.
    """
    me, plan = ProcessId.of(os.getpid()), node.plan
    submitted(run, "launch", str(me.pid), me)
    attempt = Attempt.begin(run, node_rank=node.node_rank)
    common = _common(attempt, run.code, node.secret, plan.ntasks_per_node, env)
    if not plan.gpus_per_node:
        common["CUDA_VISIBLE_DEVICES"] = ""
    # The caller has decided whether the run's own code may be run.
    older = not (run.code / "trainkit" / "__main__.py").is_file()  # than the command of its own
    entry = ["jobs.train"] if older else ["trainkit", "train"]
    command = [sys.executable, "-u", "-m", *entry, str(run.path), "--allow-code"]
    ranks = [
        Rank(command, common | node.rank_variables(local_rank), attempt.logs / f"rank-{node.first_rank + local_rank}")
        for local_rank in range(plan.ntasks_per_node)
    ]
    streams = {".out": sys.stdout, ".err": sys.stderr} if node.node_rank == 0 else {}
    shown = [(RankLog(ranks[0].log.with_suffix(ending)), stream) for ending, stream in streams.items()]
    client = ProcessId.seen_from_here(env.get(CLIENT, ""))

    def tick() -> None:
        for log, stream in shown:
            if log.path.is_file():
                stream.writelines(log.new())
                stream.flush()
        requests.cancel |= client is not None and not client.is_alive()

    limits = Limits(time=math.inf, lead=0.0, hang=plan.hang_seconds, cancel=plan.lead_seconds)
    with signal_requests() as requests:
        ending = supervise(attempt, ranks, limits, requests, first_rank=node.first_rank, tick=tick)
    tick()
    attempt.ended(ending.state, job_id=str(me.pid), exit_codes=list(ending.codes))
    return ending


if __name__ == "__main__":
    run_program(main)

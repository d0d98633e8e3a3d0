"""Controller of ranks on a machine without a scheduler: of a local job, and of a node of `jobs.launch`.

``python -m trainkit.launch.controller FOLDER CWD`` does for a local job what SLURM does. FOLDER is a run, or a sweep
whose runs are its folders 0, 1, 2, ... The controller supervises an attempt of each run, and starts the next one when
the ranks have saved and handed back, or failed of something that another start may mend: within the same budgets as on
SLURM, and as `launch.requeue` says. A node of `jobs.launch` has the same supervisor: it passes signals on, keeps the
time limit, watches progress, and reports how the ranks ended. It signals only processes that it started.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

import math
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.cluster.containers import CLIENT
from trainkit.cluster.pickles import PYTHON_FLAGS, TASK, environment_of_ranks, thread_variables
from trainkit.cluster.plan import Plan
from trainkit.cluster.ranks import Secret
from trainkit.common import terminal
from trainkit.common.accelerators import mask_variables
from trainkit.common.hosts import free_port
from trainkit.common.process import run_program, share_of_cpus
from trainkit.launch import notify
from trainkit.launch.sampler import choose
from trainkit.launch.supervisor import Ending, Rank, Requests, TimeLimits, signal_requests, supervise
from trainkit.monitor.log_tail import OutputTail
from trainkit.recovery.keeper import PLACE
from trainkit.recovery.nursery import run_words, stand_by
from trainkit.recovery.retries import budget_spent, passing_failure
from trainkit.run.events import Attempt, never_began, submitted
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId
from trainkit.run.snapshot import restore_code

CANCEL_SECONDS = 10.0
"""After a cancel, how long the ranks have to save before they are killed."""


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run what is in FOLDER; 0 if all of it completed."""
    folder, cwd = map(Path, arguments)
    plan = Plan.read(folder / "plan.json")
    is_sweep = not (folder / "config.yaml").exists()
    terminal.say(f"{'A sweep' if is_sweep else 'A run'} on {socket.gethostname()}, process {os.getpid()}")
    jobs = {str(os.getpid()): RunDir(folder)}
    if is_sweep:
        points = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
        jobs = {}
        for index, point in enumerate(points):
            jobs[f"{os.getpid()}_{index}"] = RunDir((folder / str(point)).resolve())
    states = set()
    with share_of_cpus(plan.side.index, plan.side.count), signal_requests() as requests:
        for job_id, run in jobs.items():
            submission = history_of(run).submission
            if requests.cancel_all or (submission is not None and submission.cancelled):
                state = "CANCELLED"
                never_began(run, job_id, state)
            else:
                try:
                    state = _run_to_its_end(run, plan, job_id, folder / ".submitit", cwd, requests, env)
                except Exception:
                    traceback.print_exc()
                    state = "FAILED"
                    never_began(run, job_id, state)
                requests.forget_run()
            states.add(state)
            terminal.say(f"{run.name}: {state}")
            notify.tell(run, env)
    return 0 if states == {"COMPLETED"} else 1


def _run_to_its_end(
    run: RunDir, plan: Plan, job_id: str, pickles: Path, cwd: Path, requests: Requests, env: Mapping[str, str]
) -> str:
    """Run all attempts of one run. Returns the state in which it ended, in SLURM's words."""
    limits = TimeLimits(plan.time_limit_seconds, plan.lead_seconds, plan.hang_seconds, CANCEL_SECONDS)
    choose(run)
    while True:
        restore_code(run)
        attempt = Attempt.begin(run)
        ending = supervise(attempt, _ranks_of(attempt, plan, job_id, pickles, env), limits, requests, cwd=cwd)
        attempt = attempt.newest_in_place()
        state = "CANCELLED" if requests.cancel else ending.state
        failure = passing_failure(attempt, 1) if state == "FAILED" else ""
        spent = ""
        if plan.requeue and (failure or state == "PREEMPTED"):
            spent = budget_spent(run)
            if not spent:
                attempt.requeued(job_id)
                terminal.say(f"Attempt {attempt.number}: {failure or 'saved'}; it goes on with the next.")
                continue
            state = "FAILED"
            if not failure:
                attempt.failed(f"not queued again: {spent}", rank=None)
            terminal.say(f"{run.path.name} is not started again: {spent}.")
        why = {"why": spent} if spent else {}
        attempt.ended(state, job_id=job_id, exit_codes=list(ending.codes), **why)
        return state


def _ranks_of(attempt: Attempt, plan: Plan, job_id: str, pickles: Path, env: Mapping[str, str]) -> list[Rank]:
    """Commands and environments of an attempt's ranks, on as many simulated nodes as planned."""
    common = _common(attempt, plan, plan.world_size, Secret.generate().text, env) | {
        "TRAINKIT_SIMULATED_NODES": str(plan.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        PLACE: f"127.0.0.1:{free_port()}",
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job_id,
        "SUBMITIT_LOCAL_NTASKS": str(plan.world_size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": str(plan.nodes),
    }
    command = [sys.executable, *PYTHON_FLAGS, "-c", TASK, str(pickles)]
    ranks = []
    for rank in range(plan.world_size):
        node, local_rank = divmod(rank, plan.ntasks_per_node)
        first = node * plan.gpus_per_node + plan.side.gpu
        # submitit would not write its result over half of one that a killed attempt has left.
        (pickles / f"{job_id}_{rank}_result.pkl.save_tmp").unlink(missing_ok=True)
        own = {
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(local_rank),
            "SUBMITIT_LOCAL_NODEID": str(node),
            **mask_variables(env, first, first + plan.gpus_per_node),
        }
        ranks.append(Rank(command, common | own, attempt.logs / f"rank-{rank}"))
    return ranks


def _common(attempt: Attempt, plan: Plan, ranks_here: int, secret: str, env: Mapping[str, str]) -> dict[str, str]:
    """Environment that all ranks of this machine have alike."""
    common = environment_of_ranks(attempt.run, plan, env) | thread_variables(plan, ranks_here, env)
    common |= attempt.environment()
    common["TRAINKIT_SECRET"] = secret
    return common


@dataclass(frozen=True)
class Node:
    """A node of `jobs.launch`, and the place where all nodes meet."""

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
            PLACE: f"{self.master_addr}:{self.master_port + 1}",
        }


def run_node(run: RunDir, node: Node, env: Mapping[str, str]) -> Ending:
    """Train this node's share to its end. Node 0 also prints what rank 0 prints.

    The first INT, TERM or USR2 asks the ranks to save and end, as does the end of the client; another one ends them.
    """
    me = ProcessId.of(os.getpid())
    plan = node.plan
    submitted(run, "launch", str(me.pid), me)
    attempt = Attempt.begin(run, node_rank=node.node_rank)
    common = _common(attempt, plan, plan.ntasks_per_node, node.secret, env)
    if not plan.gpus_per_node:
        common |= mask_variables(env, 0, 0)
    # The caller has decided whether the run's own code may be run.
    command = [sys.executable, *PYTHON_FLAGS, "-m", "trainkit", "train", str(run.path), "--allow-code"]
    ranks = []
    for local_rank in range(plan.ntasks_per_node):
        log = attempt.logs / f"rank-{node.first_rank + local_rank}"
        ranks.append(Rank(command, common | node.rank_variables(local_rank), log))
    shown = OutputTail(run, first=attempt.number) if node.node_rank == 0 else None
    client = ProcessId.seen_from_here(env.get(CLIENT, ""))

    def tick() -> None:
        if shown is not None:
            shown.show()
        requests.cancel |= client is not None and not client.is_alive()

    limits = TimeLimits(time=math.inf, lead=0.0, hang=plan.hang_seconds, cancel=plan.lead_seconds)
    with signal_requests() as requests:
        ending = supervise(attempt, ranks, limits, requests, first_rank=node.first_rank, tick=tick)
    tick()
    attempt = attempt.newest_in_place()
    attempt.ended(ending.state, job_id=str(me.pid), exit_codes=list(ending.codes))
    if node.node_rank == 0:
        notify.tell(run, env)
    return ending


if __name__ == "__main__":
    words = stand_by()
    if words is None:
        run_program(main)
    run_words(words)  # this is a rank

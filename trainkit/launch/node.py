"""One node of a run without a scheduler: start this machine's ranks, look after them, write down how they ended."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit import fileio
from trainkit.launch.containers import CLIENT
from trainkit.launch.environment import python_path, scrubbed
from trainkit.launch.plan import Plan
from trainkit.launch.processes import Rank, caught_signals
from trainkit.launch.supervise import SIGNALS, Ending, Limits, Requests, supervise
from trainkit.run.events import Attempt, submitted
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.site.profile import local_cpus


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
    command = [sys.executable, "-u", "-m", "trainkit", "train", str(run.path), "--allow-code"]
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

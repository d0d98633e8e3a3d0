"""What SLURM does for a job, done by one process for a local one: ``python -m trainkit.launch.controller FOLDER CWD``.

FOLDER is a run, or a sweep whose runs are its folders 0, 1, 2, ... The controller starts the ranks, ends them
together, tells them to save before the time limit, and starts the next attempt when they have saved and handed back.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.cluster.site import local_cpus
from trainkit.launch.batch_script import TASK
from trainkit.launch.environment import gpu_mask, python_path, scrubbed
from trainkit.launch.processes import Rank, RankGroup, caught_signals
from trainkit.ranks.rendezvous import free_port
from trainkit.records.events import append_event, read_events
from trainkit.records.rundir import RunDir

CANCEL_SECONDS = 10.0
"""After a cancel, how long the ranks have to save before they are killed."""


@dataclass(frozen=True)
class Job:
    """A job's id, the folder with its pickle, and where its ranks run."""

    id: str
    pickles: Path
    cwd: Path


@dataclass
class Requests:
    """What signals asked for; set by handlers, read by the loop."""

    cancel: bool = False
    cancel_all: bool = False
    preempt: bool = False

    def note(self, number: int) -> None:
        """A signal handler's whole work."""
        if number == signal.SIGUSR2:
            self.preempt = True
        else:
            self.cancel = True
            self.cancel_all |= number == signal.SIGTERM


@dataclass
class Attempt:
    """One start of all ranks, watched until its end."""

    group: RankGroup
    time_limit: float
    lead: float
    requests: Requests
    began: float = field(default_factory=time.monotonic)
    told: bool = False
    cancelled_at: float | None = None
    timed_out: bool = False

    def watch(self) -> None:
        """Pass on what was asked for, and keep the time limit."""
        now = time.monotonic()
        ran = now - self.began
        if self.requests.preempt or (not self.told and ran >= self.time_limit - self.lead):
            self.requests.preempt, self.told = False, True
            self.group.signal(signal.SIGUSR2)
        if self.requests.cancel and self.cancelled_at is None:
            self.cancelled_at = now
            self.group.signal(signal.SIGTERM)
        if self.cancelled_at is not None and now - self.cancelled_at > CANCEL_SECONDS:
            self.group.end(grace_seconds=0)
        if ran >= self.time_limit:
            self.timed_out = True
            self.group.end()


def run_to_its_end(run_dir: RunDir, plan: Mapping[str, Any], job: Job, requests: Requests) -> str:
    """All attempts of one run. Returns the state it ended in, in SLURM's words, and writes it as an event."""
    while True:
        attempt = len(run_dir.attempts())
        run_dir.attempt_logs(attempt).mkdir(parents=True)
        began = time.time()
        group = RankGroup(ranks_of(run_dir, plan, job, attempt, os.environ), job.cwd)
        watched = Attempt(group, plan["time_limit_seconds"], plan["lead_seconds"], requests)
        codes = group.wait(watched.watch)
        saved = run_dir.requeue_marker(attempt).exists()
        if saved and plan["requeue"] and not requests.cancel and not watched.timed_out:
            append_event(run_dir, "requeued", job_id=job.id)
            continue
        state = _state(codes, saved, requests, watched)
        if state == "FAILED":
            _name_culprit(run_dir, attempt, group.first_failed or 0, codes, since=began)
        append_event(run_dir, "ended", state=state, job_id=job.id, attempt=attempt, exit_codes=codes)
        return state


def ranks_of(run_dir: RunDir, plan: Mapping[str, Any], job: Job, attempt: int, env: Mapping[str, str]) -> list[Rank]:
    """Commands and environments of an attempt's ranks, on as many simulated nodes as planned."""
    nodes, per_node = int(plan["nodes"]), int(plan["ntasks_per_node"])
    world_size = nodes * per_node
    common = scrubbed(env) | {
        "TRAINKIT_RUN_DIR": str(run_dir.path),
        "TRAINKIT_ATTEMPT": str(attempt),
        "TRAINKIT_SIMULATED_NODES": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": python_path(run_dir.code, env),
        # Without this every rank starts as many threads as there are cores, and they get in one another's way.
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(local_cpus() // world_size, 1)),
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job.id,
        "SUBMITIT_LOCAL_NTASKS": str(world_size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": str(nodes),
    }
    logs, ranks = run_dir.attempt_logs(attempt), []
    for rank in range(world_size):
        node, local_rank = divmod(rank, per_node)
        # submitit would not write its result over half of one that a killed attempt has left.
        (job.pickles / f"{job.id}_{rank}_result.pkl.save_tmp").unlink(missing_ok=True)
        own = {
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(local_rank),
            "SUBMITIT_LOCAL_NODEID": str(node),
            "CUDA_VISIBLE_DEVICES": gpu_mask(env.get("CUDA_VISIBLE_DEVICES"), node, int(plan["gpus_per_node"])),
        }
        command = [sys.executable, "-u", "-c", TASK, str(job.pickles)]
        ranks.append(Rank(command, common | own, logs / f"rank-{rank}.out", logs / f"rank-{rank}.err"))
    return ranks


def _state(codes: Sequence[int], saved: bool, requests: Requests, watched: Attempt) -> str:
    if requests.cancel:
        return "CANCELLED"
    if watched.timed_out:
        return "TIMEOUT"
    if any(codes):
        return "FAILED"
    return "PREEMPTED" if saved else "COMPLETED"


def _name_culprit(run_dir: RunDir, attempt: int, rank: int, codes: Sequence[int], *, since: float) -> None:
    """A rank that raised has said so itself; for one that was killed, say it here."""
    if any(event.get("time", 0) >= since for event in read_events(run_dir, "failed")):
        return
    code = codes[rank]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    append_event(run_dir, "failed", attempt=attempt, rank=rank, error=how)


def _one(run_dir: RunDir, plan: Mapping[str, Any], job: Job, requests: Requests) -> str:
    if requests.cancel_all or _is_cancelled(run_dir):
        append_event(run_dir, "ended", state="CANCELLED", job_id=job.id)
        return "CANCELLED"
    requests.cancel = requests.preempt = False  # those were for the run before it
    try:
        return run_to_its_end(run_dir, plan, job, requests)
    except Exception:
        traceback.print_exc()
        append_event(run_dir, "ended", state="FAILED", job_id=job.id)
        return "FAILED"


def _is_cancelled(run_dir: RunDir) -> bool:
    """Whether it was cancelled while it waited for its turn in a sweep."""
    kinds = [event.get("event") for event in read_events(run_dir)]
    return "cancelled" in kinds[len(kinds) - 1 - kinds[::-1].index("submitted") :] if "submitted" in kinds else False


def main(folder: Path, cwd: Path) -> int:
    """Run what is in ``folder``; 0 if all of it completed."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    sweep = not (folder / "config.yaml").exists()
    points = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    runs = points if sweep else [folder]
    requests, states = Requests(), []
    print(f"{len(runs)} run{'s' * sweep} on {socket.gethostname()}, process {os.getpid()}")
    with caught_signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), requests.note):
        for index, path in enumerate(runs):
            job = Job(f"{os.getpid()}_{index}" if sweep else str(os.getpid()), folder / ".submitit", cwd)
            states.append(_one(RunDir(path), plan, job, requests))
            print(f"{path.name}: {states[-1]}")
    return 0 if set(states) == {"COMPLETED"} else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))

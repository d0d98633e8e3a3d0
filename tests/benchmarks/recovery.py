"""Seconds from a failure to the first new update, by its class and by who starts the ranks again.

Two ranks train digits, on this machine and on two nodes of `slurm/devcluster`, once with `launch.restart_in_place` and
once without, as it was before that was built. Each is struck in the middle of its training. The moments are those of
the run's own record: the failure is noticed, the next attempt is begun, its ranks have met and loaded what is saved,
and the first update is recorded. A requeued job of SLURM waits for the `cred_expire` of the cluster: 5 s here, and 120
by SLURM's default. It needs root, for the cluster, and some 15 minutes.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.measuring import Figure, Table
from tests.slurm.conftest import _clean_environment
from trainkit.common import jsonl
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

ROUNDS = 2
PROJECT = Path(__file__).parents[2]
DEVCLUSTER = PROJECT / "slurm" / "devcluster"
SETTINGS = ("train.epochs=100000", "monitor.loggers=[jsonl]", "monitor.log_every=1", "checkpoint.every_steps=20")
HANG_SECONDS = 10
BEFORE = 60
"""Updates before a run is struck."""
LIMIT_SECONDS = 200
HEAD = ("where", "failure", "restarted", "noticed", "begun", "ranks have met", "first update", "updates lost")
WHERE = ("SLURM", "here")
FAILURES = ("killed rank", "hang", "preemption")
GOAL = 0.25


@dataclass(frozen=True)
class Times:
    """Seconds since the failure at which a run had come so far, and updates that it made once more."""

    noticed: float
    begun: float
    met: float
    updated: float
    lost: int


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table, with the medians of the rounds."""
    rows = []
    totals: dict[tuple[str, str, bool], float] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, cluster(Path(name)) as env:
        for where in WHERE:
            for failure in FAILURES:
                for in_place in (False, True):
                    if failure == "preemption" and in_place:  # it gives the nodes back
                        continue
                    times = [struck(Path(name), env, where, failure, in_place, number) for number in range(rounds)]
                    totals[where, failure, in_place] = statistics.median(one.updated for one in times)
                    rows.append(row(where, failure, in_place, times))
    return [Table(HEAD, rows, goals(totals))]


def row(where: str, failure: str, in_place: bool, times: Sequence[Times]) -> list[str]:
    """Of the table."""
    how = "in place" if in_place else "by the queue" if where == "SLURM" else "by the controller"
    cells = []
    for part in ("noticed", "begun", "met", "updated"):
        cells.append(f"{statistics.median(getattr(one, part) for one in times):.1f} s")
    lost = [one.lost for one in times]
    return [where, failure, how, *cells, f"{min(lost)} to {max(lost)}"]


def goals(totals: dict[tuple[str, str, bool], float]) -> list[Figure]:
    """In place beside before; of a hang without the time until it is noticed."""
    found = []
    for where in WHERE:
        for failure in ("killed rank", "hang"):
            known = 0.0 if failure == "killed rank" else 2.0 * HANG_SECONDS
            ratio = (totals[where, failure, True] - known) / (totals[where, failure, False] - known)
            what = f"{failure}, {where}: in place, to a restart by " + ("the queue" if where == "SLURM" else "us")
            found.append(Figure(what, f"{ratio:.2f}", goal=f"at most {GOAL}", met=ratio <= GOAL))
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Two nodes, as the environment of a login node."""
    place = f"{folder}-cluster"
    env = {**_clean_environment(), "DEVCLUSTER_DIR": place, "DEVCLUSTER_NET": "10.199.198"}
    env |= {"SLURM_CONF": f"{place}/etc/slurm.conf", "XDG_STATE_HOME": str(folder / "state")}
    quick = f"AuthInfo=socket={place}/run/munge.sock,cred_expire=5"
    up = [str(DEVCLUSTER), "up", "--nodes", "2", "--gpus-per-node", "0", "--cpus", "4", "--conf", quick]
    subprocess.run([*up, "--until-exit", str(os.getpid())], env=env, check=True, stdout=subprocess.DEVNULL)
    try:
        yield env
    finally:
        subprocess.run([str(DEVCLUSTER), "down", "--purge"], env=env, check=False, stdout=subprocess.DEVNULL)


def struck(folder: Path, env: dict[str, str], where: str, failure: str, in_place: bool, number: int) -> Times:
    """Train, strike, and wait for the first new update."""
    run = RunDir(folder / f"run-{where}-{failure.replace(' ', '-')}-{in_place}-{number}")
    words = ["submit", "ddp", "--nodes", "2", "--executor", "slurm" if where == "SLURM" else "local", "--no-follow"]
    words += ["--run-dir", str(run.path), *SETTINGS, f"launch.restart_in_place={str(in_place).lower()}"]
    if failure == "hang":
        words.append(f"launch.hang_seconds={HANG_SECONDS}")
    call(env, *words)
    try:
        wait_for(lambda: len(read_metrics(run)) > BEFORE, run)
        begin = hit(env, run, failure)
        wait_for(lambda: starts_after(run, begin) and updates_after(run), run)
    finally:
        call(env, "cancel", str(run.path))
    return times_of(run, begin)


def call(env: dict[str, str], *words: str) -> None:
    """A command of trainkit."""
    subprocess.run(
        [sys.executable, "-m", "trainkit", *words], env=env, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def hit(env: dict[str, str], run: RunDir, failure: str) -> float:
    """Strike rank 1, or the job. Returns the moment."""
    job = read_events(run, "submitted")[-1]
    begin = time.time()
    if failure != "preemption":
        os.kill(rank_of(run, 1), signal.SIGKILL if failure == "killed rank" else signal.SIGSTOP)
    elif job["executor"] == "slurm":
        subprocess.run(["scancel", "--signal=USR2", job["job_id"]], env=env, check=True)
    else:
        os.kill(job["pid"], signal.SIGUSR2)
    return begin


def rank_of(run: RunDir, rank: int) -> int:
    """The process that trains as a rank: of those with its variables the one with the most threads."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
            is_ours = env.get("TRAINKIT_RUN_DIR") == str(run.path) and "python" in process.cmdline()[0]
            is_it = process.name() == f"rank-{rank}" or env.get("SLURM_PROCID") == str(rank)
            if is_ours and is_it:
                found.append((process.num_threads(), process.pid))
        except (psutil.Error, IndexError):
            continue
    return max(found)[1]


def starts_after(run: RunDir, moment: float) -> bool:
    """True once ranks have met again."""
    return any(event["time"] > moment for event in read_events(run, "started"))


def updates_after(run: RunDir) -> bool:
    """True once they have made an update."""
    started = read_events(run, "started")[-1]["time"]
    return any(record["time"] > started for record in read_metrics(run))


def wait_for(look: Callable[[], Any], run: RunDir) -> None:
    """Wait until something is true of a run."""
    until = time.monotonic() + LIMIT_SECONDS
    while not look():
        assert time.monotonic() < until, f"{run.name}: {json.dumps(read_events(run)[-3:])}"
        time.sleep(0.2)


def times_of(run: RunDir, begin: float) -> Times:
    """What the run's own record says of its recovery."""
    after = [event for event in read_events(run) if event["time"] > begin]
    started = next(event for event in after if event["event"] == "started")
    noticed = next(event["time"] for event in after if event["event"] in ("failed", "handed_back"))
    begun = next(event["time"] for event in after if event["event"] == "requeued")
    records = list(jsonl.read_jsonl(run.metrics))  # as they were written: an update that is made again is there twice
    made = max(record["step"] for record in records if record["time"] <= noticed)
    first = next(record for record in records if record["time"] > started["time"])
    return Times(noticed - begin, begun - begin, started["time"] - begin, first["time"] - begin, made - started["step"])

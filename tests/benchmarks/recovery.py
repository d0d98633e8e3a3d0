"""Seconds from a failure to the first new update, by its class, by who starts the ranks again, and by part.

Two ranks train digits, on two nodes of `slurm/devcluster` and on this machine. Each is struck in the middle of its
training, once for each rung that mends it: in place, by a spare node, by the queue (here: by the controller). The
moments are those of the run's own record, of its log folders and of its lease. A requeued job of SLURM waits for the
`cred_expire` of the cluster, 5 s here and 120 by SLURM's default, and a lost node is DOWN after 20 s of silence, 300 by
default. It needs root, for the cluster, and some 30 minutes.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.measuring import Figure, Table
from tests.slurm.conftest import _clean_environment
from trainkit.common import jsonl
from trainkit.run.events import read_events
from trainkit.run.folder import CLAIM, RunDir
from trainkit.run.metrics import read_metrics
from trainkit.run.run_lease import read_lease

ROUNDS = 2
PROJECT = Path(__file__).parents[2]
DEVCLUSTER = PROJECT / "slurm" / "devcluster"
SETTINGS = ("train.epochs=100000", "monitor.loggers=[jsonl]", "monitor.log_every=1", "checkpoint.every_steps=20")
HANG_SECONDS = 10
BEFORE = 60
"""Updates before a run is struck."""
LIMIT_SECONDS = 300
PARTS = ("detection", "teardown", "wait", "imports, meeting", "loading", "first update")
HEAD = ("where", "failure", "rung", *PARTS, "all", "updates lost")
GOAL = 0.25


class Cell(NamedTuple):
    """A row of the table."""

    where: str
    failure: str
    rung: str
    settings: tuple[str, ...] = ()


QUEUE = ("launch.restart_in_place=false",)
SPARE = ("launch.spare_nodes=1",)
HANG = (f"launch.hang_seconds={HANG_SECONDS}",)
CELLS = (
    Cell("SLURM", "killed rank", "in place"),
    Cell("SLURM", "killed rank", "queue", QUEUE),
    Cell("SLURM", "hang", "in place", HANG),
    Cell("SLURM", "hang", "queue", HANG + QUEUE),
    Cell("SLURM", "lost node", "spare node", SPARE),
    Cell("SLURM", "lost node", "queue"),
    Cell("SLURM", "killed slurmd", "spare node", SPARE),
    Cell("SLURM", "killed slurmd", "queue"),
    Cell("SLURM", "lost script", "queue", SPARE),
    Cell("SLURM", "preemption", "queue"),
    Cell("here", "killed rank", "in place"),
    Cell("here", "killed rank", "controller", QUEUE),
    Cell("here", "hang", "in place", HANG),
    Cell("here", "hang", "controller", HANG + QUEUE),
    Cell("here", "preemption", "controller"),
)


@dataclass(frozen=True)
class Times:
    """Seconds of each of `PARTS`, and updates that were made once more."""

    parts: tuple[float, ...]
    lost: int


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table, with the medians of the rounds."""
    rows = []
    totals: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, cluster(Path(name)) as env:
        for cell in CELLS:
            times = [struck(Path(name), env, cell, number) for number in range(rounds)]
            totals[cell[:3]] = statistics.median(sum(one.parts) for one in times)
            rows.append(row(cell, times))
            print("; ".join(rows[-1]), file=sys.stderr, flush=True)
    return [Table(HEAD, rows, goals(totals))]


def row(cell: Cell, times: Sequence[Times]) -> list[str]:
    """Of the table."""
    parts = [f"{statistics.median(column):.1f} s" for column in zip(*(one.parts for one in times), strict=True)]
    total = statistics.median(sum(one.parts) for one in times)
    lost = [one.lost for one in times]
    return [*cell[:3], *parts, f"{total:.1f} s", f"{min(lost)} to {max(lost)}"]


def goals(totals: dict[tuple[str, str, str], float]) -> list[Figure]:
    """In place beside the rung after it; of a hang without the time until it is noticed."""
    found = []
    for (where, failure, rung), total in totals.items():
        if rung in ("queue", "controller") and (where, failure, "in place") in totals:
            known = 2.0 * HANG_SECONDS if failure == "hang" else 0.0
            ratio = (totals[where, failure, "in place"] - known) / (total - known)
            what = f"{failure}, {where}: in place, to the {rung}"
            found.append(Figure(what, f"{ratio:.2f}", goal=f"at most {GOAL}", met=ratio <= GOAL))
        if rung == "queue" and (where, failure, "spare node") in totals:
            ratio = totals[where, failure, "spare node"] / total
            found.append(
                Figure(f"{failure}: by a spare node, to the queue", f"{ratio:.2f}", goal="below 1", met=ratio < 1)
            )
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Four nodes, as the environment of a login node."""
    place = f"{folder}-cluster"
    env = {**_clean_environment(), "DEVCLUSTER_DIR": place, "DEVCLUSTER_NET": "10.199.198"}
    env |= {"SLURM_CONF": f"{place}/etc/slurm.conf", "XDG_STATE_HOME": str(folder / "state")}
    quick = f"AuthInfo=socket={place}/run/munge.sock,cred_expire=5"
    up = [str(DEVCLUSTER), "up", "--nodes", "4", "--gpus-per-node", "0", "--cpus", "4", "--conf", quick]
    subprocess.run([*up, "--until-exit", str(os.getpid())], env=env, check=True, stdout=subprocess.DEVNULL)
    try:
        yield env
    finally:
        subprocess.run([str(DEVCLUSTER), "down", "--purge"], env=env, check=False, stdout=subprocess.DEVNULL)


def struck(folder: Path, env: dict[str, str], cell: Cell, number: int) -> Times:
    """Train, strike, and wait for the first new update."""
    run = RunDir(folder / f"run-{'-'.join(cell[:3]).replace(' ', '-')}-{number}")
    words = [
        "submit",
        "ddp",
        "--nodes",
        "2",
        "--executor",
        "slurm" if cell.where == "SLURM" else "local",
        "--no-follow",
    ]
    call(env, *words, "--run-dir", str(run.path), *SETTINGS, *cell.settings)
    back = ""
    try:
        seen = Seen(run, env)
        seen.wait(lambda: len(read_metrics(run)) > BEFORE)
        begin, back = hit(env, run, cell.failure)
        seen.wait(lambda: starts_after(run, begin) and updates_after(run))
    finally:
        call(env, "cancel", str(run.path))
        if back:
            subprocess.run([str(DEVCLUSTER), "boot", back], env=env, check=True, stdout=subprocess.DEVNULL)
    return seen.times(begin)


def call(env: dict[str, str], *words: str) -> None:
    """A command of trainkit."""
    subprocess.run(
        [sys.executable, "-m", "trainkit", *words], env=env, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def hit(env: dict[str, str], run: RunDir, failure: str) -> tuple[float, str]:
    """Strike rank 1, its node, or the job. Returns the moment, and a node that is to be repaired afterwards."""
    job = read_events(run, "submitted")[-1]
    node = read_events(run, "started")[-1]["hosts"][-1]
    if failure == "lost script":
        node = asked(env, "squeue", "-h", "-j", job["job_id"], "-o", "%B")
    begin = time.time()
    if failure in ("lost node", "lost script", "killed slurmd"):
        verb = "kill-slurmd" if failure == "killed slurmd" else "crash"
        subprocess.run([str(DEVCLUSTER), verb, node], env=env, check=True, stdout=subprocess.DEVNULL)
        return begin, node
    if failure != "preemption":
        os.kill(rank_of(run, 1), signal.SIGKILL if failure == "killed rank" else signal.SIGSTOP)
    elif job["executor"] == "slurm":
        subprocess.run(["scancel", "--signal=USR2", job["job_id"]], env=env, check=True)
    else:
        os.kill(job["pid"], signal.SIGUSR2)
    return begin, ""


def asked(env: dict[str, str], *command: str) -> str:
    """What a program of SLURM's says; nothing where it fails."""
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True).stdout.strip()


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


class Seen:
    """What can be seen of a run, with the moments at which it was first seen so."""

    def __init__(self, run: RunDir, env: dict[str, str]) -> None:
        self._run = run
        self._env = env
        self._job = read_events(run, "submitted")[-1]
        self._left_queue = list[float]()
        """When the job did not run."""
        self._met = dict[int, float]()
        """Attempt -> when its ranks had met: rank 0 takes the lease then."""

    def wait(self, look: Any) -> None:
        """Wait until something is true of the run."""
        until = time.monotonic() + LIMIT_SECONDS
        while not look():
            assert time.monotonic() < until, f"{self._run.name}: {json.dumps(read_events(self._run)[-3:])}"
            if self._job["executor"] == "slurm":
                state = asked(self._env, "squeue", "-h", "-j", self._job["job_id"], "-o", "%T")
                if state and state != "RUNNING":
                    self._left_queue.append(time.time())
            there = read_lease(self._run.lease)
            if there is not None and there.holder.attempt is not None:
                self._met.setdefault(there.holder.attempt, time.time())
            time.sleep(0.1)

    def times(self, begin: float) -> Times:
        """Say how long each part took, of a failure at ``begin``."""
        run = self._run
        after = [event for event in read_events(run) if event["time"] > begin]
        started = next(event for event in after if event["event"] == "started")
        attempt = started["attempt"]
        told = [event["time"] for event in after if event["event"] in ("failed", "handed_back")]
        out = [moment for moment in self._left_queue if moment > begin]
        noticed = min([*told, *out, started["time"]])
        begun = min([event["time"] for event in after if event["event"] == "requeued"] or out)
        claimed = CLAIM.at(run.attempt_logs(attempt), 0).stat().st_ctime
        records = list(
            jsonl.read_jsonl(run.metrics)
        )  # as they were written: an update that is made again is there twice
        made = max(record["step"] for record in records if record["time"] <= started["time"])
        first = next(record for record in records if record["time"] > started["time"])
        moments = [
            begin,
            noticed,
            begun,
            claimed,
            self._met.get(attempt, started["time"]),
            started["time"],
            first["time"],
        ]
        for place in range(1, len(moments)):  # two clocks look at them, one of them now and then
            moments[place] = max(moments[place - 1], min(moments[place], first["time"]))
        parts = tuple(later - earlier for earlier, later in itertools.pairwise(moments))
        return Times(parts, made - started["step"])

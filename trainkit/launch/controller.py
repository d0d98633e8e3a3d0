"""Starts ranks on a machine without a scheduler, attempt after attempt: of a local job, and of a node of `jobs.launch`.

``python -m trainkit.launch.controller FOLDER CWD`` does for a local job what SLURM does. FOLDER is a run, or a sweep
whose runs are its folders 0, 1, 2, ... The controller supervises an attempt of each run, and starts the next one when
the ranks have saved and handed back, or failed of something that another start may mend: within the same budgets as on
SLURM, and as `launch.requeue` says. A node of `jobs.launch` has the same supervisor: it passes signals on, keeps the
time limit, watches progress, and reports how the ranks ended. It signals only processes that it started.

Signals: USR2 is a preemption, ranks save and the run goes on with the next attempt. INT cancels the run, its ranks may
save before they end; TERM cancels the runs that come after it in a sweep as well.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from trainkit.accelerators import mask_variables
from trainkit.diagnosis.evidence import RankLog, is_lost_connection
from trainkit.fileio import append
from trainkit.launch import notify
from trainkit.launch.batch_job import KILLED, budget_spent, passing_failure
from trainkit.launch.containers import CLIENT
from trainkit.launch.plan import Plan
from trainkit.launch.sampler import choose
from trainkit.monitor import follow
from trainkit.process import end_with_parent, python_path, run_program, scrubbed, share_of_cpus, visible_cpus
from trainkit.ranks import Secret, free_port
from trainkit.ranks.signals import STARTING_SECONDS, Heartbeats, hang, is_hang, pulses
from trainkit.run.events import Attempt, ProcessId, history_of, is_stopped, never_began, submitted
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import restore_code
from trainkit.schedulers.base import TASK

TICK_SECONDS = 0.05
"""Seconds between two looks at the ranks, at requests and at output."""
NOTICE_SECONDS = 2.0
"""How long other ranks have to notice a failed one by themselves: their words help to find the cause."""
CANCEL_SECONDS = 10.0
"""After a cancel, how long the ranks have to save before they are killed."""
GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
OWN_WATCHDOG_SECONDS = 15.0
"""Ranks that hang name the one that is behind themselves; how much longer the supervisor waits before it does."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""A supervisor that has not looked for this long was stopped, and does not know what its ranks did meanwhile."""


class Rank(NamedTuple):
    """One process to start. It writes to ``log`` with the endings .out and .err."""

    command: Sequence[str]
    env: Mapping[str, str]
    log: Path


class RankGroup:
    """The processes of the ranks, from start to end."""

    def __init__(self, ranks: Sequence[Rank], cwd: Path | None = None, inherited: Sequence[int] = ()) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._ending = False
        self.deaths: dict[int, int] = {}
        """Rank -> exit code of those that ended badly before anybody told them to, in the order in which they were
        noticed; of several at once a killed one first, for it was the cause."""
        try:
            for index, rank in enumerate(ranks):
                self._children.append(_start(rank, cwd, inherited))
                self._running.add(index)
        except BaseException:
            self.end(grace_seconds=0)
            raise

    def pid(self, index: int) -> int:
        """Process id of a rank."""
        return self._children[index].pid

    def exit_codes(self) -> list[int | None]:
        """Exit code by rank, None while it runs; negative for the signal that killed it."""
        codes = [child.poll() for child in self._children]
        ended = {index: code for index in self._running if (code := codes[index]) is not None}
        for index in ended:
            self._running.discard(index)
            self._kill(index)  # what a rank leaves behind: data loaders of one that was killed
        if not self._ending:
            self.deaths |= sorted(((index, code) for index, code in ended.items() if code), key=lambda it: it[1] >= 0)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that run, not to their data loaders, which they need until they have saved."""
        for child in self._children:
            child.send_signal(number)

    def wait(self, tick: Callable[[], None] = lambda: None) -> list[int]:
        """Wait until all have ended, and call ``tick`` often. If one fails, end the others within seconds."""
        failed_at = math.inf
        while None in (codes := self.exit_codes()):
            now = time.monotonic()
            failed_at = min(failed_at, now) if any(codes) else math.inf
            if now - failed_at > NOTICE_SECONDS:
                return self.end()
            tick()
            time.sleep(TICK_SECONDS)
        return [child.returncode for child in self._children]

    def end(self, grace_seconds: float = GRACE_SECONDS) -> list[int]:
        """End all that still run: SIGTERM, and SIGKILL after ``grace_seconds``."""
        self.exit_codes()
        self._ending = True
        if grace_seconds > 0:
            self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        for index in self._running:
            self._kill(index)
        return [child.wait() for child in self._children]

    def _kill(self, index: int) -> None:
        # A rank leads a session and group of its own, so this reaches its children and nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._children[index].pid, signal.SIGKILL)


def _start(rank: Rank, cwd: Path | None, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    def before_exec() -> None:
        # A signal must not kill a rank before Python has its handlers: ignoring is inherited.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_with_parent()

    folder = rank.log.parent
    with append(rank.log.with_suffix(".out"), folder) as out, append(rank.log.with_suffix(".err"), folder) as err:
        return subprocess.Popen(
            list(rank.command), env=dict(rank.env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, preexec_fn=before_exec, pass_fds=inherited,
        )  # fmt: skip


def _words(code: int) -> str:
    """How a rank ended, of which there is nothing but the exit code."""
    if code >= 0:
        return f"exit code {code}"
    out_of_memory = " (which the kernel does when memory runs out)" if code == -signal.SIGKILL else ""
    return f"{KILLED}{signal.Signals(-code).name}{out_of_memory}"


@dataclass(frozen=True)
class Limits:
    """What the supervisor enforces; all in seconds."""

    time: float
    lead: float
    """Before the time limit the ranks are told to save."""
    hang: float
    """Time without progress after which ranks hang."""
    cancel: float
    """Time that ranks have to save after a cancel."""


@dataclass
class Requests:
    """What signals asked for: handlers set it, the supervisor reads it."""

    cancel: bool = False
    cancel_all: bool = False
    preempt: bool = False
    kill: bool = False

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: USR2 preempts, INT and TERM cancel, and kill the second time."""
        if number == signal.SIGUSR2:
            self.preempt = True
            return
        self.kill = self.cancel
        self.cancel = True
        self.cancel_all |= number == signal.SIGTERM


@contextlib.contextmanager
def signal_requests() -> Iterator[Requests]:
    """What this process's signals ask for while the body runs."""
    requests = Requests()
    before = {number: signal.signal(number, requests.note) for number in SIGNALS}
    try:
        yield requests
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Ending(NamedTuple):
    """How the ranks of an attempt ended on this node."""

    state: str
    """In SLURM's words."""
    codes: tuple[int, ...]
    culprit: int | None
    """Of failed ranks the first, counted from this node's first."""
    why: str


def supervise(
    attempt: Attempt,
    ranks: Sequence[Rank],
    limits: Limits,
    requests: Requests,
    *,
    cwd: Path | None = None,
    first_rank: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Ending:
    """Start the ranks, supervise them, and say how they ended. A failure is recorded with the rank that caused it.

    Args:
        first_rank: the number, among all ranks, of the first one here.
        tick: called often.
    """
    with pulses(len(ranks)) as counts:
        counted = [rank._replace(env={**rank.env, **counts.variable(index)}) for index, rank in enumerate(ranks)]
        group = RankGroup(counted, cwd, [counts.descriptor])
        watch = _Watch(group, counts, limits, requests, tick)
        codes = tuple(group.wait(watch.look))
    cancelled = watch.cancelled_at is not None
    culprit, why = watch.hanging or (None, "")
    if culprit is not None:
        attempt.failed(why, rank=first_rank + culprit)
    elif not watch.timed_out and not cancelled:
        culprit, why = _cause(attempt, group, first_rank)
    if watch.timed_out:
        state = "TIMEOUT"
    elif any(codes) or culprit is not None:
        state = "CANCELLED" if cancelled else "FAILED"
    elif attempt.number in history_of(attempt.run).handed_back:
        state = "PREEMPTED"
    else:
        state = "CANCELLED" if cancelled else "COMPLETED"
    return Ending(state, codes, culprit, why)


class _Watch:
    """What happens between the start of the ranks and their end."""

    def __init__(
        self, group: RankGroup, counts: Heartbeats, limits: Limits, requests: Requests, tick: Callable[[], None]
    ) -> None:
        self._group, self._counts, self._limits, self._requests, self._tick = group, counts, limits, requests, tick
        self._began = self._moved = self._looked = time.monotonic()
        self._seen = counts.read()
        self._told = False
        self.cancelled_at: float | None = None
        self.timed_out = False
        self.hanging: tuple[int, str] | None = None

    def look(self) -> None:
        """Pass requests on, keep the time limit, and check that the ranks make progress."""
        self._tick()
        now, limits, requests = time.monotonic(), self._limits, self._requests
        if requests.preempt or (not self._told and now - self._began >= limits.time - limits.lead):
            requests.preempt, self._told = False, True
            self._group.signal(signal.SIGUSR2)
        if requests.cancel and self.cancelled_at is None:
            self.cancelled_at = now
            self._group.signal(signal.SIGTERM)
        if requests.kill or (self.cancelled_at is not None and now - self.cancelled_at > limits.cancel):
            self._group.end(grace_seconds=0)
        elif now - self._began >= limits.time:
            self.timed_out = True
            self._group.end()
        elif now - self._looked >= _LOOK_SECONDS:
            if now - self._looked > _LATE_SECONDS:
                self._moved = now
            self._looked = now
            self._look_for_a_hang(now)

    def _look_for_a_hang(self, now: float) -> None:
        counts = self._counts.read()
        if counts != self._seen:
            self._seen, self._moved = counts, now
        patience = self._limits.hang if all(counts) else max(self._limits.hang, STARTING_SECONDS)
        if now - self._moved > patience + OWN_WATCHDOG_SECONDS:
            running = [index for index, code in enumerate(self._group.exit_codes()) if code is None]
            stopped = [index for index in running if is_stopped(self._group.pid(index))]
            # The others wait for the one that is behind, so it is the one to look at.
            index = (stopped or sorted(running, key=lambda index: counts[index]) or [0])[0]
            self.hanging = index, hang(patience, ", and it is stopped by a signal" * bool(stopped))
            self._group.end(grace_seconds=0)


def _cause(attempt: Attempt, group: RankGroup, first_rank: int) -> tuple[int | None, str]:
    """The rank that failed first, counted from this node's first, and why. Recorded unless the rank has done so itself.

    When one dies, the others fail for want of it, often before it has been missed: a lost connection counts as the
    cause only where there is no other.
    """
    if not group.deaths:
        return None, ""
    failures = [item for item in history_of(attempt.run).failures if item.attempt == attempt.number]
    for item in failures:
        if is_hang(item.error):  # by their own watchdogs, all ranks have ended at once
            return (item.rank or first_rank) - first_rank, item.error
    recorded = {item.rank: item.error for item in failures}
    whys = {}
    for index, code in group.deaths.items():
        rank = first_rank + index
        own_words = recorded.get(rank) or RankLog(attempt.logs / f"rank-{rank}.err").error if code > 0 else ""
        whys[index] = own_words or _words(code)
    index = next((index for index, why in whys.items() if not is_lost_connection(why)), next(iter(whys)))
    if recorded.get(first_rank + index) != whys[index]:
        attempt.failed(whys[index], rank=first_rank + index)
    return index, whys[index]


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run what is in FOLDER; 0 if all of it completed."""
    folder, cwd = map(Path, arguments)
    plan = Plan.read(folder / "plan.json")
    is_sweep = not (folder / "config.yaml").exists()
    points = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    states = []
    print(f"{'A sweep' if is_sweep else 'A run'} on {socket.gethostname()}, process {os.getpid()}")
    with share_of_cpus(plan.side.index, plan.side.count), signal_requests() as requests:
        for index, path in enumerate(points if is_sweep else [folder]):
            run = RunDir(path.resolve() if is_sweep else path)
            job_id = f"{os.getpid()}_{index}" if is_sweep else str(os.getpid())
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
            print(f"{path.name}: {state}", flush=True)
            notify.tell(run, env)
    return 0 if set(states) == {"COMPLETED"} else 1


def _run_to_its_end(
    run: RunDir, plan: Plan, job_id: str, pickles: Path, cwd: Path, requests: Requests, env: Mapping[str, str]
) -> str:
    """Run all attempts of one run. The state that it ended in, in SLURM's words."""
    limits = Limits(plan.time_limit_seconds, plan.lead_seconds, plan.hang_seconds, CANCEL_SECONDS)
    choose(run)
    while True:
        restore_code(run)
        attempt = Attempt.begin(run)
        ending = supervise(attempt, _ranks_of(attempt, plan, job_id, pickles, env), limits, requests, cwd=cwd)
        state = "CANCELLED" if requests.cancel else ending.state
        failure = passing_failure(attempt, 1) if state == "FAILED" else ""
        spent = ""
        if plan.requeue and (failure or state == "PREEMPTED"):
            if not (spent := budget_spent(run)):
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
    common = _common(attempt, attempt.run.code, Secret.generate().text, _threads(plan, plan.world_size), env) | {
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


def _threads(plan: Plan, ranks_here: int) -> int:
    """Of a rank: its share of the cores, or ranks would get in one another's way; see `device.intra_op_threads`."""
    return 1 if plan.gpus_per_node else max(visible_cpus() // ranks_here, 1)


def _common(attempt: Attempt, code: Path, secret: str, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    return scrubbed(env) | {
        **attempt.environment(),
        "TRAINKIT_SECRET": secret,
        "PYTHONPATH": python_path(code, env),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(threads),
    }


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
    common = _common(attempt, run.code, node.secret, _threads(plan, plan.ntasks_per_node), env)
    if not plan.gpus_per_node:
        common |= mask_variables(env, 0, 0)
    # The caller has decided whether the run's own code may be run.
    command = [sys.executable, "-u", "-m", "trainkit", "train", str(run.path), "--allow-code"]
    ranks = [
        Rank(command, common | node.rank_variables(local_rank), attempt.logs / f"rank-{node.first_rank + local_rank}")
        for local_rank in range(plan.ntasks_per_node)
    ]
    streams = {".out": sys.stdout, ".err": sys.stderr} if node.node_rank == 0 else {}
    shown = [(follow.LogTail(ranks[0].log.with_suffix(ending)), stream) for ending, stream in streams.items()]
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
    if node.node_rank == 0:
        notify.tell(run, env)
    return ending


if __name__ == "__main__":
    run_program(main)

"""4, 16 and 64 light peers, of whom some die and others come in each round.

The creator is the real command, on a machine of its own; all others are real peers without records
(`arms/light_peers.py`) on a second one, so that the creator's network shows what all of them together ask of it. They
only call out, as volunteers do, so that the creator answers, reduces and gives the state away for all. All of them
share the cores of one real machine; the creator, and who asks for the status, go first there (nice -10), as they have
machines of their own elsewhere. 15 minutes and 12 GB of memory.
"""

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from tests.benchmarks.machines import TOKEN, Machines, Started, absent, machines
from tests.benchmarks.measuring import Figure, Table

ROUNDS = 1
SIZES = (4, 16, 64)
ROUND_SECONDS, WATCHED = 15.0, 3
AT_ONCE = 7
"""So many peers are starting at a time."""
STATUS_SECONDS = 2.0
FIRST = -10
"""Niceness of those who would have a machine to themselves."""
HEAD = (
    "peers", "rounds", "averaged together", "parts", "sync", "a peer's bytes a round", "the creator's",
    "CPU of the creator", "`swarm status`",
)  # fmt: skip


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("many peers in a swarm", "", note=f"not measured: {why}")]
    found = list[tuple[list[str], float]]()
    for size in SIZES * rounds:
        found += watch(size)
    slowest = found[-1][1]
    goal = Figure(
        f"`swarm status` with {SIZES[-1]} peers", f"{slowest:.2f} s", goal=f"under {STATUS_SECONDS:.0f} s",
        met=slowest < STATUS_SECONDS,
    )  # fmt: skip
    return [Table(HEAD, [row for row, _ in found], [goal])]


def watch(size: int) -> list[tuple[list[str], float]]:
    """A swarm of that size, first left in peace and then with an eighth of it, at least one, dying in each round.

    The rows of the table, with the seconds of `swarm status`.
    """
    with TemporaryDirectory() as folder, machines(2, Path(folder)) as net:
        swarm = _Swarm(net)
        swarm.start(size - 1)
        found = []
        for churn in (0, max(1, size // 8)):
            found.append(swarm.watched(size, churn))
            print(found[-1][0], flush=True)  # the larger ones take long
        return found


class _Swarm:
    def __init__(self, net: Machines) -> None:
        self.net, self.names = net, count(1)
        self.run = net.folder / "runs" / "creator"
        settings = (
            "data.workers=0", "model.name=tests.benchmarks.arms.light_peers:model", "train.precision=fp32",
            "train.global_batch_size=8", "monitor.loggers=[jsonl]", "launch.gpus_per_node=0",
            f"collaborative.round_seconds={ROUND_SECONDS}", "collaborative.rounds=1000",
        )  # fmt: skip
        create = ("jobs.swarm", "create", "hivemind", *settings)
        where = ("--host", net.address(0), "--name", "creator", "--run-dir", str(self.run))
        self.creator = _first(net.start(0, *create, *where))
        self.token = self.creator.says(TOKEN)[1]
        own = {"TRAINKIT_TOKEN": self.token}
        self.peers = net.start(1, "tests.benchmarks.arms.light_peers", str(net.folder), env=own)
        self.alive: dict[str, int] = {}

    def start(self, number: int) -> None:
        """So many peers, and wait until they are in."""
        names = [f"light-{place}" for place in islice(self.names, number)]
        for first in range(0, number, AT_ONCE):
            chosen = names[first : first + AT_ONCE]
            with (self.net.folder / "names").open("a") as file:
                file.write("".join(f"{name}\n" for name in chosen))
            for name in chosen:
                self.alive[name] = int(self.peers.says(rf"^{name} (\d+)$")[1])
                self._wait_for(name)

    def _wait_for(self, name: str) -> None:
        try:
            self.peers.says(rf"^{name}: Joined ", 180)
        except AssertionError:
            lines = self.peers.output.splitlines()
            own = [line for line in lines if line.startswith((name, "trainkit.common.errors"))]
            raise AssertionError(f"{name} has not joined, at a load of {os.getloadavg()[0]:.0f}: {own}") from None

    def records(self) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []  # before the first round: none
        return [record for line in lines if (record := json.loads(line))["split"] == "train"]

    def watched(self, size: int, churn: int) -> tuple[list[str], float]:
        """Some rounds, with so many peers killed and others started in each of them: a row of the table, and the
        seconds of `swarm status`."""
        self._next_round()
        first, before, began = len(self.records()), self._counters(), time.monotonic()
        status: list[tuple[float, float]] = []
        for _ in range(WATCHED):
            for name in list(self.alive)[:churn]:
                os.kill(self.alive.pop(name), signal.SIGKILL)
            self.start(churn)
            status.append(self._status())
            self._next_round()
        records, after, seconds = self.records()[first:], self._counters(), time.monotonic() - began
        to_creator, from_creator, cpu = (new - old for old, new in zip(before, after, strict=True))
        moved = (to_creator + from_creator) / seconds * ROUND_SECONDS
        groups = [record["peers"] for record in records]
        waited = [record["exchange_seconds"] for record in records]
        expected = max(1, sum(record["parts_expected"] for record in records))
        asked, used = (statistics.median(times) for times in zip(*status, strict=True))
        return [
            f"{size}{f', {churn} new ones a round' if churn else ''}", str(len(groups)),
            f"{statistics.median(groups):.0f} ({min(groups)} to {max(groups)})",
            f"{100 * sum(record['parts'] for record in records) / expected:.0f} %",
            f"{statistics.median(waited):.2f} s (up to {max(waited):.2f})",
            f"{moved / (size - 1) / 1e3:,.0f} kB", f"{moved / 1e6:.1f} MB",
            f"{cpu / seconds:.2f} cores", f"{asked:.2f} s, {used:.2f} s of CPU",
        ], asked  # fmt: skip

    def _next_round(self) -> None:
        there = len(self.records())
        _until(lambda: len(self.records()) > there, 3 * ROUND_SECONDS, self.creator)

    def _counters(self) -> list[float]:
        from_creator, to_creator = self.net.sent()
        own = psutil.Process(self.creator.process.pid)
        family = [own, *own.children(recursive=True)]
        cpu = sum(sum(one.cpu_times()[:2]) for one in family)
        return [to_creator, from_creator, cpu]

    def _status(self) -> tuple[float, float]:
        """Seconds of the command, by the clock and of CPU."""
        began = time.monotonic()
        asked = _first(self.net.start(1, "jobs.swarm", "status", env={"TRAINKIT_TOKEN": self.token}))
        _, code, used = os.wait4(asked.process.pid, 0)
        asked.process.returncode = os.waitstatus_to_exitcode(code)
        assert code == 0, asked.output
        return time.monotonic() - began, used.ru_utime + used.ru_stime


def _first(started: Started) -> Started:
    """It and what it starts is preferred to the peers."""
    os.setpriority(os.PRIO_PROCESS, started.process.pid, FIRST)
    return started


def _until(condition: Callable[[], bool], seconds: float, whose: Started) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert whose.process.poll() is None, whose.output[-2000:]
        assert time.monotonic() < deadline, whose.output[-2000:]
        time.sleep(0.1)

"""Nursery of a node's ranks: a process that imports what they need once, and forks them.

``python -m trainkit.recovery.nursery FOLDER`` reads an order for each rank, a line of JSON with its command, its
environment and its log, and runs that command in a fork of itself, as Python would. It reports when each rank has
started and ended, and ends with the last one. Ranks that are tasks of SLURM are started by srun, and import for
themselves. The controller of a local job forks the nursery of its first ranks (`stand_by`): it has imported already
what a nursery needs.
"""

import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import SIGNALS
from trainkit.common import fileio
from trainkit.common.imports import PROGRAM
from trainkit.common.process import call_this_process, end_with_parent, replace_environment
from trainkit.config.checks import strategy_traits
from trainkit.config.loading import load
from trainkit.recovery.keeper import CAN_FORK, fork, has_memory
from trainkit.recovery.preload import preload
from trainkit.run.folder import RunDir

FILE = Path("trainkit") / "recovery" / "nursery.py"
"""This file in a run's code; code of earlier versions has none."""
_LOOK_SECONDS = 0.02


# As the process that starts ranks sees it


class Nursery:
    """A nursery that has been started, and its ranks."""

    def __init__(self, process: "subprocess.Popen[bytes] | Standby") -> None:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process
        self._rest = b""
        self._ranks: list[ForkedRank] = []

    @staticmethod
    def stands_by(run: RunDir) -> bool:
        """True if one waits that is of the run's code."""
        return bool(_STANDBY) and os.path.realpath(run.code) == PROGRAM

    @classmethod
    def of(
        cls, run: RunDir, flags: Sequence[str], env: Mapping[str, str], log: Path, *,
        cwd: Path | None, inherited: Sequence[int],
    ) -> "Nursery":  # fmt: skip
        """Have one look after ranks of a run: the one that stands by, if it is of the run's code, or else a new one.

        Args:
            flags: of Python.
            env: what its ranks have alike, such as OpenMP's threads, which count once torch is loaded.
            log: for what goes wrong here, without an ending.
            cwd: current folder of the ranks.
            inherited: descriptors that they inherit.
        """
        if cls.stands_by(run):
            standby = _STANDBY.pop()
            standby.begin(run.path, cwd, inherited)
            return cls(standby)
        command = [sys.executable, *flags, "-m", "trainkit.recovery.nursery", str(run.path)]
        with fileio.append(log.with_suffix(".err"), log.parent) as err:
            return cls(subprocess.Popen(
                command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, cwd=cwd,
                start_new_session=True, preexec_fn=be_child, pass_fds=inherited,
            ))  # fmt: skip

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, *, is_alone: bool = False
    ) -> "ForkedRank":
        """Have it start a rank as soon as it has imported what its ranks need; one that is alone does so by itself."""
        rank = ForkedRank(self)
        self._ranks.append(rank)
        order = {"command": list(command[1:]), "env": dict(env), "log": str(log), "is_alone": is_alone}
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # `read` finds that it has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return rank

    def complete(self) -> None:
        """Say that there are no more ranks."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.close()

    def read(self) -> None:
        """Take in what it has reported."""
        assert self._process.stdout is not None
        try:
            content = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not content:
            for rank in self._ranks:
                rank.has_ended(-signal.SIGKILL)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            report = json.loads(line)
            rank = self._ranks[report["rank"]]
            if "pid" in report:
                rank.has_started(report["pid"])
            else:
                rank.has_ended(report["code"])
        if all(rank.returncode is not None for rank in self._ranks):
            self._process.wait()
            self._process.stdout.close()

    def kill(self) -> None:
        """End it, and with it all of its ranks."""
        self._process.kill()


class ForkedRank:
    """A rank of a nursery, with what `subprocess.Popen` tells of a process."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._signals: list[int] = []
        self.pid = 0
        """0 until it has started."""
        self.returncode: int | None = None

    def has_started(self, pid: int) -> None:
        """It runs: tell it what it has missed."""
        self.pid = pid
        for number in self._signals:
            self.send_signal(number)

    def has_ended(self, code: int) -> None:
        """It has ended, unless it had before."""
        if self.returncode is None:
            self.returncode = code

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            self._nursery.read()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        while self.poll() is None:
            time.sleep(_LOOK_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, as soon as it runs."""
        if not self.pid:
            self._signals.append(number)
        elif self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End it with all that it has started; before it runs, with all ranks of its nursery."""
        if not self.pid:
            self._nursery.kill()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Standby:
    """A nursery that has been forked before there was anything to start, with what `subprocess.Popen` has."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self._link = link
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None

    def begin(self, folder: Path, cwd: Path | None, inherited: Sequence[int]) -> None:
        """Have it wait for orders. It has the CPUs of this process, and of its descriptors those that are named."""
        orders_here, orders = socket.socketpair()
        reports_here, reports = socket.socketpair()
        self.stdin = orders_here.makefile("wb")
        self.stdout = reports_here.makefile("rb")
        orders_here.close()  # they stay open as long as the files
        reports_here.close()
        cpus = sorted(os.sched_getaffinity(0))
        told = {"folder": str(folder), "cwd": str(cwd or Path.cwd()), "cpus": cpus, "descriptors": [0, 1, *inherited]}
        with self._link, suppress(OSError):  # `read` finds that it has ended
            socket.send_fds(self._link, [json.dumps(told).encode()], [orders.fileno(), reports.fileno(), *inherited])
        orders.close()
        reports.close()

    def wait(self) -> int:
        """Wait for its end. Returns its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


_STANDBY: list[Standby] = []
_MESSAGE_BYTES = 1 << 20
_HIGH = 100
"""Descriptors below may be among those that are to be put in their places."""


def stand_by() -> list[str] | None:
    """Fork a nursery for the first ranks of this process. Returns None here, and in each rank its command's words."""
    if not CAN_FORK:
        return None
    here, there = socket.socketpair()
    process = fork()
    if process:
        there.close()
        _STANDBY.append(Standby(process, here))
        return None
    here.close()
    be_child()
    message, received, _, _ = socket.recv_fds(there, _MESSAGE_BYTES, _HIGH)
    if not message:  # there was nothing to start
        os._exit(0)
    told = json.loads(message)
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in received]
    for descriptor in (*received, there.detach()):
        os.close(descriptor)
    for copy, number in zip(copies, told["descriptors"], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.setsid()
    os.chdir(told["cwd"])
    os.sched_setaffinity(0, told["cpus"])
    return main(told["folder"])


def be_child() -> None:
    """Make this process, which is to be a rank or a nursery, end with its parent, and let its signals wait."""
    # One must neither kill a rank before it has its handlers nor be lost: `stop_on_signal` lets it in.
    signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS)
    end_with_parent()


# The process


def main(folder: str) -> list[str]:
    """Start the ranks that are ordered, and report how they end. Returns in each rank, with its command's words."""
    end_with_parent()
    call_this_process("rank-nursery")
    started: dict[int, int] = {}
    is_ready = False
    reports = os.dup(1)
    for rank, line in enumerate(sys.stdin):
        order = json.loads(line)
        if not is_ready:
            is_ready = True
            _write_to(order["log"])
            replace_environment(order["env"])
            if not order["is_alone"]:
                with suppress(Exception):  # a rank meets the same error, and says so
                    _prepare(folder, order["env"])
        process = fork()
        if process == 0:
            os.close(reports)
            _become(order)
            return list(order["command"])
        started[process] = rank
        _report(reports, rank=rank, pid=process)
    while started:
        process, status = os.wait()
        if process in started:
            _report(reports, rank=started.pop(process), code=os.waitstatus_to_exitcode(status))
    os._exit(0)


def _report(reports: int, **facts: int) -> None:
    os.write(reports, json.dumps(facts).encode() + b"\n")


def _prepare(folder: str, env: Mapping[str, str]) -> None:
    config = load(str(Path(folder) / "config.yaml")).config
    is_swarm = strategy_traits(config.strategy.name).loop == "collaborative"
    if config.script is None and config.launch.restart_in_place and not is_swarm and has_memory():
        preload(config, env)


def _become(order: Mapping[str, Any]) -> None:
    """Make this process what a launcher would have started as a rank."""
    os.setsid()
    # A signal must neither kill a rank before it has its handlers nor be lost: `stop_on_signal` lets it in.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    replace_environment(order["env"])
    call_this_process(f"rank-{RankEnv.from_mapping(order['env']).rank}")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _write_to(order["log"])


def _write_to(name: str) -> None:
    log = Path(name)
    for descriptor, ending in ((1, ".out"), (2, ".err")):
        with fileio.append(log.with_suffix(ending), log.parent) as file:
            os.dup2(file.fileno(), descriptor)


def run_words(words: Sequence[str]) -> None:
    """Run Python's own command line: its flags, which this process has already, and -c TEXT or -m MODULE with words."""
    rest = list(words)
    while rest[0] not in ("-c", "-m"):
        rest.pop(0)
    kind, text, *arguments = rest
    sys.argv = ["-c", *arguments]
    if kind == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
        return
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    run_words(main(sys.argv[1]))

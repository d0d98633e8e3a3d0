"""Peers as a user starts them: processes of the real commands on this machine, ended by their ids."""

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import readme
from tests.runs import wait_until

with warnings.catch_warnings():  # of hivemind's own use of torch
    warnings.simplefilter("ignore")
    import hivemind  # noqa: F401

FAST = ("monitor.loggers=[jsonl]", "collaborative.matchmaking_seconds=1.5", "model.name=tests.swarm.patient:model")
PROJECT = Path(__file__).resolve().parents[2]
TOKEN = r"TRAINKIT_TOKEN=(trainkit1\.\S+) python -m jobs\.join$"


@dataclass
class Command:
    """One started command, its output, and every process it has had."""

    process: subprocess.Popen[bytes]
    file: Path
    family: set[psutil.Process] = field(default_factory=set)

    @property
    def output(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace")

    def note_family(self) -> None:
        """Remember the processes that it has now."""
        try:
            own = psutil.Process(self.process.pid)
            self.family.update({own, *own.children(recursive=True)})
        except psutil.NoSuchProcess:
            return

    def says(self, pattern: str, seconds: float = 90.0) -> re.Match[str]:
        """Wait for a line of its output."""

        def found() -> re.Match[str] | None:
            self.note_family()
            is_over = self.process.poll() is not None  # asked first, for its last words count
            match = re.search(pattern, self.output, re.MULTILINE)
            assert match or not is_over, f"ended with {self.process.returncode}: {self.output}"
            return match

        return wait_until(found, seconds, lambda: f"{pattern!r} in {self.output}")

    def ends(self, seconds: float = 90.0) -> int:
        """Wait for its end; its exit code."""

        def over() -> bool:
            self.note_family()
            return self.process.poll() is not None

        try:
            wait_until(over, seconds, f"the end of {self.process.args!r}")
        except AssertionError as error:
            self.process.send_signal(signal.SIGABRT)  # it says where it hangs
            self.process.wait(10)
            raise AssertionError(f"{error}: {self.output}") from None
        return int(self.process.returncode)

    def kill(self) -> None:
        """As the memory killer does it: its main process alone."""
        self.note_family()
        self.process.kill()
        self.process.wait(10)

    def alive(self) -> list[psutil.Process]:
        """Its processes that still run. What has ended and waits for its parent does not count."""
        return [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@dataclass
class Commands:
    """Starts commands in a folder of the test's own."""

    folder: Path
    started: list[Command] = field(default_factory=list)

    @property
    def runs_root(self) -> Path:
        """Where their run folders are."""
        return self.folder / "runs"

    def run(self, name: str) -> Path:
        """A run folder."""
        return self.runs_root / name

    def start(self, *words: str, on: tuple[str, ...] = ()) -> Command:
        """``python -m jobs.<words>``; ``on``: what starts it on another machine."""
        return self._start(f"jobs.{words[0]}", *words[1:], on=on)

    def attack(self, *words: str) -> Command:
        """``python -m tests.swarm.attackers ATTACK VERB ...``."""
        return self._start("tests.swarm.attackers", *words)

    def intrude(self, token: str) -> Command:
        """``python -m tests.swarm.intruder``, to whom somebody with a token has told all but that."""
        return self._start("tests.swarm.intruder", token)

    def _start(
        self,
        module: str,
        *words: str,
        on: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Command:
        file = self.folder / f"{len(self.started)}-{module}.txt"
        with file.open("wb") as out:
            process = subprocess.Popen(
                [*on, sys.executable, "-m", module, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder or self.folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(PROJECT),
                    "TRAINKIT_RUNS": str(self.runs_root),
                    "XDG_STATE_HOME": str(self.folder / "state"),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **(env or {}),
                },
                start_new_session=True,
            )
        command = Command(process, file)
        self.started.append(command)
        return command

    def type_in(self, line: str, *more: str, folder: Path | None = None) -> Command:
        """A line as a user types it, ``VARIABLE=... python -m jobs.VERB ...``, and what a test adds to it."""
        words = shlex.split(line)
        env = dict(word.split("=", 1) for word in takewhile(lambda word: word != "python", words))
        python, dash_m, verb, *words = words[len(env) :]
        assert (python, dash_m, verb[:5]) == ("python", "-m", "jobs.")
        return self._start(verb, *words, *more, env=env, folder=folder)

    def create(self, *overrides: str) -> tuple[Command, str]:
        """A creator, by the guide's first line, and the token that it prints."""
        line = readme.blocks("swarm", readme.DOCS / "swarm.md")[0][0]
        creator = self.type_in(line, "--name", "creator", "--host", "127.0.0.1", *FAST, *overrides)
        return creator, creator.says(TOKEN)[1]

    def folder_of(self, name: str) -> tuple[str, str]:
        """Flags by which a peer's run folder is `run` of that name."""
        return "--run-dir", str(self.run(name))

    def join(self, token: str, *words: str, on: tuple[str, ...] = ()) -> Command:
        """A peer that joins what `create` made."""
        return self.start("join", token, "--allow-code", *words, on=on)

    def status(self, token: str, *, on: tuple[str, ...] = ()) -> dict[str, Any]:
        """What ``swarm status --json`` says; before it stands that others see the token."""
        asked = self.start("swarm", "status", token, "--json", on=on)
        assert asked.ends() == 0, asked.output
        return dict(json.loads(asked.output[asked.output.index("{") :]))

    def address(self) -> str:
        """Of the first swarm that was created."""
        return (self.run("hivemind-0001") / "swarm_address").read_text(encoding="utf-8").split()[0]

    def invite(self, name: str, *words: str) -> str:
        """The token that the creator of the first swarm gets for ``name``."""
        invited = self.start("swarm", "invite", name, "hivemind-0001", *words)
        token = invited.says(TOKEN)[1]
        assert invited.ends() == 0
        return token


@contextmanager
def started_in(folder: Path) -> Iterator[Commands]:
    """Starts commands; at the end all of their processes must be gone, and are made to go."""
    starter = Commands(folder)
    try:
        yield starter
    finally:
        for command in starter.started:
            command.note_family()
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGKILL)
                command.process.wait(10)
        left = [one for command in starter.started for one in command.alive()]
        _, left = psutil.wait_procs(left, timeout=15)
        for one in left:
            one.kill()
        assert left == []


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """`started_in` a folder of the test's own."""
    with started_in(tmp_path) as starter:
        yield starter


@pytest.fixture(scope="module")
def hivemind_here() -> Iterator[None]:
    """hivemind in this process. It wants processes started in a way of its own; other tests do not."""
    from trainkit.swarm.network import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIVEMIND_LOGLEVEL", "CRITICAL")
        patch.setenv("GOMP_SPINCOUNT", "0")
        processes.require_hivemind()
        yield
    multiprocessing.set_start_method(None, force=True)

"""The supervisor, on processes that are ranks only as far as it watches them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import wait_until
from trainkit.launch import supervisor
from trainkit.launch.supervisor import Ending, Rank, RankGroup, Requests, TimeLimits, supervise
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from trainkit.cluster.signals import heartbeat
from trainkit.run.events import Attempt
attempt, rank, beat = Attempt.named_in(os.environ), int(os.environ["RANK"]), heartbeat(os.environ)
"""
LIMITS = TimeLimits(time=60.0, lead=1.0, hang=60.0, cancel=1.0)
IMPORTABLE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
Group = Callable[..., RankGroup]
Supervised = Callable[..., Ending]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if ProcessId.of(pid).started]


# The processes


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Starts a process for each program."""

    def make(*programs: str) -> RankGroup:
        commands = ([sys.executable, "-c", program] for program in programs)
        return RankGroup([Rank(command, os.environ, tmp_path / str(rank)) for rank, command in enumerate(commands)])

    return make


def test_a_failing_rank_ends_the_others_within_seconds(group: Group) -> None:
    began = time.monotonic()
    started = group(SLEEP, "raise SystemExit(3)", STUBBORN)
    codes = started.wait()
    assert time.monotonic() - began < 50
    assert codes[1:] == [3, -signal.SIGKILL]
    assert started.deaths == {1: 3}


def test_a_signal_before_python_is_ready_does_not_kill_a_rank(group: Group) -> None:
    started = group("import time; time.sleep(0.5)")
    started.signal(signal.SIGUSR2)
    started.signal(signal.SIGTERM)
    assert started.wait() == [0]


def test_signals_reach_the_ranks_and_not_their_children(group: Group, tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        'signal.signal(signal.SIGUSR2, signal.SIG_DFL); print("up", flush=True); time.sleep(1.5)\'])\n'
        "got = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: got.append(1))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])\n"
        "raise SystemExit(child.wait() or len(got) - 1)\n"
    )
    started = group(program)
    wait_until(lambda: "up" in (tmp_path / "0.out").read_text())
    started.signal(signal.SIGUSR2)
    assert started.wait() == [0]


def test_what_a_rank_leaves_behind_ends_with_it(group: Group, tmp_path: Path) -> None:
    program = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    assert group(program).wait() == [0]
    left = int((tmp_path / "0.out").read_text())
    wait_until(lambda: not alive([left]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_ranks_do_not_outlive_whoever_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom trainkit.launch.supervisor import Rank, RankGroup\n"
        f"group = RankGroup([Rank([sys.executable, '-c', {STUBBORN!r}], os.environ, Path('rank'))])\n"
        "print(group.pid(0), flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=IMPORTABLE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        rank = int(starter.stdout.readline())
        wait_until(lambda: (tmp_path / "rank.out").read_text() != "")
        starter.kill()
    wait_until(lambda: not alive([rank]))


def test_a_death_that_a_signal_has_come_across_is_one(group: Group) -> None:
    started = group("raise SystemExit(3)")
    wait_until(lambda: not alive([started.pid(0)]))
    started.signal(signal.SIGUSR2)
    assert started.wait() == [3]
    assert started.deaths == {0: 3}


# Their supervision


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt.begin(RunDir.create(tmp_path / "run", "seed: 0\n"))


@pytest.fixture
def supervised(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    """Supervises ranks that each run one of the programs. They have no watchdogs of their own to wait for."""
    monkeypatch.setattr(supervisor, "OWN_WATCHDOG_SECONDS", 0.0)

    def call(*programs: str, requests: Requests | None = None, **limits: float) -> Ending:
        ranks, env = [], {**os.environ, **attempt.environment()}
        for rank, program in enumerate(programs):
            command = [sys.executable, "-c", PRELUDE + program]
            ranks.append(Rank(command, {**env, "RANK": str(rank)}, attempt.logs / f"rank-{rank}"))
        return supervise(attempt, ranks, replace(LIMITS, **limits), requests or Requests())

    return call


LOST = 'raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234")'


@pytest.mark.parametrize("first", [0, 1])
def test_a_killed_rank_is_named_and_not_who_missed_it(supervised: Supervised, attempt: Attempt, first: int) -> None:
    killed = "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    # It fails for want of the other, and says so, in the very moment of the other's death.
    missed = f"time.sleep(0.3)\nattempt.failed('RuntimeError: Connection reset by peer', rank=rank)\n{LOST}"
    ending = supervised(*([missed, killed] if first else [killed, missed]))
    assert (ending.state, ending.culprit) == ("FAILED", first)
    assert "killed by SIGKILL" in ending.why
    assert (history_of(attempt.run).failures[-1].rank, history_of(attempt.run).outcome) == (first, "FAILED")


@pytest.mark.parametrize(
    ("programs", "culprit", "why"),
    [
        ((LOST, "time.sleep(0.2); raise ValueError('bad label 12')"), 1, "ValueError: bad label 12"),
        (("attempt.failed('ValueError: mine', rank=0); sys.exit(1)",), 0, "ValueError: mine"),
    ],
    ids=["an error that is no lost connection", "recorded by the rank itself"],
)
def test_a_failure_is_recorded_once_with_its_rank_and_cause(
    supervised: Supervised, attempt: Attempt, programs: tuple[str, ...], culprit: int, why: str
) -> None:
    ending = supervised(*programs)
    assert (ending.culprit, ending.why) == (culprit, why)
    assert [(item.rank, item.error) for item in history_of(attempt.run).failures] == [(culprit, why)]


def test_a_stopped_rank_is_named_and_the_attempt_ended(supervised: Supervised, attempt: Attempt) -> None:
    # Both begin a step; one is stopped in it, the other waits for it as in a collective.
    began = time.monotonic()
    ending = supervised("beat(); time.sleep(60)", "beat(); os.kill(os.getpid(), signal.SIGSTOP)", hang=1.5)
    assert time.monotonic() - began < 50
    assert (ending.state, ending.culprit) == ("FAILED", 1)
    assert "no progress" in ending.why
    assert "stopped by a signal" in ending.why
    assert [(failure.rank, failure.error) for failure in history_of(attempt.run).failures] == [(1, ending.why)]


def test_of_ranks_that_hang_the_one_that_is_behind_is_named(supervised: Supervised) -> None:
    assert supervised("beat(); beat(); time.sleep(60)", "beat(); time.sleep(60)", hang=1.5).culprit == 1


def test_ranks_that_make_progress_do_not_hang(supervised: Supervised) -> None:
    steps = "for _ in range(16): beat(); time.sleep(0.25)"
    assert supervised(steps, steps, hang=2.5).state == "COMPLETED"


def test_a_supervisor_that_was_stopped_finds_no_hang() -> None:
    ranks = "beat(); time.sleep(1); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(4)\n"
    ranks += "os.kill(os.getppid(), signal.SIGCONT); time.sleep(0.5)"
    program = [sys.executable, "-c", STOPPED.format(ranks=ranks)]  # a process of its own, which may be stopped
    said = subprocess.run(program, env=IMPORTABLE, capture_output=True, text=True, timeout=200, check=False)
    assert said.stdout.split() == ["COMPLETED"], said.stderr


STOPPED = """
import os, sys, tempfile
from pathlib import Path
from tests.launch.test_supervisor import PRELUDE
from trainkit.launch import supervisor
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir

supervisor._LATE_SECONDS, supervisor.OWN_WATCHDOG_SECONDS = 2.0, 0.0
with tempfile.TemporaryDirectory() as folder:
    attempt = Attempt.begin(RunDir.create(Path(folder, "run"), "seed: 0"))
    env = {{**os.environ, **attempt.environment(), "RANK": "0"}}
    rank = supervisor.Rank([sys.executable, "-c", PRELUDE + {ranks!r}], env, attempt.logs / "rank-0")
    limits = supervisor.TimeLimits(60.0, 1.0, 3.0, 1.0)
    print(supervisor.supervise(attempt, [rank], limits, supervisor.Requests()).state)
"""


def test_ranks_that_still_start_have_more_patience(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised("time.sleep(3)", hang=1.0).state == "COMPLETED"
    monkeypatch.setattr(supervisor, "STARTING_SECONDS", 1.0)
    assert supervised("time.sleep(60)", hang=1.0).state == "FAILED"


def test_ranks_that_do_not_save_are_ended_at_the_time_limit(supervised: Supervised) -> None:
    assert supervised("time.sleep(60)", time=4.0, lead=2.0).state == "TIMEOUT"


@pytest.mark.parametrize(("requested_after", "cancel"), [([1.0], 1.0), ([1.0, 1.3], 50.0)], ids=["once", "twice"])
def test_a_cancel_lets_ranks_save_and_a_second_one_ends_them(
    supervised: Supervised, requested_after: list[float], cancel: float
) -> None:
    requests = Requests()
    for seconds in requested_after:
        threading.Timer(seconds, requests.note, [signal.SIGINT]).start()
    began = time.monotonic()
    assert supervised("time.sleep(60)", requests=requests, cancel=cancel).state == "CANCELLED"
    assert time.monotonic() - began < 50

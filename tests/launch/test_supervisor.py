"""The supervisor, on processes that are ranks in no more than what it watches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.launch import supervisor as module
from trainkit.launch.supervisor import Ending, Limits, Rank, Requests, supervise
from trainkit.ranks import signals
from trainkit.run.events import Attempt, history_of
from trainkit.run.folder import RunDir

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from trainkit.ranks.signals import heartbeat
from trainkit.run.events import Attempt
attempt, rank, beat = Attempt.named_in(os.environ), int(os.environ["RANK"]), heartbeat(os.environ)
"""
LIMITS = Limits(time=60.0, lead=1.0, hang=60.0, cancel=1.0)
Supervised = Callable[..., Ending]


@pytest.fixture(autouse=True)
def _no_watchdogs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks here have none of their own to wait for."""
    monkeypatch.setattr(module, "OWN_WATCHDOG_SECONDS", 0.0)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt.begin(RunDir.create(tmp_path / "run", "seed: 0\n"))


@pytest.fixture
def supervised(attempt: Attempt) -> Supervised:
    """Supervise ranks that each run one of the programs."""

    def call(*programs: str, limits: Limits = LIMITS, requests: Requests | None = None) -> Ending:
        ranks = [
            Rank(
                [sys.executable, "-c", PRELUDE + program],
                {**os.environ, **attempt.environment(), "RANK": str(rank)},
                attempt.logs / f"rank-{rank}.out",
                attempt.logs / f"rank-{rank}.err",
            )
            for rank, program in enumerate(programs)
        ]
        return supervise(attempt, ranks, limits, requests or Requests())

    return call


def test_ranks_that_come_to_their_end_are_completed(supervised: Supervised) -> None:
    ending = supervised("pass", "pass")
    assert (ending.state, ending.codes, ending.culprit) == ("COMPLETED", (0, 0), None)


LOST = 'raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234")'


@pytest.mark.parametrize("first", [0, 1])
def test_a_killed_rank_is_named_and_not_the_one_that_missed_it_first(
    supervised: Supervised, attempt: Attempt, first: int
) -> None:
    killed = "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    # It fails for want of the other, and says so, in the very moment of the other's death.
    missed = f"time.sleep(0.3)\nattempt.failed('RuntimeError: Connection reset by peer', rank=rank)\n{LOST}"
    programs = [missed, killed] if first else [killed, missed]
    ending = supervised(*programs)
    assert (ending.state, ending.culprit) == ("FAILED", first)
    assert "killed by SIGKILL" in ending.why
    assert (history_of(attempt.run).failures[-1].rank, history_of(attempt.run).outcome) == (first, "FAILED")


def test_the_rank_whose_error_is_no_lost_connection_is_named(supervised: Supervised, attempt: Attempt) -> None:
    ending = supervised(LOST, "time.sleep(0.2); raise ValueError('bad label 12')")
    assert (ending.culprit, ending.why) == (1, "ValueError: bad label 12")


def test_what_a_rank_says_in_three_lines_is_why_it_failed(supervised: Supervised) -> None:
    words = "There is no cifar10 in data.\\n  why: train is missing.\\n  fix: prepare it.\\n"
    ending = supervised(f"sys.stderr.write('{words}'); sys.exit(2)")
    assert ending.why == "There is no cifar10 in data."


def test_a_rank_that_has_said_it_itself_is_not_written_down_twice(supervised: Supervised, attempt: Attempt) -> None:
    supervised("attempt.failed('ValueError: mine', rank=0); sys.exit(1)")
    assert [failure.error for failure in history_of(attempt.run).failures] == ["ValueError: mine"]


def test_a_stopped_rank_is_named_and_the_attempt_ended(supervised: Supervised, attempt: Attempt) -> None:
    # Both begin a step; one is stopped in it, the other waits for it as in a collective.
    waiting = "beat(); time.sleep(60)"
    stopped = "beat(); os.kill(os.getpid(), signal.SIGSTOP)"
    began = time.monotonic()
    ending = supervised(waiting, stopped, limits=Limits(60.0, 1.0, 1.5, 1.0))
    assert time.monotonic() - began < 20
    assert (ending.state, ending.culprit) == ("FAILED", 1)
    assert "no progress" in ending.why
    assert "stopped by a signal" in ending.why
    assert [(failure.rank, failure.error) for failure in history_of(attempt.run).failures] == [(1, ending.why)]


def test_of_ranks_that_hang_the_one_that_is_behind_is_named(supervised: Supervised) -> None:
    ending = supervised("beat(); beat(); time.sleep(60)", "beat(); time.sleep(60)", limits=Limits(60.0, 1.0, 1.5, 1.0))
    assert ending.culprit == 1


def test_ranks_that_make_progress_do_not_hang(supervised: Supervised) -> None:
    steps = "for _ in range(16): beat(); time.sleep(0.25)"
    assert supervised(steps, steps, limits=Limits(60.0, 1.0, 2.5, 1.0)).state == "COMPLETED"


def test_a_supervisor_that_was_stopped_itself_takes_nobody_for_hanging() -> None:
    ranks = "beat(); time.sleep(1); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(4)\n"
    ranks += "os.kill(os.getppid(), signal.SIGCONT); time.sleep(0.5)"
    program = [sys.executable, "-c", STOPPED.format(ranks=ranks)]  # a process of its own, which may be stopped
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert said.stdout.split() == ["COMPLETED"], said.stderr


STOPPED = """
import os, sys, tempfile
from pathlib import Path
from tests.launch.test_supervisor import PRELUDE
from trainkit.launch import supervisor as module
from trainkit.launch.supervisor import Rank
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir

module._LATE_SECONDS, module.OWN_WATCHDOG_SECONDS = 2.0, 0.0
with tempfile.TemporaryDirectory() as folder:
    attempt = Attempt.begin(RunDir.create(Path(folder, "run"), "seed: 0"))
    env = {{**os.environ, **attempt.environment(), "RANK": "0"}}
    program = PRELUDE + {ranks!r}
    rank = Rank([sys.executable, "-c", program], env, attempt.logs / "rank-0.out", attempt.logs / "rank-0.err")
    limits = module.Limits(60.0, 1.0, 3.0, 1.0)
    print(module.supervise(attempt, [rank], limits, module.Requests()).state)
"""


def test_ranks_that_still_start_have_more_patience(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "time.sleep(3)"
    assert supervised(slow, limits=Limits(60.0, 1.0, 1.0, 1.0)).state == "COMPLETED"
    monkeypatch.setattr(module, "STARTING_SECONDS", 1.0)
    assert supervised("time.sleep(60)", limits=Limits(60.0, 1.0, 1.0, 1.0)).state == "FAILED"


SAVES = """
asked = []
for number in (signal.SIGUSR2, signal.SIGTERM): signal.signal(number, lambda *_: asked.append(1))
print("up", flush=True)
while not asked: time.sleep(0.02)
attempt.handed_back(node_rank=0, step=1, signals=[])
"""


def test_before_the_time_limit_ranks_are_told_to_save(supervised: Supervised) -> None:
    ending = supervised(SAVES, limits=Limits(4.0, 2.0, 60.0, 1.0))
    assert (ending.state, ending.handed_back) == ("PREEMPTED", True)


def test_ranks_that_do_not_heed_the_time_limit_are_ended(supervised: Supervised) -> None:
    assert supervised("time.sleep(60)", limits=Limits(2.0, 1.0, 60.0, 1.0)).state == "TIMEOUT"


def test_a_cancel_lets_ranks_save_and_then_ends_them(supervised: Supervised) -> None:
    requests = Requests()
    threading.Timer(1.0, requests.note, [signal.SIGTERM]).start()
    began = time.monotonic()
    assert supervised("time.sleep(60)", requests=requests).state == "CANCELLED"
    assert time.monotonic() - began < 15


def test_a_second_cancel_ends_them_at_once(supervised: Supervised) -> None:
    requests = Requests()
    for after in (1.0, 1.3):
        threading.Timer(after, requests.note, [signal.SIGINT]).start()
    began = time.monotonic()
    assert supervised("time.sleep(60)", requests=requests, limits=Limits(60.0, 1.0, 60.0, 50.0)).state == "CANCELLED"
    assert time.monotonic() - began < 15


def test_what_a_killed_supervisor_has_left_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import time\nfrom trainkit.ranks.signals import pulses\n"
    code += "with pulses(2):\n    print(flush=True); time.sleep(600)"
    killed = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    killed.stdout.readline()
    (file,) = tmp_path.iterdir()
    with signals.pulses(1):
        assert file.exists(), "its supervisor lives"
        assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    killed.communicate()
    with signals.pulses(1):
        assert not file.exists()
    assert list(tmp_path.iterdir()) == []

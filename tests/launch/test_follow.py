"""The prompt is back soon after the end of a run of this machine."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shell import PROJECT
from trainkit.common.errors import RunFailedError
from trainkit.launch import follow
from trainkit.run.events import Attempt, read_events, submitted
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId

JOB = """
import sys, time
from pathlib import Path
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
attempt = Attempt(RunDir(Path(sys.argv[1])), 0)
sys.stdin.readline()
attempt.started(total_steps=1)
time.sleep(0.3)
if sys.argv[2]:
    attempt.ended(sys.argv[2])
    time.sleep(100)  # whoever waits does not wait for the process
"""
Started = Callable[[str], RunDir]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A job of this machine, which ends in the given state, or without a word."""
    jobs = []

    def start(state: str) -> RunDir:
        run = RunDir.create(tmp_path / "run", "seed: 0\n")
        Attempt.begin(run)
        command = [sys.executable, "-c", JOB, str(run.path), state]
        job = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE)
        jobs.append(job)
        submitted(run, "local", str(job.pid), ProcessId.of(job.pid), attempts_before=0)
        assert job.stdin is not None
        job.stdin.write(b"\n")
        job.stdin.flush()
        return run

    yield start
    for job in jobs:
        job.kill()
        job.communicate()


@pytest.mark.parametrize("wait", [follow.wait_for, follow.follow_to_end])
def test_the_prompt_is_back_at_once_when_a_run_has_ended_or_died(
    started: Started, wait: Callable[[RunDir], int], tmp_path: Path
) -> None:
    run = started("COMPLETED")
    assert wait(run) == 0
    (ended,) = read_events(run, "ended")
    assert time.time() - ended["time"] < 2.0
    run.path.rename(tmp_path / "first")
    run = started("")
    began = time.monotonic()
    with pytest.raises(RunFailedError, match="FAILED"):
        wait(run)
    assert time.monotonic() - began < 20

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.evidence import failure_of
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir

TRACEBACK = """\
some warning
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: {}
and some words after it
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose second attempt is over."""
    run_dir = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    for attempt in (0, 1):
        run_dir.attempt_logs(attempt).mkdir()
    return run_dir


def err(run: RunDir, attempt: int, rank: int, text: str, when: float) -> None:
    path = run.attempt_logs(attempt) / f"rank-{rank}.err"
    path.write_text(text)
    os.utime(path, (when, when))


def test_the_first_rank_that_said_it_failed_is_the_one(run: RunDir) -> None:
    append_event(run, "failed", attempt=0, rank=3, error="of an earlier attempt")
    append_event(run, "failed", attempt=1, rank=2, error="ValueError: bad")
    append_event(run, "failed", attempt=1, rank=0, error="connection closed by peer")
    err(run, 1, 2, TRACEBACK.format("bad"), 20)
    failure = failure_of(run)
    assert failure is not None
    assert (failure.rank, failure.error) == (2, "ValueError: bad")
    assert failure.traceback[0].startswith("Traceback")
    assert failure.traceback[-1] == "ValueError: bad"


def test_an_earlier_attempt_can_be_asked_for(run: RunDir) -> None:
    append_event(run, "failed", attempt=0, rank=3, error="first")
    append_event(run, "failed", attempt=1, rank=1, error="second")
    failure = failure_of(run, 0)
    assert failure is not None
    assert failure.rank == 3


def test_without_events_the_oldest_traceback_is_the_one(run: RunDir) -> None:
    err(run, 1, 0, TRACEBACK.format("peer is gone"), 30)
    err(run, 1, 1, TRACEBACK.format("the cause"), 20)
    err(run, 1, 2, "no traceback here\n", 10)
    failure = failure_of(run)
    assert failure is not None
    assert (failure.rank, failure.error) == (1, "ValueError: the cause")


def test_tracebacks_are_read_without_the_prefix_that_torch_puts_before_them(run: RunDir) -> None:
    lines = TRACEBACK.format("prefixed").splitlines()
    err(run, 1, 1, "\n".join(f"[rank1]: {line}" for line in lines), 20)
    failure = failure_of(run)
    assert failure is not None
    assert failure.traceback[-1] == "ValueError: prefixed"


def test_a_rank_that_was_killed_is_known_from_sruns_words(run: RunDir) -> None:
    (run.logs / "batch.out").write_text("srun: error: n2: task 3: Killed\nsrun: error: n1: tasks 0-1: Terminated\n")
    failure = failure_of(run)
    assert failure is not None
    assert (failure.rank, failure.error, failure.traceback) == (3, "Killed (on n2)", ())


def test_a_run_that_says_nothing_of_a_failure_has_none(run: RunDir) -> None:
    assert failure_of(run) is None

"""The rank that failed first."""

import os
from pathlib import Path

import pytest

from tests.diagnosis.runs import CONFIG
from trainkit.cluster.scheduler import JobState
from trainkit.diagnosis.causes import cause_of
from trainkit.diagnosis.evidence import Failure, failure_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

TRACEBACK = """\
some warning
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: {}
and some words after it
"""


@pytest.fixture
def failed_run(tmp_path: Path) -> RunDir:
    """A run whose second attempt is over."""
    run_dir = RunDir.create(tmp_path / "runs" / "ddp-0001", CONFIG)
    for attempt in (0, 1):
        run_dir.attempt_logs(attempt).mkdir()
    return run_dir


def first_failure(run: RunDir, attempt: int = 1) -> Failure:
    failure = failure_of(run, attempt)
    assert failure is not None
    return failure


def err(run: RunDir, attempt: int, rank: int, text: str, when: float) -> None:
    path = run.attempt_logs(attempt) / f"rank-{rank}.err"
    path.write_text(text)
    os.utime(path, (when, when))


def test_the_first_rank_that_said_it_failed_is_the_one(failed_run: RunDir) -> None:
    append_event(failed_run, "failed", attempt=0, rank=3, error="of an earlier attempt")
    append_event(failed_run, "failed", attempt=1, rank=2, error="ValueError: bad")
    append_event(failed_run, "failed", attempt=1, rank=0, error="connection closed by peer")
    err(failed_run, 1, 2, TRACEBACK.format("bad"), 20)
    failure = first_failure(failed_run)
    assert (failure.rank, failure.error) == (2, "ValueError: bad")
    assert failure.traceback[0].startswith("Traceback")
    assert failure.traceback[-1] == "ValueError: bad"
    assert first_failure(failed_run, 0).rank == 3


def test_without_events_the_oldest_traceback_is_the_one(failed_run: RunDir) -> None:
    err(failed_run, 1, 0, TRACEBACK.format("peer is gone"), 30)
    err(failed_run, 1, 1, TRACEBACK.format("the cause"), 20)
    err(failed_run, 1, 2, "no traceback here\n", 10)
    failure = first_failure(failed_run)
    assert (failure.rank, failure.error) == (1, "ValueError: the cause")


def test_a_rank_ended_with_the_step_is_the_one_where_others_only_miss_one(failed_run: RunDir) -> None:
    err(failed_run, 1, 1, TRACEBACK.format("Connection reset by peer"), 10)
    (failed_run.logs / "batch.out").write_text("srun: Terminating StepId=7.0\nsrun: error: n1: task 0: Killed\n")
    assert first_failure(failed_run).rank == 0
    err(failed_run, 1, 1, TRACEBACK.format("the cause"), 10)
    assert first_failure(failed_run).rank == 1


def test_a_run_that_says_nothing_of_a_failure_has_none(failed_run: RunDir) -> None:
    assert failure_of(failed_run, 1) is None


@pytest.mark.parametrize(("batch", "cause"), [(None, "launch-failure"), ("", "no-words")])
def test_an_empty_log_of_the_job_is_no_folder_that_its_node_does_not_see(
    tmp_path: Path, batch: str | None, cause: str
) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", "seed: 0\n")
    if batch is not None:
        (run.logs / "batch.out").write_text(batch)
    found = cause_of(run, JobState("FAILED", "4711", "slurm", "exit code 1:0", nodes="n1"))
    assert found is not None
    assert found.name == cause

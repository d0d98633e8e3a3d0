"""What a batch script does around its ranks, with a SLURM made of shell scripts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.launch import batch_job
from trainkit.records.attempts import Attempt
from trainkit.records.events import read_events
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

FakeCommand = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(batch_job, "END_SECONDS", 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "my run", "seed: 0\n")


def job(run: RunDir, **more: str) -> dict[str, str]:
    return {**os.environ, "TRAINKIT_RUN_DIR": str(run.path), "SLURM_JOB_ID": "7", **more}


def begun(run: RunDir) -> dict[str, str]:
    """The environment of a job's ranks."""
    lines = batch_job.begin(job(run, SLURM_JOB_NODELIST="gpu[03-04]")).splitlines()
    words = [shlex.split(line)[1].partition("=") for line in lines]
    return job(run, **{name: value for name, _, value in words})


def test_it_begins_an_attempt_on_the_first_node_with_a_secret_of_its_own(run: RunDir) -> None:
    first, second = begun(run), begun(run)
    assert Attempt.named_in(first) == Attempt(run, 0)
    assert Attempt.named_in(second) == Attempt(run, 1)
    assert first["MASTER_ADDR"] == "gpu03"
    assert first["MASTER_PORT"].isdigit()
    assert len(first["TRAINKIT_SECRET"]) >= 16
    assert first["TRAINKIT_SECRET"] != second["TRAINKIT_SECRET"]
    assert first["TRAINKIT_SECRET"] not in "".join(
        path.read_text() for path in run.path.rglob("*") if path.is_file()
    ), "no secret is ever written into a run folder"


def hand_back(env: dict[str, str]) -> Attempt:
    attempt = Attempt.named_in(env)
    assert attempt is not None
    attempt.handed_back(node_rank=0, step=5, signals=["SIGUSR2"])
    return attempt


def test_what_was_handed_back_is_requeued(run: RunDir, fake_command: FakeCommand) -> None:
    fake_command("squeue", "echo RUNNING")
    calls = fake_command("scontrol", "exit 0")
    env = begun(run)
    hand_back(env)
    batch_job.end(0, {**env, "PATH": os.environ["PATH"]}, requeue=True)
    assert calls.read_text() == "requeue 7\n"
    assert life_of(run).requeued == {0}


@pytest.mark.parametrize("squeue", ["exit 1", "echo slurm_load_jobs error: Unable to contact >&2; exit 1"])
def test_a_queue_that_does_not_answer_loses_no_training(run: RunDir, fake_command: FakeCommand, squeue: str) -> None:
    asked = fake_command("squeue", squeue)
    calls = fake_command("scontrol", "exit 0")
    env = begun(run)
    hand_back(env)
    batch_job.end(0, env, requeue=True)
    assert len(asked.read_text().splitlines()) == 3, "it is asked again"
    assert calls.read_text() == "requeue 7\n", "and the requeue is tried anyway"


def test_a_refused_requeue_is_tried_again_then_written_down_and_never_ends_with_0(
    run: RunDir, fake_command: FakeCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command("squeue", "echo RUNNING")
    calls = fake_command("scontrol", "echo 'Requeue is disabled for this partition' >&2; exit 1")
    env = begun(run)
    hand_back(env)
    assert batch_job.end(0, env, requeue=True) == 1
    assert len(calls.read_text().splitlines()) == 3
    assert "Requeue is disabled for this partition" in life_of(run).failures[0].error
    assert life_of(run).outcome == "FAILED"
    assert "jobs.resume" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING"])
def test_a_job_that_is_being_cancelled_is_not_requeued(run: RunDir, fake_command: FakeCommand, state: str) -> None:
    fake_command("squeue", f"echo {state}")
    calls = fake_command("scontrol", "exit 0")
    env = begun(run)
    hand_back(env)
    assert batch_job.end(0, env, requeue=True) == 1, "jobs that wait for a finished training must not start"
    assert not calls.exists()


def test_without_requeue_a_saved_run_is_left_as_it_is_and_is_no_success(run: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "exit 0")
    env = begun(run)
    hand_back(env)
    assert batch_job.end(0, env, requeue=False) == 1
    assert not calls.exists()
    assert life_of(run).outcome == "PREEMPTED"


def test_a_training_that_came_to_its_end_leaves_the_job_its_own_code(run: RunDir) -> None:
    env = begun(run)
    attempt = Attempt.named_in(env)
    assert attempt is not None
    attempt.ended("COMPLETED", step=9)
    assert batch_job.end(0, env, requeue=True) == 0
    assert [event["event"] for event in read_events(run)] == ["ended"]


def test_a_job_whose_ranks_failed_is_written_down_as_such(run: RunDir) -> None:
    assert batch_job.end(3, begun(run), requeue=True) == 3
    assert life_of(run).outcome == "FAILED"


def test_a_run_that_was_refused_before_it_had_a_folder_leaves_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "never")
    assert batch_job.end(2, begun(run), requeue=True) == 2
    assert not run.events.exists()


def test_the_hand_back_of_an_earlier_attempt_requeues_nothing(run: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("scontrol", "exit 0")
    hand_back(begun(run))
    assert batch_job.end(1, begun(run), requeue=True) == 1
    assert not calls.exists()

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.run.events import append_event, history_of
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.schedulers.slurm_programs import read_sacct, read_squeue
from trainkit.schedulers.states import job_state, job_states

SQUEUE = """\
11699947|COMPLETED|None|0:05|n[1-4]
11699946|PENDING|BeginTime|0:00|
11699944_0|RUNNING|None|0:39|n1
"""
SACCT = """\
11699941|COMPLETED|0:0|n[1-2]
11699942|REQUEUED|0:0|n[1-2]
11699943|CANCELLED by 0|0:0|n[1-2]
11699944_0|FAILED|1:0|n1
11699945_[2-9]|PENDING|0:0|None assigned
11699942|COMPLETED|0:0|n[1-2]
11699946|TIMEOUT|0:0|None assigned
"""

FakeCommand = Callable[[str, str], Path]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunDir]:
    """A run folder with a ``submitted`` event of these fields."""

    def make(name: str = "ddp-0001", **submitted: Any) -> RunDir:
        run_dir = RunDir.create(tmp_path / "runs" / name, to_yaml(load("ddp").config))
        if submitted:
            append_event(run_dir, "submitted", **submitted)
        return run_dir

    return make


def of_process(process: ProcessId) -> dict[str, Any]:
    return {
        "executor": "local",
        "job_id": "1",
        "host": process.host,
        "pid": process.pid,
        "process_started": process.started,
    }


def test_squeue_is_read() -> None:
    states = read_squeue(SQUEUE)
    assert (states["11699946"].state, states["11699946"].reason, states["11699946"].alive) == (
        "PENDING",
        "BeginTime",
        "yes",
    )
    assert (states["11699944_0"].state, states["11699944_0"].nodes) == ("RUNNING", "n1")
    assert states["11699947"].alive == "no"


def test_sacct_is_read_and_of_a_requeued_job_the_newest_run_counts() -> None:
    states = read_sacct(SACCT)
    assert states["11699942"].state == "COMPLETED"
    assert states["11699943"].state == "CANCELLED"
    assert states["11699944_0"].reason == "exit code 1:0"
    assert "11699945_[2-9]" not in states


def test_many_runs_cost_one_call_to_each_command(run: Callable[..., RunDir], fake_command: FakeCommand) -> None:
    squeue, sacct = fake_command("squeue", f"cat <<'E'\n{SQUEUE}E"), fake_command("sacct", f"cat <<'E'\n{SACCT}E")
    ids = ("11699941", "11699942", "11699946", "11699947")
    runs = [run(f"ddp-{index:04}", executor="slurm", job_id=job_id) for index, job_id in enumerate(ids)]
    assert [state.state for state in job_states(runs)] == ["COMPLETED", "COMPLETED", "PENDING", "COMPLETED"]
    assert len(squeue.read_text().splitlines()) == 1
    assert len(sacct.read_text().splitlines()) == 1
    assert "11699946" not in sacct.read_text(), "what the queue knows is not asked again"


def test_without_accounting_a_forgotten_job_is_unknown_and_that_is_said(
    run: Callable[..., RunDir], fake_command: FakeCommand
) -> None:
    fake_command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake_command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    state = job_state(run(executor="slurm", job_id="7"))
    assert state.state == "UNKNOWN"
    assert state.alive == "no", "the queue has answered, and does not have it"
    assert "no accounting" in state.reason
    assert "Slurm accounting storage is disabled" in state.reason


@pytest.mark.parametrize(
    "squeue", ["echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "exit 137"]
)
def test_a_job_that_nobody_can_be_asked_about_is_never_taken_for_ended(
    run: Callable[..., RunDir], fake_command: FakeCommand, squeue: str
) -> None:
    fake_command("squeue", squeue)
    fake_command("sacct", "exit 1")
    state = job_state(run(executor="slurm", job_id="7"))
    assert (state.state, state.alive) == ("UNKNOWN", "unknown")


def test_without_accounting_the_runs_own_record_tells_how_it_ended(
    run: Callable[..., RunDir], fake_command: FakeCommand
) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 1")
    run_dir = run(executor="slurm", job_id="7")
    append_event(run_dir, "ended", state="COMPLETED")
    assert job_state(run_dir).state == "COMPLETED"


def test_a_record_from_before_the_newest_submission_tells_nothing(
    run: Callable[..., RunDir], fake_command: FakeCommand
) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    run_dir = run(executor="slurm", job_id="7")
    append_event(run_dir, "failed", rank=0)
    append_event(run_dir, "submitted", executor="slurm", job_id="8")
    assert job_state(run_dir).state == "UNKNOWN"


def test_a_local_run_is_as_alive_as_its_controller(run: Callable[..., RunDir]) -> None:
    me = ProcessId.of(os.getpid())
    run_dir = run(**of_process(me), attempts_before=0)
    assert job_state(run_dir).state == "PENDING"
    run_dir.attempt_logs(0).mkdir()
    assert (job_state(run_dir).state, job_state(run_dir).alive) == ("RUNNING", "yes")
    append_event(run_dir, "ended", state="COMPLETED")
    assert (job_state(run_dir).state, job_state(run_dir).alive) == ("COMPLETED", "no")


def test_a_local_run_whose_controller_was_killed_has_failed(run: Callable[..., RunDir]) -> None:
    gone = ProcessId(ProcessId.of(os.getpid()).host, os.getpid(), "1")
    state = job_state(run(**of_process(gone)))
    assert state.state == "FAILED"
    assert "without a word" in state.reason


def test_a_local_run_of_another_machine_can_only_be_asked_there(run: Callable[..., RunDir]) -> None:
    state = job_state(run(**of_process(ProcessId("elsewhere", 1, "1"))))
    assert state.state == "UNKNOWN"
    assert "elsewhere" in state.reason
    assert state.alive == "unknown"


def test_a_run_without_a_job_is_known_by_its_record_only(run: Callable[..., RunDir]) -> None:
    run_dir = run()
    assert job_state(run_dir).state == "NOT SUBMITTED"
    append_event(run_dir, "started")
    assert job_state(run_dir).state == "UNKNOWN"
    append_event(run_dir, "ended", state="COMPLETED")
    assert job_state(run_dir).state == "COMPLETED"


def test_a_run_is_alive_as_long_as_one_of_its_jobs_is(run: Callable[..., RunDir], fake_command: FakeCommand) -> None:
    squeue = fake_command("squeue", "echo '7|RUNNING|None|0:39|n1'")
    sacct = fake_command("sacct", "echo '8|FAILED|1:0|n2'")
    run_dir = run(executor="slurm", job_id="7")
    append_event(run_dir, "submitted", executor="slurm", job_id="8")
    state = job_state(run_dir)
    assert (state.job_id, state.state, state.alive) == ("8", "FAILED", "yes")
    assert [job.job_id for job in state.living()] == ["7"]
    assert [len(calls.read_text().splitlines()) for calls in (squeue, sacct)] == [1, 1]


@pytest.mark.parametrize(("state", "alive"), [("NODE_FAIL", "unknown"), ("PREEMPTED", "unknown"), ("FAILED", "no")])
def test_the_accounts_alone_do_not_end_a_job_that_may_be_queued_again(
    run: Callable[..., RunDir], fake_command: FakeCommand, state: str, alive: str
) -> None:
    fake_command("squeue", "exit 1")
    fake_command("sacct", f"echo '7|{state}|1:0|n1'")
    assert job_state(run(executor="slurm", job_id="7")).alive == alive


def test_an_ending_that_another_attempt_followed_is_none(run: Callable[..., RunDir], fake_command: FakeCommand) -> None:
    fake_command("squeue", "exit 1")
    fake_command("sacct", "exit 1")
    run_dir = run(executor="slurm", job_id="7")
    append_event(run_dir, "ended", attempt=0, state="FAILED")
    append_event(run_dir, "started", attempt=1)
    assert job_state(run_dir).alive == "unknown"


@pytest.mark.parametrize("newest", [0, 1])
def test_an_old_attempt_counts_for_nothing_after_a_newer_one(run: Callable[..., RunDir], newest: int) -> None:
    run_dir = run(executor="slurm", job_id="7")
    append_event(run_dir, "started", attempt=newest)
    append_event(run_dir, "failed", attempt=0, rank=1, error="Connection reset by peer")
    assert history_of(run_dir).outcome == (None if newest else "FAILED")

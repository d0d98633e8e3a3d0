from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.errors import UserError
from trainkit.run.events import append_event, cancelled, history_of, read_events, refused, submitted, submitting
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.schedulers import slurm_submission as adoption
from trainkit.schedulers.states import job_state, job_states, require_no_job

FakeCommand = Callable[[str, str], Path]


def squeue(scripts: str, state: str = "PENDING") -> str:
    """A queue in which job 41 was queued with another script, and each of the others with one of ours."""
    return f"""case "$*" in
*%o*) printf '%s' '41|/somewhere/else/submit.sbatch\n{scripts}' ;;
*) for id in 41 42 43 42_0 42_1; do echo "$id|{state}|None|0:00|"; done ;;
esac""".replace("printf '%s'", "printf '%b'")


@pytest.fixture
def cut_short(tmp_path: Path) -> RunDir:
    """A run whose submitter was killed after it had called sbatch."""
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", to_yaml(load("ddp").config))
    gone = ProcessId.of(os.getpid()).fields() | {"process_started": "1"}
    append_event(run, "submitting", executor="slurm", attempts_before=0, **gone)
    return run


def test_a_job_is_found_by_its_script(cut_short: RunDir, fake_command: FakeCommand) -> None:
    fake_command("squeue", squeue(f"42|{cut_short.script}\\n"))
    state = job_state(cut_short)
    assert (state.state, state.job_id, state.alive) == ("PENDING", "42", "yes")
    assert [(event["job_id"], event["adopted"]) for event in read_events(cut_short, "submitted")] == [("42", True)]
    assert history_of(cut_short).cut_short is None, "and is not looked for again"


def test_one_that_has_ended_is_found_in_the_accounts(cut_short: RunDir, fake_command: FakeCommand) -> None:
    fake_command("squeue", "exit 0")
    line = f"42|sbatch --parsable {cut_short.script}"
    fake_command("sacct", f'case "$*" in *SubmitLine*) echo "{line}" ;; *) echo "42|FAILED|1:0|n1" ;; esac')
    assert (job_state(cut_short).state, history_of(cut_short).submissions[0].job_id) == ("FAILED", "42")


def test_runs_of_a_sweep_are_tasks_of_its_array(tmp_path: Path, fake_command: FakeCommand) -> None:
    sweep = tmp_path / "sweep-0001"
    runs = [RunDir.create(sweep / str(index), to_yaml(load("ddp").config)) for index in range(2)]
    (sweep / "sweep.json").write_text("[]")
    for run in runs:
        append_event(run, "submitting", executor="slurm", attempts_before=0)
    script = sweep / "submit.sbatch"
    fake_command("squeue", squeue(f"42_0|{script}\\n42_1|{script}\\n"))
    assert [state.job_id for state in job_states(runs)] == ["42_0", "42_1"]


def test_a_run_may_be_linked_into_another_array_by_another_number(tmp_path: Path, fake_command: FakeCommand) -> None:
    run = RunDir.create(tmp_path / "sweep-0001" / "7", to_yaml(load("ddp").config))
    append_event(run, "submitting", executor="slurm", attempts_before=0)
    part = tmp_path / "sweep-0001" / ".submitit" / "array-1"
    part.mkdir(parents=True)
    (part / "1").symlink_to(run.path)
    fake_command("squeue", squeue(f"42_0|{part}/submit.sbatch\\n42_1|{part}/submit.sbatch\\n"))
    assert job_state(run).job_id == "42_1"


def test_a_job_that_the_run_knows_is_not_found_again(cut_short: RunDir, fake_command: FakeCommand) -> None:
    submitted(cut_short, "slurm", "42")
    append_event(cut_short, "submitting", executor="slurm", attempts_before=0)
    fake_command("squeue", squeue(f"42|{cut_short.script}\\n43|{cut_short.script}\\n"))
    assert job_state(cut_short).job_id == "43"
    assert [event["job_id"] for event in read_events(cut_short, "submitted")] == ["42", "43"]


def test_as_long_as_nobody_can_be_asked_such_a_run_may_have_a_job(
    cut_short: RunDir,
    fake_command: FakeCommand,
) -> None:
    fake_command("squeue", "exit 1")
    fake_command("sacct", "exit 1")
    assert job_state(cut_short).alive == "unknown"
    with pytest.raises(UserError, match="Nobody can tell"):
        require_no_job(cut_short, force=False)
    require_no_job(cut_short, force=True)


def test_a_run_that_is_just_being_submitted_has_no_second_job(tmp_path: Path, fake_command: FakeCommand) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    submitting(run, "slurm", "1f")
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    assert f"process {os.getpid()} is just submitting it" in job_state(run).reason
    assert job_state(run).alive == "unknown"


def test_a_submission_that_came_to_nothing_is_said_and_can_be_tried_again(
    cut_short: RunDir, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    state = job_state(cut_short)
    assert (state.state, state.alive) == ("UNKNOWN", "unknown"), "what is on its way to the scheduler may arrive"
    assert "may still have one within 1" in state.reason
    monkeypatch.setattr(adoption, "LATE_SECONDS", 0.0)
    state = job_state(cut_short)
    assert (state.state, state.alive) == ("NOT SUBMITTED", "no")
    assert "cut short" in state.reason


def test_of_jobs_with_the_same_script_that_of_the_submission_is_found(
    tmp_path: Path, fake_command: FakeCommand
) -> None:
    """One of a run that lay in this folder before, and was removed, is another's."""
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", "seed: 0\n")
    submitting(run, "slurm", "1f2e")
    scripts = f"42|{run.script}\\n42|{run.path}/.submitit/0000.sbatch\\n43|{run.path}/.submitit/1f2e.sbatch\\n"
    fake_command("squeue", squeue(scripts))
    assert job_state(run).job_id == "43"


def test_a_job_that_was_cancelled_before_it_was_there_ends_when_it_is_found(
    cut_short: RunDir, fake_command: FakeCommand
) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    cancelled(cut_short, "")
    assert "would be cancelled" in job_state(cut_short).reason
    fake_command("squeue", squeue(f"42|{cut_short.script}\\n"))
    fake_command("scancel", "echo busy >&2; exit 1")
    assert "scancel does not do it: busy" in job_state(cut_short).reason
    calls = fake_command("scancel", "exit 0")
    assert job_state(cut_short).job_id == "42"
    assert calls.read_text().splitlines()[-1] == "42"
    assert history_of(cut_short).submissions[0].cancelled


def test_one_that_was_refused_is_not_looked_for(cut_short: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("squeue", "exit 0")
    refused(cut_short, "Invalid account")
    assert job_state(cut_short).state == "NOT SUBMITTED"
    assert not calls.exists()


def test_a_job_that_two_have_written_down_is_one(cut_short: RunDir) -> None:
    for _ in range(2):
        submitted(cut_short, "slurm", "42")
    assert len(history_of(cut_short).submissions) == 1

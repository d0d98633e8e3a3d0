import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.conftest import make_run
from trainkit.cluster import slurm_submission as adoption
from trainkit.cluster.job_states import job_state, job_states, require_no_job
from trainkit.cluster.pickles import pickled, unclaimed
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import named
from trainkit.cluster.slurm_submission import SbatchError, sbatch
from trainkit.common.errors import UserError
from trainkit.run import events
from trainkit.run.events import append_event, read_events, submitting
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId

FakeCommand = Callable[[str, str], Path]
MakeRun = Callable[..., tuple[RunDir, Plan]]
MakeFunction = Callable[[str], Callable[[str], str]]


def squeue(scripts: str, state: str = "PENDING") -> str:
    """A queue in which job 41 was queued with another script, and each of the others with one of ours."""
    return f"""case "$*" in
*%o*) printf '%s' '41|/somewhere/else/submit.sbatch\n{scripts}' ;;
*) for id in 41 42 43 42_0 42_1 43_1; do echo "$id|{state}|None|0:00|"; done ;;
esac""".replace("printf '%s'", "printf '%b'")


@pytest.fixture
def cut_short(tmp_path: Path) -> RunDir:
    """A run whose submitter was killed after it had called sbatch."""
    run = make_run(tmp_path / "my runs" / "ddp-0001")
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


def test_a_sweeps_runs_are_tasks_of_its_array_or_linked_into_another(tmp_path: Path, fake_command: FakeCommand) -> None:
    sweep = tmp_path / "sweep-0001"
    runs = [make_run(sweep / str(index)) for index in (0, 1, 7)]
    (sweep / "sweep.json").write_text("[]")
    for run in runs:
        append_event(run, "submitting", executor="slurm", attempts_before=0)
    part = sweep / ".submitit" / "array-1"
    part.mkdir(parents=True)
    (part / "1").symlink_to(runs[2].path)
    lines = [f"{job}|{folder}/submit.sbatch" for folder in (sweep, part) for job in ("42_0", "42_1")]
    fake_command("squeue", squeue("\\n".join([*lines[:2], *(line.replace("42", "43") for line in lines[2:]), ""])))
    assert [state.job_id for state in job_states(runs)] == ["42_0", "42_1", "43_1"]


def test_a_job_that_the_run_knows_is_not_found_again(cut_short: RunDir, fake_command: FakeCommand) -> None:
    for _ in range(2):  # by two who have found it
        events.submitted(cut_short, "slurm", "42")
    assert len(history_of(cut_short).submissions) == 1
    append_event(cut_short, "submitting", executor="slurm", attempts_before=0)
    fake_command("squeue", squeue(f"42|{cut_short.script}\\n43|{cut_short.script}\\n"))
    assert job_state(cut_short).job_id == "43"
    assert [event["job_id"] for event in read_events(cut_short, "submitted")] == ["42", "42", "43"]


def test_as_long_as_nobody_can_be_asked_such_a_run_may_have_a_job(cut_short: RunDir, fake_command: FakeCommand) -> None:
    fake_command("squeue", "exit 1")
    fake_command("sacct", "exit 1")
    assert job_state(cut_short).alive == "unknown"
    with pytest.raises(UserError, match="It is unknown whether"):
        require_no_job(cut_short, force=False)
    require_no_job(cut_short, force=True)


def test_a_run_that_is_just_being_submitted_has_no_second_job(tmp_path: Path, fake_command: FakeCommand) -> None:
    run = make_run(tmp_path / "ddp-0001")
    submitting(run, "slurm", "1f")
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    state = job_state(run)
    assert (f"process {os.getpid()} is submitting it now" in state.reason, state.alive) == (True, "unknown")


def test_a_submission_that_came_to_nothing_is_said_and_can_be_tried_again(
    cut_short: RunDir, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    state = job_state(cut_short)
    assert (state.state, state.alive) == ("UNKNOWN", "unknown"), "what is on its way to the scheduler may arrive"
    assert "one may appear within 1" in state.reason
    monkeypatch.setattr(adoption, "LATE_SECONDS", 0.0)
    state = job_state(cut_short)
    assert (state.state, state.alive) == ("NOT SUBMITTED", "no")
    assert "interrupted" in state.reason


def test_of_jobs_with_one_script_that_of_the_submission_is_found(tmp_path: Path, fake_command: FakeCommand) -> None:
    """One of a run that lay in this folder before, and was removed, is another's."""
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", "seed: 0\n")
    submitting(run, "slurm", "1f2e")
    scripts = f"42|{run.script}\\n42|{run.path}/.submitit/0000.sbatch\\n43|{run.path}/.submitit/1f2e.sbatch\\n"
    fake_command("squeue", squeue(scripts))
    assert job_state(run).job_id == "43"
    assert [event["job_id"] for event in read_events(run, "submitted")] == ["43"]


def test_a_job_cancelled_before_it_was_there_ends_when_found(cut_short: RunDir, fake_command: FakeCommand) -> None:
    fake_command("squeue", "exit 0")
    fake_command("sacct", "exit 0")
    events.cancelled(cut_short, "")
    assert "would be cancelled" in job_state(cut_short).reason
    fake_command("squeue", squeue(f"42|{cut_short.script}\\n"))
    fake_command("scancel", "echo busy >&2; exit 1")
    assert "but scancel fails: busy" in job_state(cut_short).reason
    calls = fake_command("scancel", "exit 0")
    assert job_state(cut_short).job_id == "42"
    assert calls.read_text().splitlines()[-1] == "42"
    assert history_of(cut_short).submissions[0].cancelled


def test_a_full_disk_is_not_taken_for_somebody_elses_record(
    cut_short: RunDir, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake_command("squeue", squeue(f"42|{cut_short.script}\\n"))
    monkeypatch.setattr(events, "submitted", full)
    with pytest.raises(OSError, match="No space left"):
        job_state(cut_short)


def test_one_that_was_refused_is_not_looked_for(cut_short: RunDir, fake_command: FakeCommand) -> None:
    calls = fake_command("squeue", "exit 0")
    events.refused(cut_short, "Invalid account")
    assert job_state(cut_short).state == "NOT SUBMITTED"
    assert not calls.exists()


# What sbatch is given, and what it says


@pytest.fixture
def slurm(fake_command: Callable[[str, str], Path]) -> Callable[[str], Path]:
    def make(sbatch: str) -> Path:
        fake_command("srun", "exit 0")
        return fake_command("sbatch", sbatch)

    return make


def queue(run: RunDir, function: Callable[[str], str], **env: str) -> list[str]:
    run.script.write_text("#!/bin/bash\n# exactly this\n")
    return pickled(run.path, [run], function, lambda: sbatch(run.script, {**os.environ, **env}))


@pytest.mark.parametrize(
    ("script", "is_answer"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", True),
        ("echo \"sbatch: unrecognized option '--bogus'\" >&2; exit 255", True),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", False),
        ("exit 1", False),
        ("echo 'retrying' >&2; kill -9 $$", False),
    ],
)
def test_only_what_says_no_is_an_answer_and_the_user_reads_it(
    local_run: MakeRun, rank_function: MakeFunction, slurm: Callable[[str], Path], script: str, is_answer: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, _ = local_run()
    slurm(script)
    with pytest.raises(SbatchError) as error:
        queue(run, rank_function("pass"))
    assert error.value.is_answer is is_answer
    assert "echo 'sbatch: error:" not in script or "Invalid account" in error.value.why
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("index", "part"), [(3, ""), (0, ".submitit/array-1")])
def test_a_task_of_an_array_claims_the_pickle_of_its_number(tmp_path: Path, index: int, part: str) -> None:
    """Nobody could name it after its job."""
    run = RunDir.create(tmp_path / "sweep" / "3", "seed: 0\n")
    array = tmp_path / "sweep" / part
    pickles = array / ".submitit"
    pickles.mkdir(parents=True)
    (pickles / unclaimed(index)).write_bytes(b"what to run")
    if part:
        (array / str(index)).symlink_to(run.path)
    task = {"SLURM_JOB_ID": "99", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(index)}
    named("slurm").claim(run, task)
    assert (pickles / f"42_{index}_submitted.pkl").read_bytes() == b"what to run"

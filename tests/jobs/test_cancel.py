import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import NO_ANSWER, Command, make_run
from tests.runs import last_event, script, wait_until
from trainkit.cluster.job_states import job_state, job_states
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import named
from trainkit.common import process
from trainkit.run.events import append_event, submitted
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId

pytestmark = pytest.mark.usefixtures("no_slurm")

MakeRun = Callable[..., tuple[RunDir, Plan]]
MakeFunction = Callable[[str], Callable[[str], str]]

STUBBORN = """
child = __import__('subprocess').Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
(run / f'pids-{rank}').write_text(f'{os.getpid()} {child.pid}')
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run without any job yet."""
    return make_run(tmp_path / "runs" / "ddp-0001")


def cancelled(fake_slurm: Path) -> str:
    """What scancel was called with."""
    file = fake_slurm / "cancelled"
    return file.read_text() if file.exists() else ""


@pytest.mark.long
def test_one_run_of_a_sweep_can_be_cancelled_while_the_others_go_on(
    command: Command, local_run: MakeRun, rank_function: MakeFunction, tmp_path: Path
) -> None:
    body = "(run / 'up').touch()\nif run.name != '2': time.sleep(60)"
    made = [local_run(f"sweep-0001/{index}") for index in range(3)]
    runs, plan = [run for run, _ in made], made[0][1]
    sweep = runs[0].path.parent
    (sweep / "sweep.json").write_text("[]")
    (sweep / "plan.json").write_text(plan.to_json())
    named(plan.executor).submit(sweep, runs, plan, rank_function(body), cwd=tmp_path, env=dict(os.environ))
    wait_until((runs[0].path / "up").exists)
    assert [state.state for state in job_states(runs)] == ["RUNNING", "PENDING", "PENDING"]
    assert "cancelled" in command("cancel", "sweep-0001/1").out
    assert job_state(runs[0]).state == "RUNNING"
    assert "cancelled" in command("cancel", "sweep-0001/0").out
    wait_until(lambda: job_state(runs[2]).alive == "no")
    assert [state.state for state in job_states(runs)] == ["CANCELLED", "CANCELLED", "COMPLETED"]


def test_what_has_ended_needs_no_cancelling(command: Command, run: RunDir, tmp_path: Path) -> None:
    """Nor does a process that only has the number of a controller that is gone."""
    append_event(run, "submitted", executor="local", job_id="1")
    append_event(run, "ended", state="COMPLETED")
    me = {**ProcessId.of(os.getpid()).fields(), "process_started": "1"}
    make_run(tmp_path / "runs" / "gone-1", executor="local", job_id="1", **me)
    done = command("cancel", "ddp-0001", "gone-1")
    first, second = done.out.splitlines()
    assert (done.code, first) == (0, f"{run.path}: nothing to cancel, it is COMPLETED.")
    assert "nothing to cancel, it is FAILED" in second


@pytest.mark.parametrize(("reference", "ended"), [("ddp-0001", "4711\n"), ("ddp-0001/0", "")])
def test_a_sweep_of_another_folder_is_left_alone(
    command: Command, fake_slurm: Path, run: RunDir, tmp_path: Path, reference: str, ended: str
) -> None:
    """Where this folder has a run of that name; what was cancelled is told by its whole path."""
    submitted(run, "slurm", "4711")
    for index in range(2):
        make_run(tmp_path / f"other/runs/ddp-0001/{index}", job=f"4712_{index}")
    (tmp_path / "other/runs/ddp-0001/sweep.json").write_text("[]")
    done = command("cancel", reference)
    assert cancelled(fake_slurm) == ended
    assert (done.code, done.out) == ((0, f"{run.path}: cancelled job 4711.\n") if ended else (2, "")), "no task 0 here"


@pytest.fixture
def resumed(fake_slurm: Path, run: RunDir) -> RunDir:
    """A run with two jobs, of which nobody can tell whether they live."""
    for job_id in ("17", "18"):
        submitted(run, "slurm", job_id)
    for name in ("squeue", "sacct"):
        script(fake_slurm / name, NO_ANSWER)
    return run


@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("Access/permission denied", 4, ["permission denied", "Only a job's owner"]),
        (
            "Kill job error on job id 18: Unable to contact slurm controller (connect failure)",
            4,
            ["Not cancelled: 18.", "when the scheduler answers"],  # and of 17 scancel has said nothing
        ),
        ("Kill job error on job id 17: Invalid job id specified", 0, []),  # it ended before
    ],
)
def test_what_scancel_refuses_is_said_as_what_it_is(
    command: Command, fake_slurm: Path, words: str, code: int, said: list[str]
) -> None:
    script(fake_slurm / "scancel", f"echo 'scancel: error: {words}' >&2; exit 1")
    done = command("cancel", "ddp-0001")
    assert (done.code, [part for part in said if part not in done.err]) == (code, [])
    if "contact" in words:
        assert "owner" not in done.err, "a scheduler that does not answer is no question of ownership"
        assert "cancelled job 17" in done.out


@pytest.mark.usefixtures("resumed")
def test_scancel_may_take_longer_than_a_question(
    command: Command, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.1)
    script(fake_slurm / "scancel", "sleep 0.4")
    assert "cancelled job 17" in command("cancel", "ddp-0001").ok().out


# A record that somebody else has written


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process of the user's that no run has started."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield ProcessId.of(process.pid)
        process.kill()


@pytest.mark.parametrize("executor", ["local", "launch", "swarm", ""])
def test_a_process_that_only_the_record_names_is_not_ended(
    command: Command, run: RunDir, bystander: ProcessId, executor: str
) -> None:
    append_event(run, "submitted", executor=executor, job_id="1", **bystander.fields())
    command("cancel", str(run.path)).refused(3, f"kill {bystander.pid}")
    assert bystander.is_alive()
    assert last_event(run, "cancelled") is None


def test_a_process_of_another_machine_is_ended_there(command: Command, run: RunDir, bystander: ProcessId) -> None:
    """Its number is another process's here."""
    append_event(run, "submitted", executor="local", job_id="1", **{**bystander.fields(), "host": "n9"})
    command("cancel", str(run.path)).refused(3, f"on n9 `ps -fp {bystander.pid}` shows what it is")
    assert bystander.is_alive()


@pytest.mark.parametrize("pid", [1, 0, -1, os.getpid(), os.getppid()], ids=["init", "0", "-1", "self", "parent"])
def test_no_number_of_a_process_in_a_record_is_signalled(
    command: Command, run: RunDir, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """Its own shell, init, all processes: with the very time at which each was started."""
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail(f"kill{given}"))
    append_event(run, "submitted", executor="local", job_id="1", **ProcessId.of(pid).fields())
    assert command("cancel", str(run.path)).code in (0, 3)


@pytest.mark.nightly
def test_a_local_run_is_ended_with_all_its_processes_by_its_own_record(
    command: Command, local_run: MakeRun, rank_function: MakeFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by that of another run that names its process, even where no list has either."""
    mine, plan = local_run(nodes=2)
    function, env = rank_function(STUBBORN), dict(os.environ)
    named(plan.executor).submit(mine.path, [mine], plan, function, cwd=Path.cwd(), env=env)
    files = [mine.path / f"pids-{rank}" for rank in range(plan.world_size)]
    wait_until(lambda: all(file.exists() and " " in file.read_text() for file in files))
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    submission = history_of(mine).submission
    controller = submission.process if submission is not None else None
    assert controller is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-list"))
    make_run(tmp_path / "runs" / "ddp-0002", executor="local", job_id=str(controller.pid), **controller.fields())
    assert command("cancel", str(tmp_path / "runs" / "ddp-0002")).code == 3
    assert all(ProcessId.of(pid).started for pid in pids)
    command("cancel", str(mine.path)).ok("cancelled local job")
    assert (last_event(mine, "ended") or {})["state"] == "CANCELLED"
    assert not controller.is_alive()
    assert [pid for pid in pids if ProcessId.of(pid).started] == []


@pytest.mark.parametrize(
    ("job_id", "is_its_own"), [("4711", True), ("4711", False), ("4711_1", False), ("4711+0", False)]
)
def test_a_slurm_job_of_a_record_is_cancelled_if_its_script_is_the_runs(
    command: Command, fake_slurm: Path, run: RunDir, tmp_path: Path, job_id: str, is_its_own: bool
) -> None:
    """Not that of another run, a whole array by its number, or one that the scheduler does not tell of."""
    theirs = make_run(tmp_path / "runs" / "ddp-0002", executor="slurm", job_id=job_id)
    of = f"{theirs.path if is_its_own else run.path}/submit.sbatch"
    told = f"case $* in *%o*) echo '{job_id}|{of}';; *) echo '{job_id}|RUNNING|None|0:00|n1';; esac"
    script(fake_slurm / "squeue", told)
    done = command("cancel", "ddp-0002")
    assert (done.code, bool(cancelled(fake_slurm))) == ((0, True) if is_its_own else (3, False)), done.err
    assert is_its_own or f"scancel {job_id}" in done.err


def test_what_is_known_is_ended_beside_what_is_not(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "ddp-0001", job="4711")
    make_run(tmp_path / "runs" / "ddp-0002", executor="slurm", job_id="4712")
    script(fake_slurm / "squeue", 'for job in 4711 4712; do echo "$job|RUNNING|None|0:00|n1"; done')
    assert (command("cancel", "ddp-0001", "ddp-0002").code, cancelled(fake_slurm)) == (3, "4711\n")


@pytest.mark.parametrize("job_id", ["--me", "-u root", "17 --me", "17;id", ""])
def test_a_job_id_that_is_none_never_reaches_scancel(
    command: Command, fake_slurm: Path, run: RunDir, job_id: str
) -> None:
    append_event(run, "submitted", executor="slurm", job_id=job_id)
    assert (command("cancel", str(run.path)).code, cancelled(fake_slurm)) == (0, "")


def test_a_run_of_somebody_else_cancels_no_job_of_ones_own(
    command: Command, fake_slurm: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, "slurm", "4711")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert (command("cancel", str(run.path)).code, cancelled(fake_slurm)) == (3, "")

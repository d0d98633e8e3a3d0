from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import last_event
from trainkit.config.loading import load, to_yaml
from trainkit.launch.plan import Plan
from trainkit.run.events import ProcessId, append_event, history_of, read_events, submitted
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import job_state, job_states, named

pytestmark = pytest.mark.usefixtures("no_slurm")

Command = Callable[..., Any]
MakeRun = Callable[..., tuple[RunDir, Plan]]
MakeFunction = Callable[[str], Callable[[str], str]]

STUBBORN = """
child = __import__('subprocess').Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
(run / f'pids-{rank}').write_text(f'{os.getpid()} {child.pid}')
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""


def started(run: RunDir, plan: Plan, function: Callable[[str], str]) -> list[int]:
    """Start a run; the ids of its ranks and their children, once they are there."""
    named(plan.executor).submit(run.path, [run], plan, function, cwd=Path.cwd(), env=dict(os.environ))
    files = [run.path / f"pids-{rank}" for rank in range(plan.world_size)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and " " in file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for file in files for pid in file.read_text().split()]


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
    deadline = time.monotonic() + 60
    while not (runs[0].path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [state.state for state in job_states(runs)] == ["RUNNING", "PENDING", "PENDING"]
    assert "cancelled" in command("cancel", "sweep-0001/1").out
    assert job_state(runs[0]).state == "RUNNING"
    assert "cancelled" in command("cancel", "sweep-0001/0").out
    while job_state(runs[2]).alive != "no":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [state.state for state in job_states(runs)] == ["CANCELLED", "CANCELLED", "COMPLETED"]


def test_what_has_ended_needs_no_cancelling(command: Command, local_run: MakeRun) -> None:
    """Nor does a process that only has the number of a controller that is gone."""
    (ended, _), (gone, _), me = local_run("ended-1"), local_run("gone-1"), ProcessId.of(os.getpid())
    append_event(ended, "submitted", executor="local", job_id="1")
    append_event(ended, "ended", state="COMPLETED")
    append_event(gone, "submitted", executor="local", job_id="1", host=me.host, pid=me.pid, process_started="1")
    done = command("cancel", "ended-1", "gone-1")
    first, second = done.out.splitlines()
    assert (done.code, first) == (0, f"{ended.path}: nothing to cancel, it is COMPLETED.")
    assert "nothing to cancel, it is FAILED" in second


def test_slurm_jobs_are_cancelled_by_scancel_in_one_call(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    for index in (1, 2):
        run = RunDir.create(tmp_path / "runs" / f"ddp-{index:04}", to_yaml(load("ddp").config))
        submitted(run, "slurm", "4711")
    done = command("cancel", "ddp-0001", "ddp-0002")
    assert done.code == 0
    assert (fake_slurm / "cancelled").read_text() == "4711\n"
    assert last_event(run, "cancelled") is not None


@pytest.mark.parametrize("reference", ["ddp-0001", "ddp-0001/0"])
def test_a_sweep_of_another_folder_is_left_alone(
    command: Command, fake_slurm: Path, tmp_path: Path, reference: str
) -> None:
    """Where this folder has a run of that name; what was cancelled is told by its whole path."""
    config = to_yaml(load("ddp").config)
    theirs = [RunDir.create(tmp_path / f"other/runs/ddp-0001/{index}", config) for index in range(2)]
    (tmp_path / "other/runs/ddp-0001/sweep.json").write_text("[]")
    mine = RunDir.create(tmp_path / "runs/ddp-0001", config)
    for run, job_id in zip([*theirs, mine], ("4712_0", "4712_1", "4711"), strict=True):
        submitted(run, "slurm", job_id)
    done = command("cancel", reference)
    if reference == "ddp-0001":
        assert (fake_slurm / "cancelled").read_text() == "4711\n"
        assert done.out == f"{mine.path}: cancelled job 4711.\n"
    else:
        assert (done.code, (fake_slurm / "cancelled").exists()) == (2, False), "of the run here there is no task 0"


def test_what_scancel_refuses_is_said_in_its_words(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (fake_slurm / "scancel").write_text("#!/bin/bash\necho 'scancel: error: Access/permission denied' >&2\nexit 1\n")
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    submitted(run, "slurm", "4711")
    done = command("cancel", "ddp-0001")
    assert done.code == 4
    assert "permission denied" in done.err


@pytest.fixture
def resumed(fake_slurm: Path, tmp_path: Path) -> RunDir:
    """A run with two jobs, of which nobody can tell whether they live."""
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    for job_id in ("17", "18"):
        submitted(run, "slurm", job_id)
    for name in ("squeue", "sacct"):
        (fake_slurm / name).write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    return run


def test_every_job_that_a_run_has_had_and_that_may_live_is_cancelled(
    command: Command, fake_slurm: Path, resumed: RunDir
) -> None:
    done = command("cancel", "ddp-0001")
    assert done.code == 0
    assert (fake_slurm / "cancelled").read_text() == "18 17\n"
    assert "nobody could tell" in done.out
    assert [event["job_id"] for event in read_events(resumed, "cancelled")] == ["18", "17"]


def test_a_scheduler_that_does_not_answer_is_no_question_of_ownership(
    command: Command, fake_slurm: Path, resumed: RunDir
) -> None:
    words = "scancel: error: Kill job error on job id 18: Unable to contact slurm controller (connect failure)"
    (fake_slurm / "scancel").write_text(f"#!/bin/bash\necho '{words}' >&2\nexit 1\n")
    done = command("cancel", "ddp-0001")
    assert done.code == 4
    assert "owner" not in done.err
    assert "Not cancelled: 18." in done.err, "and of 17 scancel has said nothing"
    assert "when the scheduler answers" in done.err
    assert "cancelled job 17" in done.out


def test_a_job_that_ended_before_it_could_be_cancelled_is_no_error(
    command: Command, fake_slurm: Path, resumed: RunDir
) -> None:
    words = "scancel: error: Kill job error on job id 17: Invalid job id specified"
    (fake_slurm / "scancel").write_text(f"#!/bin/bash\necho '{words}' >&2\nexit 1\n")
    assert command("cancel", "ddp-0001").code == 0


# A record that somebody else has written


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process of the user's that no run has started."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield ProcessId.of(process.pid)
        process.kill()


@pytest.mark.parametrize("executor", ["local", "debug", "launch", "swarm", ""])
def test_a_process_that_only_the_record_names_is_not_ended(
    command: Command, tmp_path: Path, bystander: ProcessId, executor: str
) -> None:
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    append_event(run, "submitted", executor=executor, job_id="1", **bystander.fields())
    done = command("cancel", str(run.path))
    assert done.code == 3, done.err
    assert f"kill {bystander.pid}" in done.err
    assert bystander.is_alive()
    assert last_event(run, "cancelled") is None


@pytest.mark.parametrize("pid", [1, 0, -1, "self", "parent"])
def test_no_number_of_a_process_in_a_record_is_signalled(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | str
) -> None:
    """Its own shell, init, all processes: with the very time at which each was started."""
    number = {"self": os.getpid(), "parent": os.getppid()}.get(str(pid), pid)
    assert isinstance(number, int)
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail(f"kill{given}"))
    append_event(run, "submitted", executor="local", job_id="1", **ProcessId.of(number).fields())
    assert command("cancel", str(run.path)).code in (0, 3)


def test_a_local_run_is_ended_with_all_its_processes_by_its_own_record(
    command: Command, local_run: MakeRun, rank_function: MakeFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by that of another run that names its process, even where no list has either."""
    mine, plan = local_run(nodes=2)
    pids = started(mine, plan, rank_function(STUBBORN))
    submission = history_of(mine).submission
    controller = submission.process if submission is not None else None
    assert controller is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-list"))
    theirs = RunDir.create(tmp_path / "runs" / "ddp-0002", to_yaml(load("ddp").config))
    append_event(theirs, "submitted", executor="local", job_id=str(controller.pid), **controller.fields())
    assert command("cancel", str(theirs.path)).code == 3
    assert all(ProcessId.of(pid).started for pid in pids)
    done = command("cancel", str(mine.path))
    assert done.code == 0
    assert "cancelled local job" in done.out
    assert (last_event(mine, "ended") or {})["state"] == "CANCELLED"
    assert not controller.is_alive()
    assert [pid for pid in pids if ProcessId.of(pid).started] == []


@pytest.mark.parametrize("job_id", ["4711", "4711_1", "4711+0"])
def test_a_slurm_job_that_only_the_record_names_is_not_cancelled(
    command: Command, fake_slurm: Path, tmp_path: Path, job_id: str
) -> None:
    """That of another run, a whole array by its number, and one that the scheduler does not tell of."""
    mine = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    theirs = RunDir.create(tmp_path / "runs" / "ddp-0002", to_yaml(load("ddp").config))
    (fake_slurm / "squeue").write_text(
        f"#!/bin/bash\ncase $* in *%o*) echo '{job_id}|{mine.path}/submit.sbatch';; "
        f"*) echo '{job_id}|RUNNING|None|0:00|n1';; esac\n"
    )
    append_event(theirs, "submitted", executor="slurm", job_id=job_id)
    done = command("cancel", "ddp-0002")
    assert done.code == 3, done.err
    assert f"scancel {job_id}" in done.err
    assert not (fake_slurm / "cancelled").exists()


def test_a_job_whose_script_is_the_runs_is_cancelled_without_any_list(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    (fake_slurm / "squeue").write_text(
        f"#!/bin/bash\ncase $* in *%o*) echo '4711|{run.path}/submit.sbatch';; "
        "*) echo '4711|RUNNING|None|0:00|n1';; esac\n"
    )
    append_event(run, "submitted", executor="slurm", job_id="4711")
    assert command("cancel", "ddp-0001").code == 0
    assert (fake_slurm / "cancelled").read_text() == "4711\n"


def test_what_is_known_is_ended_beside_what_is_not(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    runs = [RunDir.create(tmp_path / "runs" / f"ddp-{n:04}", to_yaml(load("ddp").config)) for n in (1, 2)]
    submitted(runs[0], "slurm", "4711")
    append_event(runs[1], "submitted", executor="slurm", job_id="4712")
    (fake_slurm / "squeue").write_text('#!/bin/bash\nfor job in 4711 4712; do echo "$job|RUNNING|None|0:00|n1"; done\n')
    assert command("cancel", "ddp-0001", "ddp-0002").code == 3
    assert (fake_slurm / "cancelled").read_text() == "4711\n"

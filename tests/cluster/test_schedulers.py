"""A third scheduler shows that the protocol is enough: every verb works with a queue in a folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import light_experiment
from tests.jobs.conftest import PROJECT, Done, make_run
from tests.runs import last_event, wait_until
from trainkit.cluster import scheduler
from trainkit.cluster.job_states import CALLS_A_MINUTE, Poller, job_state, job_states
from trainkit.run.events import append_event, read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import ProcessId

OWN = "launch.executor=folder_queue:build"
TINY = ("single", OWN, "--gpus-per-node", "0", "monitor.loggers=[jsonl]", "model.name=light_model:build")
SLOW = "model.seconds=1.5"
"""Seconds of each update in the first attempt: time to interrupt it."""

Command = Callable[..., Done]


@pytest.fixture
def queue(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The queue's folder; its code is in the current one. What is trained there imports no torch."""
    folder = tmp_path / "queue"
    folder.mkdir()
    for file in ("cluster/folder_queue.py", "slurm/light_model.py"):
        shutil.copy(PROJECT / "tests" / file, tmp_path)
    monkeypatch.setenv("FOLDER_QUEUE", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{light_experiment.hook(tmp_path / 'light')}:{PROJECT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield folder
    forget()


@pytest.fixture
def worker(queue: Path) -> Iterator[None]:
    """Runs what is in the queue."""
    with subprocess.Popen([sys.executable, "folder_queue.py", str(queue)], start_new_session=True) as process:
        yield
        process.kill()
        for file in queue.glob("[0-9]*"):
            if pid := json.loads(file.read_text()).get("pid"):
                os.killpg(pid, signal.SIGKILL)


def forget() -> None:
    """Begin as a new process, which has not loaded the scheduler."""
    sys.modules.pop("folder_queue", None)
    scheduler._load.cache_clear()


def status(command: Command, run: RunDir) -> dict[str, Any]:
    (found,) = json.loads(command("status", str(run.path), "--json").out)
    return dict(found)


def submitted(command: Command, tmp_path: Path, *settings: str) -> RunDir:
    done = command("submit", *TINY, *settings)
    assert done.code == 0, done.err
    assert "Submitted job" in done.out
    return RunDir(tmp_path / "runs" / "single-0001")


def test_a_job_waits_with_its_reason_and_is_cancelled(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path)
    found = status(command, run)
    assert (found["state"], found["executor"], found["job_id"]) == ("PENDING", "folder_queue:build", "1")
    assert "0 jobs are before it" in found["notes"]
    assert "0 jobs are before it" in command("why", str(run.path)).out
    again = command("submit", *TINY)
    assert "is the same run, and it is PENDING (job 1)" in again.out
    refused = command("resume", str(run.path))
    assert (refused.code, "is PENDING (job 1)" in refused.err) == (2, True)
    done = command("cancel", str(run.path))
    assert "cancelled job 1" in done.out, done.err
    assert status(command, run)["state"] == "CANCELLED"


@pytest.mark.nightly
@pytest.mark.usefixtures("worker")
def test_a_preempted_job_is_requeued_and_goes_on_to_its_end(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path, SLOW)
    wait_until(lambda: last_event(run, "started"))
    os.killpg(json.loads((queue / "1").read_text())["pid"], signal.SIGUSR2)
    wait_until(lambda: history_of(run).finished)
    wait_until(lambda: status(command, run)["state"] == "COMPLETED")
    kinds = [event["event"] for event in read_events(run) if event["event"] not in ("saved",)]
    assert kinds == ["submitted", "started", "handed_back", "requeued", "started", "ended"]
    assert history_of(run).submissions[0].executor == "folder_queue:build"


@pytest.mark.nightly
@pytest.mark.usefixtures("worker")
def test_a_cancelled_job_is_resumed_as_another_one(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path, SLOW, "train.max_steps=60")  # a busy machine needs 12 s for a command
    wait_until(lambda: last_event(run, "started"))
    assert "cancelled job 1" in command("cancel", str(run.path)).out
    done = command("resume", str(run.path))  # which waits for its end
    assert "Submitted job 2" in done.out, done.err
    wait_until(lambda: len(read_events(run, "started")) == 2)
    assert (last_event(run, "started") or {})["step"] > 0


def test_a_scheduler_that_a_strangers_run_names_is_not_loaded(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path)
    copied = tmp_path / "runs" / "copied-0001"
    shutil.copytree(run.path, copied, symlinks=True)
    (tmp_path / "folder_queue.py").write_text("raise SystemExit('it was loaded')")
    forget()
    found = status(command, RunDir(copied))
    assert (found["state"], found["alive"]) == ("UNKNOWN", "unknown")
    assert "code that a command of yours has not used for it" in found["notes"][0]
    assert command("cancel", str(copied)).code == 3


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


def of_process(process: ProcessId) -> dict[str, Any]:
    return {"executor": "local", "job_id": "1", **process.fields()}


def test_many_runs_cost_one_call_to_each_command(tmp_path: Path, fake_command: FakeCommand) -> None:
    """And of a job that was requeued its newest run counts."""
    squeue, sacct = fake_command("squeue", f"cat <<'E'\n{SQUEUE}E"), fake_command("sacct", f"cat <<'E'\n{SACCT}E")
    ids = ("11699941", "11699942", "11699943", "11699944_0", "11699946", "11699947")
    runs = [make_run(tmp_path / str(index), executor="slurm", job_id=job_id) for index, job_id in enumerate(ids)]
    states = job_states(runs)
    ended = ("COMPLETED", "COMPLETED", "CANCELLED")
    assert [state.state for state in states] == [*ended, "RUNNING", "PENDING", "COMPLETED"]
    assert (states[3].nodes, states[4].reason) == ("n1", "BeginTime")
    assert len(squeue.read_text().splitlines()) == len(sacct.read_text().splitlines()) == 1
    assert "11699946" not in sacct.read_text(), "what the queue knows is not asked again"


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
NO_ACCOUNTS = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
Event = tuple[str, dict[str, Any]]


@pytest.mark.parametrize(
    ("squeue", "sacct", "events", "expected", "reason"),
    [
        # The queue has answered, and does not have it
        (FORGOTTEN, NO_ACCOUNTS, [], ("UNKNOWN", "no"), "no accounting here (Slurm accounting storage is disabled)"),
        ("exit 0", "exit 1", [("ended", {"state": "COMPLETED"})], ("COMPLETED", "no"), "by its own record"),
        # What was before the newest submission tells nothing
        ("exit 0", "exit 0", [("failed", {"rank": 0}), ("submitted", {"executor": "slurm", "job_id": "8"})],
         ("UNKNOWN", "no"), "does not know the job"),
        # Who cannot be asked has not said that it ended
        (SILENT, "exit 1", [], ("UNKNOWN", "unknown"), "Unable to contact slurm controller"),
        ("exit 137", "exit 1", [], ("UNKNOWN", "unknown"), "exit code 137"),
        ("exit 1", "exit 1", [("ended", {"attempt": 0, "state": "FAILED"}), ("started", {"attempt": 1})],
         ("UNKNOWN", "unknown"), ""),
        # The accounts alone do not end a job that may be queued again
        ("exit 1", "echo '7|NODE_FAIL|1:0|n1'", [], ("UNKNOWN", "unknown"), "the accounting says NODE_FAIL"),
        ("exit 1", "echo '7|PREEMPTED|1:0|n1'", [], ("UNKNOWN", "unknown"), "the accounting says PREEMPTED"),
        ("exit 1", "echo '7|FAILED|1:0|n1'", [], ("FAILED", "no"), "exit code 1:0"),
    ],
)  # fmt: skip
def test_what_is_known_of_a_job_that_squeue_does_not_show(
    tmp_path: Path, fake_command: FakeCommand,
    squeue: str, sacct: str, events: list[Event], expected: tuple[str, str], reason: str,
) -> None:  # fmt: skip
    fake_command("squeue", squeue)
    fake_command("sacct", sacct)
    run = make_run(tmp_path / "run", executor="slurm", job_id="7")
    for kind, fields in events:
        append_event(run, kind, **fields)
    found = job_state(run)
    assert (found.state, found.alive) == expected
    assert reason in found.reason


def test_a_local_run_is_as_alive_as_its_controller(tmp_path: Path) -> None:
    me = ProcessId.of(os.getpid())
    run = make_run(tmp_path / "run", **of_process(me), attempts_before=0)
    assert (job_state(run).state, job_state(run).alive) == ("PENDING", "yes")
    run.attempt_logs(0).mkdir()
    assert (job_state(run).state, job_state(run).alive) == ("RUNNING", "yes")
    append_event(run, "ended", state="COMPLETED")
    assert (job_state(run).state, job_state(run).alive) == ("COMPLETED", "no")
    gone = job_state(make_run(tmp_path / "gone", **of_process(ProcessId(me.host, me.pid, "1"))))
    assert (gone.state, gone.alive, "ended without a message" in gone.reason) == ("FAILED", "no", True)
    elsewhere = job_state(make_run(tmp_path / "far", **of_process(ProcessId("elsewhere", 1, "1"))))
    assert (elsewhere.state, elsewhere.alive, "elsewhere" in elsewhere.reason) == ("UNKNOWN", "unknown", True)


def test_a_run_without_a_job_is_known_by_its_record_only(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert job_state(run_dir).state == "NOT SUBMITTED"
    append_event(run_dir, "started")
    assert job_state(run_dir).state == "UNKNOWN"
    append_event(run_dir, "ended", state="COMPLETED")
    assert job_state(run_dir).state == "COMPLETED"


def test_a_run_is_alive_as_long_as_one_of_its_jobs_is(tmp_path: Path, fake_command: FakeCommand) -> None:
    squeue = fake_command("squeue", "echo '7|RUNNING|None|0:39|n1'")
    sacct = fake_command("sacct", "echo '8|FAILED|1:0|n2'")
    run_dir = make_run(tmp_path / "run", executor="slurm", job_id="7")
    append_event(run_dir, "submitted", executor="slurm", job_id="8")
    state = job_state(run_dir)
    assert (state.job_id, state.state, state.alive) == ("8", "FAILED", "yes")
    assert [job.job_id for job in state.living()] == ["7"]
    assert [len(calls.read_text().splitlines()) for calls in (squeue, sacct)] == [1, 1]


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("squeue", "sacct", "alive"),
    [("echo '7|RUNNING|None|0:39|n1'", "exit 1", "yes"), ("exit 1", "exit 1", "unknown"),
     ("exit 1", "echo '7|RUNNING|0:0|n1'", "yes")],
    ids=["the queue answers", "nobody answers", "only the accounts answer"],
)  # fmt: skip
@pytest.mark.parametrize("soon", [True, False])
def test_whatever_happens_a_follower_gives_at_most_six_commands_in_a_minute(
    tmp_path: Path, fake_command: FakeCommand, squeue: str, sacct: str, alive: str, soon: bool
) -> None:
    clock, when, run = Clock(), [], make_run(tmp_path / "run", executor="slurm", job_id="7")
    calls = [fake_command("squeue", squeue), fake_command("sacct", sacct)]
    asker, seen = Poller(run, clock), 0
    while clock.now < 1240:
        assert asker.state(soon=soon).alive == alive
        given = sum(len(file.read_text().splitlines()) for file in calls if file.exists())
        when += [clock.now] * (given - seen)
        seen, clock.now = given, clock.now + 0.5
    assert max(sum(start <= time < start + 60 for time in when) for start in when) <= CALLS_A_MINUTE
    assert len(when) >= 8, "and it goes on asking"


def test_what_ends_is_asked_for_every_few_seconds_until_it_has(tmp_path: Path, fake_command: FakeCommand) -> None:
    clock, calls = Clock(), fake_command("squeue", "echo '7|COMPLETING|None|0:39|n1'")
    poller = Poller(make_run(tmp_path / "run", executor="slurm", job_id="7"), clock)
    while clock.now < 1030:
        poller.state(soon=True)
        clock.now += 0.5
    assert len(calls.read_text().splitlines()) == 5
    clock.now = 1065
    assert poller.state().state == "COMPLETING"
    fake_command("squeue", "echo '7|COMPLETED|None|0:44|n1'")
    clock.now += 5
    assert poller.state().state == "COMPLETING"
    assert poller.state(soon=True).state == "COMPLETED"

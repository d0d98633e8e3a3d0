"""A third scheduler shows that the protocol is enough: every verb works with a queue in a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import PROJECT, Done
from tests.runs import last_event
from trainkit.run.events import history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.schedulers import base

OWN = "launch.executor=folder_queue:build"
TINY = ("single", OWN, "--gpus-per-node", "0", "monitor.loggers=[jsonl]", "checkpoint.every_steps=1")

Command = Callable[..., Done]


@pytest.fixture
def queue(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The queue's folder; its code is in the current one."""
    folder = tmp_path / "queue"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("folder_queue.py"), tmp_path)
    monkeypatch.setenv("FOLDER_QUEUE", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
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
    """As a new process begins, which has not loaded the scheduler."""
    sys.modules.pop("folder_queue", None)
    base._load.cache_clear()


def wait(is_so: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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


@pytest.mark.usefixtures("worker")
def test_a_preempted_job_is_requeued_and_goes_on_to_its_end(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path, "train.epochs=4")
    wait(lambda: last_event(run, "saved"))
    os.killpg(json.loads((queue / "1").read_text())["pid"], signal.SIGUSR2)
    wait(lambda: history_of(run).finished)
    wait(lambda: status(command, run)["state"] == "COMPLETED")
    kinds = [event["event"] for event in read_events(run) if event["event"] not in ("saved",)]
    assert kinds == ["submitted", "started", "handed_back", "requeued", "started", "ended"]
    assert history_of(run).submissions[0].executor == "folder_queue:build"


@pytest.mark.usefixtures("worker")
def test_a_cancelled_job_is_resumed_as_another_one(queue: Path, command: Command, tmp_path: Path) -> None:
    run = submitted(command, tmp_path, "train.epochs=300")
    wait(lambda: last_event(run, "saved"))
    assert "cancelled job 1" in command("cancel", str(run.path)).out
    done = command("resume", str(run.path))  # which waits for its end
    assert "Submitted job 2" in done.out, done.err
    wait(lambda: len(read_events(run, "started")) == 2)
    assert (last_event(run, "started") or {})["step"] > 0


def test_code_that_a_strangers_run_names_as_its_scheduler_is_not_loaded(
    queue: Path,
    command: Command,
    tmp_path: Path,
) -> None:
    run = submitted(command, tmp_path)
    copied = tmp_path / "runs" / "copied-0001"
    shutil.copytree(run.path, copied, symlinks=True)
    (tmp_path / "folder_queue.py").write_text("raise SystemExit('it was loaded')")
    forget()
    found = status(command, RunDir(copied))
    assert (found["state"], found["alive"]) == ("UNKNOWN", "unknown")
    assert "code that a command of yours has not used for it" in found["notes"][0]
    assert command("cancel", str(copied)).code == 3

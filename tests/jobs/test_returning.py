"""Swarms that were made by hand, and what `resume` says to those that cannot go on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.conftest import Command
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, submitted
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId
from trainkit.swarm.peer.place import SavedPeer

CREATE = ("swarm", "create", "--resume", "hivemind-0001")
RESUME = ("resume", "hivemind-0001")
NO_CREATOR = "hivemind-0001 cannot continue as the creator of a swarm."


def ended_process() -> ProcessId:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return ProcessId.of(process.pid)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A creator that was killed."""
    made = RunDir.create(tmp_path / "runs" / "hivemind-0001", to_yaml(load("hivemind").config))
    submitted(made, "swarm", "1", ended_process())
    Attempt.begin(made).started(step=0)
    SavedPeer("hivemind-0001-0123abcd", 448830083, "0.0.0.0", 4711).write(made)
    return made


@pytest.mark.parametrize(
    ("was", "words", "says"),
    [
        ("guest", RESUME, NO_CREATOR),
        ("finished", RESUME, "hivemind-0001 has finished."),
        ("finished", CREATE, "hivemind-0001 has finished."),
        ("creator", RESUME, NO_CREATOR),  # its owner.key is gone, as an anchor has none
        ("creator", CREATE, NO_CREATOR),
        ("creator", (*RESUME, "optim.lr=1"), "hivemind-0001 is a swarm, whose settings cannot change."),
        ("creator", (*RESUME, "--nodes=2"), "--nodes=2 has no effect on hivemind-0001."),
        ("creator", (*CREATE, "--identity", "key"), "--identity does not go with --resume"),
        ("creator", (*CREATE, "optim.lr=1"), "optim.lr=1 does not go with --resume"),
        ("creator", (*CREATE, "hivemind"), "hivemind does not go with --resume"),
    ],
)
def test_what_cannot_go_on_or_heed_a_flag_is_refused(
    command: Command, run: RunDir, was: str, words: tuple[str, ...], says: str
) -> None:
    if was == "guest":
        (run.path / "swarm.json").unlink()
    elif was == "finished":
        Attempt(run, 0).ended("COMPLETED")
    done = command(*words).refused(2)
    assert done.err.lower().startswith(says.lower())
    assert not (run.path / "owner.key").exists()
    if (was, words) == ("finished", CREATE):
        assert done.err.splitlines()[-1].endswith(f"swarm create {run.path}")
    if says == NO_CREATOR:  # an anchor is told how to come back under its address
        assert f"with its --port and --identity {run.path}/swarm_identity" in done.err


def test_a_copy_on_another_machine_goes_on_with_force_alone(command: Command, run: RunDir) -> None:
    submitted(run, "swarm", "2", replace(ended_process(), host="elsewhere"))
    done = command(*CREATE)
    fix = "  fix: Ask again later or elsewhere; if you know that it has ended, add --force."
    assert (done.code, done.err.splitlines()[-1]) == (2, fix)
    done = command(*CREATE, "--force")
    assert (done.code, done.err.splitlines()[0]) == (2, NO_CREATOR)


def test_a_swarm_that_runs_is_not_started_twice(command: Command, run: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        submitted(run, "swarm", "2", ProcessId.of(living.pid))
        before = run.events.read_text()
        command(*CREATE).refused(2, "is PENDING")
    assert run.events.read_text() == before

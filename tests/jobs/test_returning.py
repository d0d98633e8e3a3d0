"""Swarms that were made by hand, and what `resume` says to those that cannot go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, ProcessId, submitted
from trainkit.run.folder import RunDir
from trainkit.swarm.address import SavedPeer

Command = Callable[..., Any]
HOME = SavedPeer("hivemind-0001-0123abcd", 448830083, "0.0.0.0", 4711)


def ended_process() -> ProcessId:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return ProcessId.of(process.pid)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A peer that was killed."""
    made = RunDir.create(tmp_path / "runs" / "hivemind-0001", to_yaml(load("hivemind").config))
    submitted(made, "swarm", "1", ended_process())
    Attempt.begin(made).started(step=0)
    return made


CREATE = ("swarm", "create", "--resume", "hivemind-0001")
RESUME = ("resume", "hivemind-0001")
LOST = "hivemind-0001 has lost its owner.key."


def has_joined(run: RunDir) -> None: ...


def was_an_anchor(run: RunDir) -> None:
    replace(HOME, is_anchor=True).write(run)


def has_created(run: RunDir) -> None:
    HOME.write(run)


def has_finished(run: RunDir) -> None:
    HOME.write(run)
    Attempt(run, 0).ended("COMPLETED")


@pytest.mark.parametrize(
    ("was", "words", "says"),
    [
        (has_joined, RESUME, "hivemind-0001 has not created a swarm that others could join."),
        (was_an_anchor, RESUME, "hivemind-0001 is an anchor's record, which is not gone on with."),
        (has_created, RESUME, LOST),
        (has_created, CREATE, LOST),
        (has_finished, RESUME, "hivemind-0001 has finished."),
        (has_finished, CREATE, "hivemind-0001 has finished."),
        (has_created, (*RESUME, "optim.lr=1"), "Unrecognized arguments: optim.lr=1."),
        (has_created, (*RESUME, "--nodes=2"), "--nodes=2 means nothing to hivemind-0001."),
        (has_created, (*CREATE, "--identity", "key"), "--identity does not go with --resume"),
        (has_created, (*CREATE, "optim.lr=1"), "optim.lr=1 does not go with --resume"),
        (has_created, (*CREATE, "hivemind"), "hivemind does not go with --resume"),
        (has_created, ("swarm", "create", "hivemind", "--force"), "--force needs --resume: a new swarm runs nowhere"),
    ],
)
def test_what_cannot_go_on_or_heed_a_flag_is_refused(
    command: Command, run: RunDir, was: Callable[[RunDir], None], words: tuple[str, ...], says: str
) -> None:
    was(run)
    done = command(*words)
    assert done.code == 2
    assert done.err.lower().startswith(says.lower())
    assert not (run.path / "owner.key").exists()


def test_an_anchor_is_told_how_to_come_back_under_its_address(command: Command, run: RunDir) -> None:
    was_an_anchor(run)
    assert f"jobs.swarm anchor TOKEN --port 4711 --identity {run.path}/swarm_identity" in command(*RESUME).err


def test_a_copy_on_another_machine_goes_on_with_force_alone(command: Command, run: RunDir) -> None:
    HOME.write(run)
    submitted(run, "swarm", "2", replace(ended_process(), host="elsewhere"))
    done = command(*CREATE)
    fix = "  fix: Ask again later or elsewhere; if you know that it has ended, add --force."
    assert (done.code, done.err.splitlines()[-1]) == (2, fix)
    done = command(*CREATE, "--force")
    assert (done.code, done.err.splitlines()[0]) == (2, LOST)


def test_a_swarm_that_runs_is_not_started_twice(command: Command, run: RunDir) -> None:
    HOME.write(run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        submitted(run, "swarm", "2", ProcessId.of(living.pid))
        done = command(*CREATE)
    assert done.code == 2
    assert "is PENDING" in done.err

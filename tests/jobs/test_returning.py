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
from trainkit.run.events import Attempt, submitted
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
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


def test_a_peer_that_has_joined_is_told_to_join_again(command: Command, run: RunDir) -> None:
    done = command("resume", run.name)
    assert (done.code, done.err.splitlines()[0]) == (2, f"{run.name} has not created a swarm that others could join.")


def test_an_anchor_is_told_how_to_come_back_under_its_address(command: Command, run: RunDir) -> None:
    SavedPeer(HOME.run_id, HOME.first_round, "0.0.0.0", 4711, is_anchor=True).write(run)
    done = command("resume", run.name)
    assert done.code == 2
    assert f"jobs.swarm anchor TOKEN --port 4711 --identity {run.path}/swarm_identity" in done.err


def test_a_swarm_without_its_owners_key_is_not_gone_on_with(command: Command, run: RunDir) -> None:
    HOME.write(run)
    for words in (("resume", run.name), ("swarm", "create", "--resume", run.name)):
        done = command(*words)
        assert (done.code, done.err.splitlines()[0]) == (2, f"{run.name} has lost its owner.key.")
    assert not (run.path / "owner.key").exists()


def test_a_copy_on_another_machine_goes_on_with_force_alone(command: Command, run: RunDir) -> None:
    HOME.write(run)
    submitted(run, "swarm", "2", replace(ended_process(), host="elsewhere"))
    done = command("swarm", "create", "--resume", run.name)
    assert (done.code, done.err.splitlines()[-1]) == (
        2,
        "  fix: Ask again later or elsewhere; if you know that it has ended, add --force.",
    )
    done = command("swarm", "create", "--resume", run.name, "--force")
    assert (done.code, done.err.splitlines()[0]) == (2, f"{run.name} has lost its owner.key.")


def test_a_new_swarm_runs_nowhere_else(command: Command) -> None:
    done = command("swarm", "create", "hivemind", "--force")
    assert (done.code, done.err.splitlines()[0]) == (2, "--force needs --resume: a new swarm runs nowhere else.")


def test_a_swarm_that_is_over_is_not_gone_on_with(command: Command, run: RunDir) -> None:
    HOME.write(run)
    Attempt(run, 0).ended("COMPLETED")
    for words in (("resume", run.name), ("swarm", "create", "--resume", run.name)):
        done = command(*words)
        assert (done.code, done.err.splitlines()[0]) == (2, f"{run.name} has finished.")


def test_a_swarm_that_runs_is_not_started_twice(command: Command, run: RunDir) -> None:
    HOME.write(run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        submitted(run, "swarm", "2", ProcessId.of(living.pid))
        done = command("swarm", "create", "--resume", run.name)
    assert done.code == 2
    assert "is PENDING" in done.err


@pytest.mark.parametrize("word", ["optim.lr=1", "--nodes=2"])
def test_what_a_swarm_made_by_hand_cannot_heed_is_refused(command: Command, run: RunDir, word: str) -> None:
    HOME.write(run)
    done = command("resume", run.name, word)
    assert done.code == 2


def test_a_resumed_swarm_has_its_settings_and_its_key(command: Command, run: RunDir) -> None:
    HOME.write(run)
    for more in (["--identity", "key"], ["optim.lr=1"], ["hivemind"]):
        done = command("swarm", "create", "--resume", run.name, *more)
        assert done.code == 2
        assert "does not go with --resume" in done.err

"""What the tests of commands share: commands called in this process, with or without a SLURM."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from tests.runs import code_store, fake_command, local_run, rank_function, script  # noqa: F401
from trainkit.config.loading import load, to_yaml
from trainkit.launch import run_folders
from trainkit.run.events import append_event, submitted
from trainkit.run.folder import RunDir

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str

    def ok(self, *words: str) -> Done:
        """It succeeded, and printed these words."""
        assert (self.code, [each for each in words if each not in self.out]) == (0, []), self.out + self.err
        return self

    def refused(self, code: int, *words: str) -> Done:
        """It ended with this exit code, and said these words on stderr."""
        assert (self.code, [each for each in words if each not in self.err]) == (code, []), self.out + self.err
        return self


Command = Callable[..., Done]
NO_ANSWER = "echo 'Unable to contact slurm controller' >&2; exit 1"
"""What SLURM's programs do while its controller is away."""


def make_run(path: Path, *overrides: str, job: str = "", **record: Any) -> RunDir:
    """A run folder of the preset ddp.

    Args:
        job: of SLURM, which this user has submitted for it.
        record: the facts of a submission that stand in the run's own record alone.
    """
    run = RunDir.create(path, to_yaml(load("ddp", overrides).config))
    if job:
        submitted(run, "slurm", job)
    if record:
        append_event(run, "submitted", **record)
    return run


@pytest.fixture
def captured(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """What this process prints; a test file may say that it wants what programs of others print as well."""
    return capsys


@pytest.fixture
def command(
    no_slurm: dict[str, str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    captured: pytest.CaptureFixture[str],
) -> Iterator[Command]:
    """``command("submit", "ddp", ...)`` is ``python -m jobs.submit ddp ...`` in this process, in the test's folder.

    There is no SLURM, unless the test asks for `fake_slurm`. What a run in this process (--executor debug) writes into
    the environment is taken out of it again.
    """
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(run_folders, "STORE", str(code_store(tmp_path_factory)))

    def call(verb: str, *arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", [f"jobs/{verb}.py", *arguments])
        captured.readouterr()
        try:
            code = cli.call(importlib.import_module(f"jobs.{verb}").main)
        except SystemExit as end:  # `--help`
            code = int(end.code or 0)
        finally:
            said = captured.readouterr()
        return Done(code, said.out, said.err)

    yield call
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def no_slurm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """A machine without SLURM; returns the environment for subprocesses that start from any folder."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("bin")))
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return dict(os.environ)


@pytest.fixture
def fake_slurm(
    no_slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A login node whose sbatch takes every script, as job 4711, and keeps it as submitted.sbatch; its folder."""
    folder = tmp_path_factory.mktemp("slurm")
    partition = "PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=UP"
    nodes = "\n".join(f"NodeName=n{index} CPUTot=8 Gres=gpu:4 State=IDLE" for index in (1, 2))
    scripts = {
        "sbatch": f'cat "${{@: -1}}" > {folder}/submitted.sbatch; echo 4711',
        "srun": "exit 0",
        "scontrol": f"if [ $2 = node ]; then echo '{nodes}'; else echo '{partition}'; fi",
        "squeue": "echo '4711|PENDING|Resources|0:00|'",
        "sacct": "exit 0",
        "scancel": f'echo "$*" >> {folder}/cancelled',
    }
    for name, body in scripts.items():
        script(folder / name, body)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder

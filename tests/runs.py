"""Fixtures for tests that start ranks without torch, or talk to a SLURM made of shell scripts."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from trainkit.cluster.plan import Plan
from trainkit.cluster.site import Site
from trainkit.config.loading import load
from trainkit.launch.planning import make_plan
from trainkit.launch.run_folders import stored_config, write_run
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import STORE

HERE = Site(scheduler="", gpus=0, cpus=2)


def last_event(run: RunDir, kind: str) -> dict[str, Any] | None:
    """The newest event of a kind."""
    events = read_events(run, kind)
    return events[-1] if events else None


T = TypeVar("T")


def wait_until(look: Callable[[], T | None], seconds: float = 60.0, what: str | Callable[[], str] = "") -> T:
    """What ``look`` returns as soon as that is true; else the test fails, with ``what`` it has waited for.

    Of the time between two looks at most 5 s count. A machine that was paused for minutes would else be past the
    limit when it goes on, though what the test waits for has had no time to happen.
    """
    left, before = seconds, time.monotonic()
    while not (seen := look()):
        now = time.monotonic()
        left, before = left - min(now - before, 5.0), now
        assert left > 0, f"not within {seconds:g} s: {what() if callable(what) else what}".removesuffix(": ")
        time.sleep(0.05)
    return seen


def script(file: Path, body: str) -> None:
    """Write a program of bash."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def code_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all tests share one copy of the code, which takes a fifth of a second to write."""
    folder = tmp_path_factory.getbasetemp() / "shared"
    folder.mkdir(exist_ok=True)
    return folder / STORE


@pytest.fixture
def local_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[RunDir, Plan]]:
    """A written run folder, ready to be handed over, and its plan; keyword arguments are resource flags.

    Its ranks need no torch, so nothing loads it ahead of them.
    """

    def make(name: str = "run-0001", site: Site = HERE, **flags: Any) -> tuple[RunDir, Plan]:
        settings = {f"launch.{key}": (value, f"--{key}") for key, value in flags.items()}
        config = load("ddp", ["launch.restart_in_place=false"], flags=settings)
        path = tmp_path / "runs" / name
        plan = make_plan(config, site, path)
        stored = stored_config(config, tmp_path)
        return write_run(path, stored, plan, None, ["test"], store=code_store(tmp_path_factory)), plan

    return make


@pytest.fixture
def rank_function(tmp_path: Path) -> Iterator[Callable[[str], Callable[[str], str]]]:
    """Makes ``run_rank(run)`` from its body, in a module that the ranks find in the folder of the submission."""
    name = f"ranks_of_{abs(hash(tmp_path))}"

    def make(body: str) -> Callable[[str], str]:
        lines = ["import json, os, signal, sys, time", "from pathlib import Path", "", "def run_rank(run):"]
        lines += [f"    {line}" for line in ("run = Path(run)", "rank = int(os.environ['SUBMITIT_LOCAL_GLOBALID'])")]
        lines += [f"    {line}" for line in body.strip().splitlines()]
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
        sys.path.insert(0, str(tmp_path))
        function: Callable[[str], str] = importlib.import_module(name).run_rank
        return function

    yield make
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))
    sys.modules.pop(name, None)


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a shell script first on the PATH; returns a file to which it appends its arguments, one call a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        script(folder / name, f'echo "$*" >> {calls}\n{body}')
        return calls

    return make

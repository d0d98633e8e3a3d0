"""A run folder is as open as its mode says, and not as the umask of whoever starts or reports on it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ALL = ["monitor.loggers=[console,jsonl,tensorboard,wandb]", "monitor.profile_steps=[2,4]", "train.epochs=1"]


def wrong_modes(run: Path, mode: int) -> list[str]:
    """Everything in a run folder that is more or less open than the folder is to be."""
    wrong = []
    for path in (run, *run.rglob("*")):
        if not path.is_symlink():
            found = stat.S_IMODE(path.stat().st_mode)
            if found != (mode if path.is_dir() else mode & 0o666):
                wrong.append(f"{found:o} {path.relative_to(run)}")
    return wrong


@pytest.mark.parametrize(
    ("umask", "mode"),
    [
        (0o000, "750"),
        *(
            pytest.param(umask, mode, marks=pytest.mark.long)
            for umask in (0o000, 0o002, 0o077)
            for mode in ("700", "750", "2770")
            if (umask, mode) != (0o000, "750")
        ),
    ],
)
def test_all_of_a_finished_run_is_as_open_as_its_mode_says(umask: int, mode: str, tmp_path: Path) -> None:
    def job(verb: str, *words: str) -> None:
        own = {"TRAINKIT_RUN_MODE": mode, "XDG_STATE_HOME": str(tmp_path / "state"), "WANDB_MODE": "offline"}
        command = [sys.executable, "-m", f"jobs.{verb}", *words]
        env = {**os.environ, **own}
        done = subprocess.run(command, cwd=tmp_path, env=env, umask=umask, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    job("submit", "single", "--executor", "local", "--wait", "--run-dir", "runs/one", *ALL)
    job("evaluate", "runs/one")
    job("report", "runs/one")
    run = tmp_path / "runs" / "one"
    there = {path.name for path in run.iterdir()}
    assert there >= {"tensorboard", "wandb", "profile", "checkpoints", "logbook.md", "report.html", ".submitit", "code"}
    assert wrong_modes(run, int(mode, 8)) == []
    assert (tmp_path / "runs").stat().st_mode & 0o022 == 0, "who can write there replaces the run"

"""trackio's own library and its files."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.monitor.conftest import recorded
from tests.shell import PROJECT, python
from trainkit.run.folder import RunDir
from trainkit.run.labels import say

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")

ATTEMPT = """
import sys
from pathlib import Path

def tell(event, values):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print("asked", *values[-2:], file=sys.stderr)

sys.addaudithook(tell)
from trainkit.config.schema import Config
from trainkit.monitor.base import open_loggers
from trainkit.run.folder import RunDir

config = Config.model_validate({"monitor": {"loggers": ["jsonl", "trackio"]}, "seed": 7})
with open_loggers(config, RunDir(Path(sys.argv[1])), total_steps=40, resumed_step=int(sys.argv[2])) as logger:
    for step in map(int, sys.argv[3:]):
        logger.log({"step": step, "split": "train", "loss": 1 / step if step < 40 else None, "acc1": 2.0 * step})
    logger.log({"step": step, "split": "val", "loss": 1 / step})
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which its library reads as it is loaded
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")


def train(run: RunDir, *steps: int, resumed: int = 0) -> str:
    """An attempt, in a process of its own; what it said on stderr."""
    words = [str(run.path), str(resumed), *map(str, steps)]
    ended = subprocess.run(
        [sys.executable, "-c", ATTEMPT, *words], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def rows(tmp_path: Path, table: str = "metrics") -> list[dict[str, Any]]:
    with sqlite3.connect(tmp_path / "trackio" / "trainkit.db") as base:
        base.row_factory = sqlite3.Row
        return [dict(row) for row in base.execute(f"SELECT * FROM {table}")]


def points(rows: list[dict[str, Any]], key: str) -> list[tuple[int, Any]]:
    found = []
    for row in rows:
        values = json.loads(row["metrics"])
        if key in values:
            found.append((row["step"], values[key]))
    return sorted(found)


@pytest.mark.nightly
def test_a_requeued_run_is_one_run_with_each_recorded_point_once(run_dir: RunDir, tmp_path: Path) -> None:
    assert train(run_dir, 10, 20, 30) == "", "no network"
    say(run_dir, tags=["paper"], notes=["warm-up too short"])
    assert train(run_dir, 30, 40, resumed=20) == ""
    there = rows(tmp_path)
    assert len({row["run_id"] for row in there}) == 1
    for split in ("train", "val"):
        told = points(there, f"loss/{split}")
        assert [(step, None if value == "NaN" else value) for step, value in told] == recorded(run_dir, "loss", split)
    (row,) = rows(tmp_path, "configs")
    config = json.loads(row["config"])
    assert (config["seed"], config["tags"], config["notes"]) == (7, ["paper"], ["warm-up too short"])
    assert "launch" not in config


@pytest.mark.nightly
def test_runs_of_one_name_in_two_folders_are_two_runs(run_dir: RunDir, tmp_path: Path) -> None:
    for folder in (run_dir, RunDir.create(tmp_path / "elsewhere" / "ddp-0001", "seed: 0\n")):
        train(folder, 10)
    assert len({row["run_id"] for row in rows(tmp_path)}) == 2


@pytest.mark.nightly
def test_the_command_of_the_page_puts_a_whole_training_into_trackio(run_dir: RunDir, tmp_path: Path) -> None:
    ((line,),) = readme.blocks("trackio", readme.DOCS / "report.md", typed=True)
    folder = tmp_path / "runs" / "whole"
    words = [*line.removeprefix("trainkit ").split(), "--run-dir", str(folder)]
    ended = python("-m", "jobs", *words, PYTHONPATH=os.pathsep.join(sys.path))
    assert ended.returncode == 0, ended.stderr
    assert points(rows(tmp_path), "loss/train") == recorded(RunDir(folder), "loss", "train") != []

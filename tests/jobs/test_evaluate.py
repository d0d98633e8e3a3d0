from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that shard the model."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    run_ranks(2, train_run, folder, "fsdp", ("train.max_steps=40",))
    return folder


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.evaluate", *arguments], capture_output=True, text=True, check=False
    )


def test_one_process_finds_the_test_metrics_that_two_ranks_found(run: Path) -> None:
    done = evaluate(str(run), "--json")
    assert done.returncode == 0, done.stderr
    result, summary = json.loads(done.stdout), json.loads((run / "summary.json").read_text())
    assert result["step"] == summary["best_step"]
    assert result["samples"] == summary["test"]["samples"]
    assert result["acc1"] == pytest.approx(summary["test"]["acc1"])
    assert result["loss"] == pytest.approx(summary["test"]["loss"], rel=1e-5)


def test_another_checkpoint_and_split_can_be_asked_for(run: Path) -> None:
    done = evaluate(str(run), "--checkpoint", "latest", "--split", "val")
    assert done.returncode == 0, done.stderr
    assert "val of step 40 (latest)" in done.stdout


def test_a_checkpoint_that_is_not_there_exits_with_2_and_names_those_that_are(run: Path) -> None:
    done = evaluate(str(run), "--checkpoint", "7")
    assert done.returncode == 2
    assert "40" in done.stderr
    assert "Traceback" not in done.stderr

"""Whole runs whose disk is lost: they go on, and are evaluated, from their copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.bucket import Trouble
from tests.checkpoint.reading import write
from tests.rank_functions import QUICK, run_command, run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.checkpoint.transfer import fetch_run, send_rest
from trainkit.config.loading import load, to_yaml
from trainkit.errors import UserError
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

SETTINGS = ("train.max_steps=24", "model.dropout=0.2", "checkpoint.every_steps=5")


def weights(folder: Path) -> bytes:
    step = format.resolve(folder / "checkpoints", "latest")
    return (format.path_of(folder / "checkpoints", step) / "model.safetensors").read_bytes()


def test_a_run_whose_disk_is_lost_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"checkpoint.remote=file://{tmp_path}/far")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_ranks(1, train_run, whole, "single", SETTINGS) == ["finished"]
    assert run_ranks(2, train_run, broken, "ddp", settings, 12) == ["preempted"] * 2
    shutil.rmtree(broken)
    assert fetch_run(f"file://{tmp_path}/far/broken", tmp_path).path == broken
    shutil.rmtree(broken / "checkpoints")  # these alone are found where they are, without anybody's asking
    assert run_ranks(2, train_run, broken, "ddp", settings) == ["finished"] * 2
    first, second = read_events(RunDir(broken), "started")
    assert (first["step"], first["attempt"], second["attempt"]) == (0, 0, 1)
    assert second["step"] > 0
    shutil.rmtree(whole)
    assert run_ranks(2, train_run, whole, "ddp", SETTINGS) == ["finished"] * 2
    assert weights(broken) == weights(whole)
    there = fetch_run(f"file://{tmp_path}/far/broken", tmp_path / "elsewhere")
    assert weights(there.path) == weights(whole)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "runs"


def submit(*settings: str, cwd: Path) -> tuple[int, str]:
    done = run_command("submit", "single", "--executor", "debug", *QUICK, *settings, cwd=cwd)
    return done.returncode, done.stderr


def test_a_run_is_evaluated_straight_from_its_bucket(bucket: tuple[str, Trouble], runs: Path, tmp_path: Path) -> None:
    code, told = submit("train.max_steps=20", f"checkpoint.remote={bucket[0]}", cwd=tmp_path)
    assert code == 0, told
    summary = json.loads((runs / "single-0001" / "summary.json").read_text())
    assert read_events(RunDir(runs / "single-0001"), "uploaded")
    shutil.rmtree(runs)
    there = fetch_run(f"{bucket[0]}/single-0001", tmp_path / "there").path
    assert json.loads((there / "summary.json").read_text()) == summary
    done = run_command("evaluate", f"{bucket[0]}/single-0001", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["step"], result["acc1"]) == (summary["best_step"], pytest.approx(summary["test"]["acc1"]))


def test_what_a_finished_run_could_not_send_goes_later(bucket: tuple[str, Trouble], tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "single-0001", to_yaml(load("single").config))
    run.attempt_logs(0).mkdir(parents=True)
    weights = {"weight": torch.ones(3)}
    write(run.checkpoints, 7, {"model": weights, "optimizer": weights}, {"progress": {"step": 7}})
    bucket[1].refuse = True
    with pytest.raises(UserError, match="cannot be used"):
        send_rest(run, bucket[0])
    bucket[1].over()
    assert send_rest(run, bucket[0]) == f"{bucket[0]}/single-0001"
    shutil.rmtree(run.path)
    back = fetch_run(f"{bucket[0]}/single-0001", tmp_path)
    assert format.resolve(back.checkpoints, "latest") == 7
    assert not back.lease.exists()


@pytest.mark.long
def test_a_run_is_resumed_from_its_bucket_once_its_code_is_allowed(
    bucket: tuple[str, Trouble], runs: Path, tmp_path: Path
) -> None:
    assert submit("train.max_steps=4", f"checkpoint.remote={bucket[0]}", cwd=tmp_path)[0] == 0
    shutil.rmtree(runs)
    url = f"{bucket[0]}/single-0001"
    refused = run_command("resume", url, cwd=tmp_path)
    assert refused.returncode == 3
    assert "--allow-code" in refused.stderr
    assert not (runs / "single-0001").exists()
    finished = run_command("resume", url, "--allow-code", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "has finished" in finished.stdout
    assert (runs / "single-0001" / "code" / "jobs" / "train.py").is_file()

"""Interrupted and resumed equals uninterrupted, bit for bit on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run
from trainkit.checkpoint import files
from trainkit.records.events import read_events
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir

# 19 updates an epoch: two validations, and a model with dropout, whose random numbers must go on as well.
SETTINGS = ("train.max_steps=40", "model.dropout=0.2", "schedule.name=cosine")


def final_weights(folder: Path) -> bytes:
    step = files.resolve(folder / "checkpoints", "latest")
    return (files.path_of(folder / "checkpoints", step) / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("preset", "world_size"), [("single", 1), ("ddp", 4), ("fsdp", 2)])
def test_a_run_interrupted_anywhere_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, preset: str, world_size: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_ranks(world_size, train_run, whole, preset, SETTINGS) == ["finished"] * world_size
    # The first stop falls into a training step, the second into the validation after step 38.
    for stop_after in (7, 33):
        assert run_ranks(world_size, train_run, broken, preset, SETTINGS, stop_after) == ["preempted"] * world_size
    assert run_ranks(world_size, train_run, broken, preset, SETTINGS) == ["finished"] * world_size
    assert final_weights(broken) == final_weights(whole)
    assert [r["loss"] for r in read_metrics(RunDir(broken), "train")] == [
        r["loss"] for r in read_metrics(RunDir(whole), "train")
    ]
    assert [(r["step"], r["acc1"]) for r in read_metrics(RunDir(broken), "val")] == [
        (r["step"], r["acc1"]) for r in read_metrics(RunDir(whole), "val")
    ]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, train_run, folder, "fsdp", SETTINGS, 10)
    started = files.steps(folder / "checkpoints")[-1]
    assert run_ranks(1, train_run, folder, "fsdp", SETTINGS) == ["finished"]
    assert [event["step"] for event in read_events(RunDir(folder), "started")] == [0, started]


def test_a_broken_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    settings = ("train.max_steps=12", "checkpoint.every_steps=5")
    run_ranks(1, train_run, whole, "single", settings)
    run_ranks(1, train_run, folder, "single", settings, 12)
    newest = files.path_of(folder / "checkpoints", files.steps(folder / "checkpoints")[-1])
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert run_ranks(1, train_run, folder, "single", settings) == ["finished"]
    assert [event["step"] for event in read_events(RunDir(folder), "started")] == [0, 10]
    assert final_weights(folder) == final_weights(whole)


def test_a_stopped_run_leaves_the_request_to_be_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS, 3)
    assert read_events(RunDir(folder), "handed_back")[0]["signals"] == ["SIGUSR2"]

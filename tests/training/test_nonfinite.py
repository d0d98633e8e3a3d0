"""What is not finite never reaches the weights, is written down, and never ends as a success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks
from tests.training.poisoned import BATCH, PER_EPOCH, SIZE, train_and_tell
from trainkit.data.order import global_batch
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

RANKS = pytest.mark.parametrize(("preset", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])


def strict(text: str) -> Any:
    """JSON as RFC 8259 has it: NaN and Infinity are none of it."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def summary(folder: Path) -> dict[str, Any]:
    return dict(strict((folder / "summary.json").read_text(encoding="utf-8")))


def weights(folder: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return tensors(folder / "checkpoints", which=which)


def train(world_size: int, folder: Path, preset: str, *settings: str, stop_after: int | None = None) -> str:
    endings = set(run_ranks(world_size, train_and_tell, folder, preset, settings, stop_after))
    assert len(endings) == 1, "all ranks end alike"
    return str(endings.pop())


@RANKS
def test_three_updates_in_a_row_that_are_not_finite_end_the_run_as_failed_with_good_weights(
    tmp_path: Path, preset: str, world_size: int
) -> None:
    steady = ("schedule.name=constant", "schedule.warmup_epochs=0")
    assert train(world_size, tmp_path / "good", preset, *steady, "train.max_steps=4") == "finished"
    said = train(world_size, tmp_path / "run", preset, *steady, "data.positions='4,5,6'")
    assert said.startswith("1: Training has diverged: 3 updates in a row were not finite.\n")
    done = summary(tmp_path / "run")
    assert done["outcome"] == "failed"
    assert "3 updates in a row were not finite" in done["why"]
    events = [event["event"] for event in read_events(RunDir(tmp_path / "run"))]
    assert "finished" not in events
    assert "failed" in events
    good, bad = weights(tmp_path / "good"), weights(tmp_path / "run")
    assert all(torch.equal(good[name], bad[name]) for name in good), "those before the first bad update"


def test_the_samples_of_a_bad_update_are_written_down(folder: Path) -> None:
    train(2, folder, "ddp", "data.positions='4'")
    (event,) = read_events(RunDir(folder), "nonfinite")
    assert event["samples"] == global_batch(SIZE, 0, 4, BATCH)
    assert (event["step"], event["loss"], event["grad_norm"]) == (5, "nan", None)


@RANKS
def test_skip_goes_on_without_the_bad_updates(folder: Path, preset: str, world_size: int) -> None:
    bad = [3, 4, 5, 6, 9]
    settings = ("train.on_nonfinite=skip", f"data.positions='{','.join(map(str, bad))}'", "train.grad_clip_norm=5")
    assert train(world_size, folder, preset, *settings) == "finished"
    events = read_events(RunDir(folder), "nonfinite")
    assert [event["step"] for event in events] == [position + 1 for position in bad]
    assert all(event["grad_norm"] == "nan" for event in events)
    assert summary(folder)["val"]["acc1"] > 90
    assert summary(folder)["steps"] == PER_EPOCH


def test_skip_does_not_go_on_for_ever(folder: Path) -> None:
    said = train(1, folder, "single", "train.on_nonfinite=skip", "train.max_steps=70", "data.positions=all")
    assert said.startswith("1: Training has diverged: 50 updates in a row were not finite.")


@RANKS
def test_rollback_goes_back_to_the_newest_checkpoint_and_on_with_the_data_after_the_bad(
    folder: Path, preset: str, world_size: int
) -> None:
    settings = ("train.on_nonfinite=rollback", "checkpoint.every_steps=3", "data.positions='4,5,6'")
    assert train(world_size, folder, preset, *settings) == "finished"
    run = RunDir(folder)
    (event,) = read_events(run, "rolled_back")
    assert (event["from_step"], event["step"], event["position"]) == (7, 6, 7)
    assert [event["step"] for event in read_events(run, "nonfinite")] == [5, 6, 7]
    assert summary(folder)["steps"] == PER_EPOCH
    assert [record["step"] for record in read_metrics(run, "train")] == list(range(1, PER_EPOCH + 1))


def test_a_rollback_is_tried_three_times(folder: Path) -> None:
    everywhere = ",".join(str(position) for position in range(2, PER_EPOCH))
    settings = ("train.on_nonfinite=rollback", "checkpoint.every_steps=2")
    said = train(1, folder, "single", *settings, f"data.positions='{everywhere}'")
    assert said.startswith("1: Training has diverged")
    assert len(read_events(RunDir(folder), "rolled_back")) == 3
    assert summary(folder)["outcome"] == "failed"


def test_a_rollback_without_a_checkpoint_ends_the_run(folder: Path) -> None:
    said = train(1, folder, "single", "train.on_nonfinite=rollback", "data.positions='1,2,3'")
    assert said.startswith("1: Training has diverged")


def test_a_run_resumed_among_bad_updates_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ("data.positions='4,5,6'", "model.dropout=0.2")
    assert train(1, broken, "single", *settings, stop_after=6) == "preempted"
    assert train(1, broken, "single", *settings) == train(1, whole, "single", *settings)
    assert [event["step"] for event in read_events(RunDir(broken), "nonfinite")] == [5, 6, 7]
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(broken).items())


def test_best_never_holds_what_is_not_a_number(folder: Path) -> None:
    assert train(1, folder, "single", "checkpoint.best=val/loss", "data.val=true") == "finished"
    done = summary(folder)
    assert (done["best"], done["best_step"], done["val"]["loss"]) == ({"val/loss": None}, None, None)
    assert not (folder / "checkpoints/best").exists()
    assert done["test"]["loss"] > 0


@pytest.mark.parametrize(
    ("values", "best"), [([float("nan"), 2.0, float("nan"), 3.0], 2.0), ([float("inf"), 9.0], 9.0)]
)
def test_any_finite_loss_is_better_than_one_that_is_not(values: list[float], best: float) -> None:
    from trainkit.training.progress import Progress

    progress = Progress()
    judged = [progress.judge({"loss": value}, "val/loss", higher_is_better=False) for value in values]
    assert judged == [value == best for value in values]
    assert progress.best == best


def test_everything_that_a_failing_run_writes_is_strictly_json(folder: Path) -> None:
    train(1, folder, "single", "data.positions='4,5,6'", "data.val=true", "train.grad_clip_norm=1")
    lines = [line for name in ("events", "metrics") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    documents = [*folder.glob("checkpoints/*/state.json"), folder / "summary.json"]
    assert len(documents) > 1
    assert any(strict(line).get("event") == "nonfinite" for line in lines)
    for document in documents:
        strict(document.read_text(encoding="utf-8"))


# fp16: an update is skipped whenever a gradient overflows, and the loss scale is halved


def test_an_fp16_skip_is_an_event_and_schedule_and_step_stand_still(tmp_path: Path) -> None:
    plain, skipping = tmp_path / "plain", tmp_path / "skipping"
    assert train(1, plain, "single", "train.precision=fp16", "train.max_steps=15") == "finished"
    assert (
        train(1, skipping, "single", "train.precision=fp16", "train.max_steps=15", "data.positions='3,7'") == "finished"
    )
    first, second = read_events(RunDir(skipping), "skipped")
    assert (first["step"], first["scale_before"], first["scale_after"]) == (3, 65536.0, 32768.0)
    assert first["parameter"] == "layers.2.weight"
    assert (second["step"], second["scale_before"], second["scale_after"]) == (6, 32768.0, 16384.0)
    assert read_events(RunDir(skipping), "nonfinite") == []
    rates = [
        [(record["step"], record["lr"]) for record in read_metrics(RunDir(folder), "train")]
        for folder in (plain, skipping)
    ]
    assert rates[0] == rates[1]
    assert [step for step, _ in rates[0]] == list(range(1, 16))
    # The data went on: the skipped batch is not seen twice.
    third = [read_metrics(RunDir(folder), "train")[3]["loss"] for folder in (plain, skipping)]
    assert third[0] != third[1]
    assert summary(skipping)["skipped_steps"] == 2


def test_fp16_resumes_with_the_scale_and_the_data_that_it_had(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ("train.precision=fp16", "train.max_steps=15", "data.positions='3'", "model.dropout=0.2")
    train(1, whole, "single", *settings)
    assert train(1, broken, "single", *settings, stop_after=6) == "preempted"
    assert train(1, broken, "single", *settings) == "finished"
    states = [json.loads((folder / "checkpoints/latest/state.json").read_text())["state"] for folder in (whole, broken)]
    assert states[0]["precision"] == states[1]["precision"]
    assert states[0]["progress"]["position"] == states[1]["progress"]["position"] == 16
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(broken).items())


def test_fp16_that_only_skips_is_a_failure(folder: Path) -> None:
    said = train(1, folder, "single", "train.precision=fp16", "train.max_steps=70", "data.positions=all")
    assert said.startswith("1: Training has diverged: 50 updates in a row were not finite.")
    assert summary(folder)["steps"] == 0

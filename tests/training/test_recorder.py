"""Broken images in a run: told of once, counted by all ranks, and without influence on what is exact."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, Notes, keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.data.base import Batch
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.recorder import Progress, Recorder
from trainkit.training.update import Updater

BAD, GOOD = {"loss": 2.0, "acc1": 10.0, "acc5": 50.0}, {"loss": 1.0, "acc1": 20.0, "acc5": 60.0}


def judged(progress: Progress, val: dict[str, float], by: str) -> bool:
    return progress.judge(val, by, higher_is_better=not by.endswith("loss"))


@pytest.mark.parametrize("by", ["val/acc1", "val/acc5", "val/loss"])
def test_accuracy_is_best_high_and_a_loss_is_best_low(by: str) -> None:
    progress = Progress(step=1)
    assert judged(progress, BAD, by)
    progress.step = 2
    assert judged(progress, GOOD, by)
    progress.step = 3
    assert not judged(progress, BAD, by)
    assert (progress.best, progress.best_step) == (GOOD[by[4:]], 2)
    assert (progress.val, progress.validated_step) == (BAD, 3)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize("prefix", ["", "ema_"])
def test_a_model_whose_loss_is_not_finite_is_never_the_best(prefix: str, lost: float) -> None:
    progress, by = Progress(step=1), f"val/{prefix}acc1"
    assert not judged(progress, {f"{prefix}acc1": 90.0, f"{prefix}loss": lost}, by)
    assert (progress.best, progress.best_step, progress.stalled) == (None, None, 1)
    other = "loss" if prefix else "ema_loss"  # that of the other weights does not matter
    assert judged(progress, {f"{prefix}acc1": 10.0, f"{prefix}loss": 2.0, other: lost}, by)


@pytest.mark.parametrize("by", ["val/acc1", "val/loss"])
def test_of_two_equal_models_the_first_is_the_best(by: str) -> None:
    progress = Progress(step=1)
    judged(progress, GOOD, by)
    progress.step = 2
    assert not judged(progress, GOOD, by)
    assert progress.best_step == 1


@pytest.mark.parametrize(("step", "validated"), [(4, 5), (4, -1)])
def test_a_progress_that_cannot_be_is_not_taken(step: int, validated: int) -> None:
    with pytest.raises(ValueError):
        Progress.of({"progress": {"step": step, "validated_step": validated}})


@pytest.mark.parametrize(("step", "validated"), [(4, 4), (4, 0), (0, 0)])
def test_a_progress_is_what_was_saved(step: int, validated: int) -> None:
    kept = Progress.of({"progress": {"step": step, "validated_step": validated, "best": 0.5}})
    assert (kept.step, kept.validated_step, kept.best) == (step, validated, 0.5)


def test_a_run_begins_with_nothing() -> None:
    assert asdict(Progress()) == {
        "step": 0, "position": 0, "nonfinite": 0, "rollbacks": 0, "validated_step": 0, "best": None, "best_step": None,
        "train_seconds": 0.0, "seconds": {}, "images": 0, "window": [], "val": {}, "best_by": None, "ema_updates": 0,
        "broken": [], "stalled": 0, "reference": None,
    }  # fmt: skip


def due(what: str, *overrides: str, folder: Path) -> list[int]:
    """After which of 11 updates, 3 an epoch, something is due."""
    parts = parts_of("train.max_steps=11", *overrides)
    progress = Progress()
    keeper = keeper_of(parts, folder, progress)
    found = []
    for progress.step in range(1, 12):
        answer = getattr(keeper, what)()
        assert isinstance(answer, bool)
        found += [progress.step] * answer
    return found


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [((), [3, 6, 9, 11]), (("train.eval_every_epochs=2",), [6, 11]), (("train.eval_every_epochs=9",), [11])],
)
def test_validation_is_due_every_so_many_epochs_and_at_the_end(
    tmp_path: Path, overrides: tuple[str, ...], steps: list[int]
) -> None:
    assert due("validation_is_due", *overrides, folder=tmp_path / "run") == steps


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), [3, 6, 9, 11]),
        (("checkpoint.every_epochs=2",), [6, 11]),
        (("checkpoint.every_epochs=null",), [11]),
        (("checkpoint.every_epochs=null", "checkpoint.every_steps=4"), [4, 8, 11]),
        (("checkpoint.every_epochs=2", "checkpoint.every_steps=5"), [5, 6, 10, 11]),
    ],
)
def test_saving_is_due_every_so_many_epochs_or_steps_and_at_the_end(
    tmp_path: Path, overrides: tuple[str, ...], steps: list[int]
) -> None:
    assert due("saving_is_due", *overrides, folder=tmp_path / "run") == steps


def records(keeper: Recorder) -> list[dict[str, Any]]:
    assert isinstance(keeper.metrics, Notes)
    return keeper.metrics.records


def test_a_validation_is_recorded_with_its_place_and_judged(tmp_path: Path) -> None:
    progress = Progress(step=3)
    keeper = keeper_of(parts_of("checkpoint.best=val/loss"), tmp_path / "run", progress)
    assert keeper.validate({"step": 3, "lr": 0.5}) is True
    (record,) = records(keeper)
    assert {"step": 3, "lr": 0.5, "split": "val", "samples": 10}.items() <= record.items()
    assert progress.best == record["loss"] == progress.val["loss"]
    assert progress.validated_step == 3
    assert keeper.validate({}) is False


def test_a_validation_that_is_stopped_half_way_leaves_no_trace(tmp_path: Path) -> None:
    progress = Progress(step=3)
    keeper = keeper_of(parts_of(), tmp_path / "run", progress)
    assert keeper.validate({}, should_stop=lambda: True) is None
    assert records(keeper) == []
    assert progress == Progress(step=3)


def test_the_test_is_that_of_the_best_weights(tmp_path: Path) -> None:
    progress = Progress(step=3, best_step=3, best=1.0)
    model = Linear()
    keeper = keeper_of(parts_of(model=model), tmp_path / "run", progress)
    best = keeper.test({})
    keeper.save()
    model.layer.weight.data.neg_()
    progress.step = 6
    now = keeper.test({"epoch": 2.0})
    assert now == best
    assert records(keeper)[-1] == {"epoch": 2.0, "split": "test", **best}
    assert best["samples"] == 6


def test_where_the_best_weights_are_lost_the_newest_are_tested(tmp_path: Path) -> None:
    progress = Progress(step=3, best_step=2)
    model = Linear()
    keeper = keeper_of(parts_of(model=model), tmp_path / "run", progress)
    keeper.save()
    saved = keeper.test({})
    model.layer.weight.data.neg_()
    assert keeper.test({}) == saved


def test_without_a_best_model_the_last_is_tested(tmp_path: Path) -> None:
    model = Linear()
    keeper = keeper_of(parts_of(model=model), tmp_path / "run", Progress(step=3))
    before = keeper.test({})
    keeper.save()
    model.layer.weight.data.neg_()
    assert keeper.test({}) != before


def test_a_checkpoint_has_progress_precision_and_ranks_and_is_an_event(tmp_path: Path) -> None:
    progress = Progress(step=3, best_step=3, best=1.0, images=24)
    beats: list[int] = []
    keeper = keeper_of(parts_of(), tmp_path / "run", progress, beat=lambda: beats.append(1))
    keeper.save()
    run = keeper.writer.run
    state = format.verified(run.checkpoints, 3).state
    assert Progress.of(state) == progress
    assert state["world_size"] == 1
    assert state["precision"] == keeper.state.precision.state_dict()
    assert format.pointed(run.checkpoints, "best") == format.pointed(run.checkpoints, "latest") == 3
    assert [event["step"] for event in read_events(run, "saved")] == [3]
    assert len(beats) >= 2


def test_the_summary_says_what_came_of_it(tmp_path: Path) -> None:
    progress = Progress(step=3, best_step=2, best=50.0, val={"acc1": 40.0}, train_seconds=2.0, images=24)
    keeper = keeper_of(parts_of(), tmp_path / "run", progress)
    keeper.summarize("finished", epochs=1.00004, test={"acc1": 45.0}, rounds=7)
    summary = json.loads(keeper.writer.run.summary.read_text())
    expected = {
        "outcome": "finished", "steps": 3, "epochs": 1.0, "best": {"val/acc1": 50.0}, "best_step": 2,
        "val": {"acc1": 40.0}, "test": {"acc1": 45.0}, "train_seconds": 2.0, "images_per_sec": 12.0, "world_size": 1,
        "grad_accum_steps": 2, "micro_batch_size": 4, "precision": "fp32", "skipped_steps": 0, "broken_images": 0,
        "device": "cpu", "params": 7 * 48 + 7, "rounds": 7,
    }  # fmt: skip
    assert expected.items() <= summary.items()
    assert set(summary) - set(expected) == {
        "seconds", "mfu", "flops_per_image", "max_memory_mb", "max_memory_mb_of_ranks",
        "max_memory_reserved_mb_of_ranks", "energy", "advice",
    }  # fmt: skip
    assert summary["max_memory_mb_of_ranks"] == [summary["max_memory_mb"]]


def test_a_run_that_trained_nothing_has_no_speed(tmp_path: Path) -> None:
    keeper = keeper_of(parts_of(), tmp_path / "run", Progress())
    keeper.summarize("stopped", epochs=0.0, test={})
    assert json.loads(keeper.writer.run.summary.read_text())["images_per_sec"] is None


def test_numbers_of_the_summary_are_short_and_it_can_be_read(tmp_path: Path) -> None:
    keeper = keeper_of(parts_of(), tmp_path / "run", Progress(train_seconds=1.23456, images=1000, best=math.nan))
    keeper.summarize("finished", epochs=1.23456, test=None)
    text = keeper.writer.run.summary.read_text()
    summary = json.loads(text)
    assert (summary["epochs"], summary["train_seconds"], summary["images_per_sec"]) == (1.2346, 1.235, 810.01)
    assert (summary["best"], summary["test"]) == ({"val/acc1": None}, None)
    assert text.startswith('{\n  "outcome"')
    assert [path.name for path in keeper.writer.run.path.glob("*summary*")] == ["summary.json"]


def make_an_update(keeper: Recorder) -> None:
    images = torch.full((8, 3, 4, 4), 100, dtype=torch.uint8)
    Updater(keeper.state)(iter([Batch(images[:4], torch.zeros(4).long(), torch.arange(4))] * 2), lr=0.5, seed=0)


def weights_and_moments(keeper: Recorder) -> list[torch.Tensor]:
    model, optimizer = keeper.state.model, keeper.state.optimizer
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


@pytest.fixture
def gone_bad(tmp_path: Path) -> Recorder:
    """Of a run that saved after step 3, and whose next updates were no good."""
    progress = Progress(step=3, position=3, images=24, best=0.5, best_step=3, rollbacks=1)
    keeper = keeper_of(parts_of(), tmp_path / "run", progress)
    make_an_update(keeper)
    keeper.save()
    make_an_update(keeper)
    keeper.state.precision.skipped_steps = 5
    progress.step, progress.position, progress.nonfinite, progress.images, progress.best = 7, 9, 3, 56, 0.75
    return keeper


def test_a_rollback_is_back_at_the_newest_checkpoint_with_later_data(gone_bad: Recorder) -> None:
    bad = weights_and_moments(gone_bad)
    assert gone_bad.roll_back(9) is True
    good = weights_and_moments(gone_bad)
    there = Progress(step=3, position=9, images=24, best=0.5, best_step=3, rollbacks=2)
    assert replace(gone_bad.progress, seconds={}) == there
    assert not any(torch.equal(*pair) for pair in zip(good, bad, strict=True))
    make_an_update(gone_bad)
    assert all(torch.allclose(*pair) for pair in zip(weights_and_moments(gone_bad), bad, strict=True))
    assert gone_bad.state.precision.skipped_steps == 0
    (event,) = read_events(gone_bad.writer.run, "rolled_back")
    assert (event["step"], event["from_step"], event["position"]) == (3, 7, 9)
    saved = format.verified(gone_bad.writer.run.checkpoints, 3).state
    assert replace(Progress.of(saved), seconds={}) == there, (
        "a run that is resumed from here does not meet the bad data again"
    )


def test_a_run_is_rolled_back_three_times_at_most(gone_bad: Recorder) -> None:
    gone_bad.progress.rollbacks = 2
    assert gone_bad.roll_back(9) is True
    assert gone_bad.progress.rollbacks == 3
    assert gone_bad.roll_back(12) is False
    assert (gone_bad.progress.position, gone_bad.progress.rollbacks) == (9, 3)


def test_without_a_checkpoint_there_is_no_rollback(tmp_path: Path) -> None:
    keeper = keeper_of(parts_of(), tmp_path / "run", Progress(step=7))
    assert keeper.roll_back(9) is False
    assert keeper.progress == Progress(step=7)


def test_a_checkpoint_with_tensors_of_its_own_can_leave_the_optimizer_out(tmp_path: Path) -> None:
    keeper = keeper_of(parts_of(), tmp_path / "run", Progress(step=3))
    keeper.save(optimizer=False, extra={"common": {"momentum": torch.ones(2)}}, round=4)
    (folder,) = keeper.writer.run.checkpoints.glob("step-*")
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors", "common.safetensors"}
    assert [event["round"] for event in read_events(keeper.writer.run, "saved")] == [4]


MODEL = ("data.name=image_folder", "data.in_chans=1", "data.image_size=28", "train.global_batch_size=4",
         "train.max_steps=6", "model.dropout=0", "checkpoint.every_steps=2", "checkpoint.keep=9")  # fmt: skip


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """12 images to train on and 6 to validate; two of the former and one of the latter are broken."""
    root = tmp_path / "images"
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (30, 30), 40 + 100 * label + number).save(root / split / name / f"{number}.png")
    for name in ("train/cat/2", "train/dog/0", "val/dog/1"):
        (root / f"{name}.png").write_bytes(b"nothing")
    return root


def weights(folder: Path) -> bytes:
    step = format.resolve(folder / "checkpoints", "latest")
    return (format.path_of(folder / "checkpoints", step) / "model.safetensors").read_bytes()


def test_broken_images_are_skipped_alike_by_all_ranks_and_named_once(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=3")
    whole, broken = tmp_path / "whole", tmp_path / "run"
    assert run_ranks(2, train_run, broken, "ddp", settings, 4) == ["preempted"] * 2
    assert run_ranks(2, train_run, broken, "ddp", settings) == ["finished"] * 2
    events = read_events(RunDir(broken), "broken_image")
    assert sorted(str(event["file"]).split("images/")[1] for event in events) == [
        "train/cat/2.png", "train/dog/0.png", "val/dog/1.png",
    ]  # fmt: skip
    assert json.loads((broken / "summary.json").read_text())["broken_images"] == 3
    assert {record["samples"] for record in read_metrics(RunDir(broken), "val")} == {5}
    for name, next_whole in (("train/cat/2", "train/cat/3"), ("train/dog/0", "train/dog/1")):
        (images / f"{name}.png").write_bytes((images / f"{next_whole}.png").read_bytes())
    assert run_ranks(2, train_run, whole, "ddp", settings) == ["finished"] * 2
    assert weights(broken) == weights(whole)


def refused(env: RankEnv, folder: Path, settings: tuple[str, ...]) -> str:
    with pytest.raises(UserError) as caught:
        train_run(env, folder, "ddp", settings)
    return str(caught.value)


def test_one_more_than_may_be_ends_the_run_on_all_ranks_alike(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=2")
    one, other = run_ranks(2, refused, tmp_path / "run", settings)
    assert one == other
    assert one.startswith("3 images are broken, and data.max_broken=2.")

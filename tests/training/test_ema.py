"""The average of the weights: what it is, that it goes on exactly, and that it is measured beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.ema import Ema, decay_at
from trainkit.training.loop import train
from trainkit.training.recorder import Progress

FINITE, NONFINITE = torch.zeros(()), torch.ones(())


def test_the_first_updates_count_for_more() -> None:
    assert [decay_at(updates, 0.999) for updates in (0, 10, 10**6)] == [0.1, 11 / 20, 0.999]


def test_each_update_moves_the_average_towards_the_weights_if_it_was_finite() -> None:
    model = nn.Linear(3, 2)
    ema, expected = Ema(model, 0.5), model.weight.detach().clone()
    for updates in range(12):
        with torch.no_grad():
            model.weight += torch.randn(2, 3, generator=torch.Generator().manual_seed(updates))
        before = {name: value.clone() for name, value in ema.tensors().items()}
        ema.update(NONFINITE, updates=updates)
        assert all(torch.equal(value, before[name]) for name, value in ema.tensors().items())
        ema.update(FINITE, updates=updates)
        expected.lerp_(model.weight.detach(), 1 - min(0.5, (1 + updates) / (10 + updates)))
    assert torch.allclose(ema.tensors()["weight"], expected, rtol=1e-6)


def test_within_the_model_has_the_average_and_afterwards_its_own_weights() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, 0.9)
    nn.init.ones_(model.weight)
    ema.update(FINITE, updates=0)
    own, average = model.weight.detach().clone(), ema.tensors()["weight"].clone()

    def evaluated() -> None:
        with ema.in_model():
            assert torch.equal(model.weight, average)
            raise KeyError

    with pytest.raises(KeyError):
        evaluated()
    assert torch.equal(model.weight, own)
    assert torch.equal(ema.tensors()["weight"], average)


def test_statistics_are_averaged_and_what_is_counted_or_frozen_is_not() -> None:
    batchnorm, linear = nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False)
    ema = Ema(nn.Sequential(batchnorm, linear), 0.5)
    assert batchnorm.running_mean is not None
    assert batchnorm.num_batches_tracked is not None
    batchnorm.running_mean.fill_(1.0)
    batchnorm.num_batches_tracked.fill_(7)
    ema.update(FINITE, updates=100)
    tensors = ema.tensors()
    assert tensors["0.running_mean"].tolist() == [0.5, 0.5]
    assert tensors["0.num_batches_tracked"] == 7
    assert tensors["1.weight"].data_ptr() == linear.weight.data_ptr()


def test_a_weight_with_two_names_is_averaged_once() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    ema = Ema(nn.Sequential(one, other), 0.5)
    nn.init.zeros_(one.weight)
    before = ema.tensors()["0.weight"].clone()
    ema.update(FINITE, updates=100)
    assert torch.equal(ema.tensors()["0.weight"], before / 2)
    assert torch.equal(ema.tensors()["1.weight"], before / 2)


# The momentum of BatchNorm's statistics makes them another's where micro batches are.
SETTINGS = (
    "train.max_steps=22", "train.ema_decay=0.9", "model.norm=batch", "train.micro_batch_size=16", "model.dropout=0.2",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema") / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS)
    return folder


@pytest.mark.parametrize(
    ("preset", "world_size"), [("ddp", 2), pytest.param("ddp", 4, marks=pytest.mark.long), ("zero", 2), ("fsdp", 2)]
)
def test_the_average_is_the_same_on_any_number_of_ranks(
    tmp_path: Path, whole: Path, preset: str, world_size: int
) -> None:
    run_ranks(world_size, train_run, tmp_path / "run", preset, SETTINGS)
    expected, found = tensors(whole / "checkpoints", "ema"), tensors(tmp_path / "run/checkpoints", "ema")
    assert expected.keys() == found.keys() == tensors(whole / "checkpoints", "model").keys()
    for name, value in expected.items():
        if "running" not in name and "num_batches" not in name:  # rank 0 has seen other samples than a single process
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name
            assert not torch.equal(value, tensors(whole / "checkpoints", "model")[name]), name


@pytest.mark.parametrize(("preset", "world_size"), [("single", 1), pytest.param("fsdp", 2, marks=pytest.mark.long)])
def test_an_interrupted_run_ends_with_the_average_of_one_that_was_not(
    tmp_path: Path, whole: Path, preset: str, world_size: int
) -> None:
    if preset != "single":
        whole = tmp_path / "whole"
        run_ranks(world_size, train_run, whole, preset, SETTINGS)
    broken = tmp_path / "broken"
    # The second stop falls into the validation of the averaged weights after step 19.
    for stop_after in (7, 19):
        assert run_ranks(world_size, train_run, broken, preset, SETTINGS, stop_after) == ["preempted"] * world_size
    assert run_ranks(world_size, train_run, broken, preset, SETTINGS) == ["finished"] * world_size
    for stem in ("model", "ema"):
        expected, found = tensors(whole / "checkpoints", stem), tensors(broken / "checkpoints", stem)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [record["ema_loss"] for record in read_metrics(RunDir(broken), "val")] == [
        record["ema_loss"] for record in read_metrics(RunDir(whole), "val")
    ]


def test_both_weights_are_measured_and_told_apart(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    (first, *_), (test,) = read_metrics(RunDir(whole), "val"), read_metrics(RunDir(whole), "test")
    for record in (first, test, summary["val"], summary["test"]):
        assert record["loss"] != record["ema_loss"]
        assert {"acc1", "acc5", "ema_acc1", "ema_acc5", "samples"} <= record.keys()


@pytest.mark.long
def test_switched_on_later_it_begins_with_the_weights_and_says_so(tmp_path: Path) -> None:
    plain = ("train.max_steps=12", "checkpoint.every_steps=6")
    run_ranks(1, train_run, tmp_path / "run", "single", plain, 7)
    step = format.resolve(tmp_path / "run" / "checkpoints", "latest")
    run_ranks(1, train_run, tmp_path / "run", "single", (*plain, "train.ema_decay=0.9"))
    before, after = read_events(RunDir(tmp_path / "run"), "started")
    assert "ema_began" not in before
    assert (after["ema_began"], after["step"]) == (True, step)
    state = format.verified(tmp_path / "run" / "checkpoints", 12).state
    assert state["progress"]["ema_updates"] == 12 - step


def test_a_rollback_takes_the_average_back_as_well(tmp_path: Path) -> None:
    parts = parts_of("train.ema_decay=0.9")
    keeper = keeper_of(parts, tmp_path / "run", Progress())
    keeper.save()
    assert parts.ema is not None
    before = {name: value.clone() for name, value in parts.ema.tensors().items()}
    nn.init.zeros_(next(parts.model.parameters()))
    parts.ema.update(FINITE, updates=5)
    keeper.progress.ema_updates = 6
    assert keeper.roll_back(4)
    assert keeper.progress.ema_updates == 0
    assert all(torch.equal(value, before[name]) for name, value in parts.ema.tensors().items())


def test_the_best_model_can_be_that_whose_average_is(tmp_path: Path) -> None:
    judged: dict[str, Any] = {}
    for best in ("val/loss", "val/ema_loss"):
        # At a rate so high the weights jump about, and their average lags behind: each has its own best.
        parts = parts_of("train.ema_decay=0.99", "train.max_steps=12", "optim.lr=1.0", f"checkpoint.best={best}")
        keeper = keeper_of(parts, tmp_path / best.replace("/", "-"), Progress())
        assert train(parts, keeper, lambda: False)
        name = best.removeprefix("val/")
        records = [record for record in keeper.metrics.records if record["split"] == "val"]  # type: ignore[attr-defined]
        assert keeper.progress.best == judged.setdefault(best, min(record[name] for record in records))
    assert judged["val/loss"] != judged["val/ema_loss"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("checkpoint.best=val/ema_acc1",), r"no averaged weights[\s\S]*train\.ema_decay=0\.9999"),
        *(((f"train.ema_decay={value}",), r"train\.ema_decay") for value in ("0", "1", "-0.1", "1.5", "true")),
    ],
)
def test_a_decay_is_between_0_and_1_and_only_with_one_an_average_is_judged(
    settings: tuple[str, ...], told: str
) -> None:
    load("single", ("checkpoint.best=val/ema_acc1", "train.ema_decay=0.99"))
    with pytest.raises(UserError, match=told):
        load("single", settings)

"""One configuration is one optimisation, whatever it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir

UPDATES = 20
SETTINGS = (f"train.max_steps={UPDATES}", "data.augment=true", "train.global_batch_size=64")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(RunDir(folder), "train")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("parity") / "single"
    run_ranks(1, train_run, folder, "single", SETTINGS)
    trace = losses(folder)
    assert len(trace) == UPDATES
    assert trace[-1] < trace[0], "the reference must learn something"
    return trace


@pytest.mark.parametrize(
    ("preset", "world_size", "more"),
    [
        ("ddp", 1, ()),
        ("ddp", 2, ()),
        ("ddp", 4, ()),
        ("fsdp", 2, ()),
        ("fsdp", 4, ()),
        ("dp", 1, ()),
        ("single", 1, ("train.micro_batch_size=16",)),
        ("ddp", 2, ("train.micro_batch_size=8",)),
        ("fsdp", 2, ("train.micro_batch_size=16", "strategy.reshard_after_forward=false")),
        ("ddp", 2, ("data.workers=1",)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_loss_trace_does_not_depend_on_strategy_ranks_micro_batch_or_workers(
    tmp_path: Path, reference: list[float], preset: str, world_size: int, more: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    run_ranks(world_size, train_run, folder, preset, (*SETTINGS, *more))
    assert losses(folder) == pytest.approx(reference, rel=1e-5)


def test_another_seed_gives_another_trace(tmp_path: Path, reference: list[float]) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "single", (*SETTINGS, "seed=1"))
    assert losses(folder) != pytest.approx(reference, rel=1e-2)


# BatchNorm's statistics are those of a micro batch, so that only equal micro batches are the same optimisation.
BATCHNORM = (*SETTINGS, "model.norm=batch", "train.micro_batch_size=16")


@pytest.fixture(scope="module")
def batchnorm_reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("batchnorm") / "single"
    run_ranks(1, train_run, folder, "single", BATCHNORM)
    return losses(folder)


@pytest.mark.parametrize(("preset", "world_size"), [("ddp", 2), ("ddp", 4), ("fsdp", 2)])
def test_batchnorm_trains_alike_where_the_micro_batches_are_equal(
    tmp_path: Path, batchnorm_reference: list[float], preset: str, world_size: int
) -> None:
    folder = tmp_path / "run"
    run_ranks(world_size, train_run, folder, preset, BATCHNORM)
    assert losses(folder) == pytest.approx(batchnorm_reference, rel=1e-5)


# What dropout draws is keyed by the micro batch's place in the global batch, and not by the rank that has it.
DROPOUT = (*SETTINGS, "model.dropout=0.3", "train.micro_batch_size=16")


@pytest.fixture(scope="module")
def dropout_reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("dropout") / "single"
    run_ranks(1, train_run, folder, "single", DROPOUT)
    return losses(folder)


@pytest.mark.parametrize(("preset", "world_size"), [("ddp", 2), ("fsdp", 4)])
def test_dropout_drops_alike_on_any_number_of_ranks_where_the_micro_batches_are_equal(
    tmp_path: Path, dropout_reference: list[float], preset: str, world_size: int
) -> None:
    folder = tmp_path / "run"
    run_ranks(world_size, train_run, folder, preset, DROPOUT)
    assert losses(folder) == pytest.approx(dropout_reference, rel=1e-5)


def test_batchnorm_trains_otherwise_where_they_are_not(tmp_path: Path, batchnorm_reference: list[float]) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "single", (*BATCHNORM, "train.micro_batch_size=64"))
    assert losses(folder) != pytest.approx(batchnorm_reference, rel=1e-3)

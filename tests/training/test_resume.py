"""Interrupted and resumed equals uninterrupted, bit for bit on CPU."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from tests.training import poisoned
from tests.training.test_parity import AUGMENT, GROWING
from tests.training.test_precision import IMAGES_OF_8
from trainkit.checkpoint import format
from trainkit.checkpoint.format import FileFacts
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.data.order import global_batch
from trainkit.data.registry import build_data
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.train_state import TrainState

# 19 updates an epoch: two validations, and a model with dropout, whose random numbers must go on as well.
SETTINGS = ("train.max_steps=40", "schedule.name=cosine")
DROPOUT = ("model.dropout=0.2",)
# With dropout of its own, and BatchNorm.
BLOCKS = ("model.name=tests.training.hollow_models:stacked",)

HALVES = ("train.precision=bf16", "strategy.comm_hook=bf16")
HALF_SHARDS = ("train.precision=bf16", "strategy.reduce_dtype=bf16", "train.micro_batch_size=16")
POWERSGD = ("strategy.comm_hook=powersgd", "strategy.powersgd_start_step=5")
EMA = ("train.ema_decay=0.9", "model.norm=batch", "train.micro_batch_size=16")
O2 = (
    "train.precision=o2", "train.global_batch_size=8", "model.norm=batch", "train.micro_batch_size=2",
    "data.augment=true", *IMAGES_OF_8,
)  # fmt: skip
UNEVEN = ("train.micro_batch_size=16", "train.class_weights=balanced")
SKIPS = (*poisoned.SETTINGS, "train.precision=fp16", "data.positions='3'")

LONG, NIGHTLY = pytest.mark.long, pytest.mark.nightly


def final_weights(folder: Path) -> Mapping[str, FileFacts]:
    """Hashes of the files with the weights and the optimizer's state."""
    return format.verified(folder / "checkpoints", format.resolve(folder / "checkpoints", "latest")).files


@pytest.mark.parametrize(
    ("preset", "world_size", "more"),
    [
        ("single", 1, DROPOUT),
        pytest.param("ddp", 2, (*DROPOUT, *POWERSGD), marks=NIGHTLY),
        pytest.param("ddp", 2, DROPOUT, marks=NIGHTLY),
        pytest.param("fsdp", 2, (*DROPOUT, *AUGMENT), marks=NIGHTLY),
        pytest.param("ddp", 2, (*DROPOUT, *HALVES, *UNEVEN), marks=NIGHTLY),
        pytest.param("fsdp", 2, (*BLOCKS, "train.activation_checkpointing=full"), marks=LONG),
        pytest.param("hsdp", 4, BLOCKS, marks=LONG),  # two nodes of two
        pytest.param("single", 1, (*DROPOUT, *AUGMENT, "train.compile=model"), marks=LONG),
        pytest.param("ddp", 2, (*BLOCKS, "train.compile=blocks", "strategy.static_graph=true"), marks=LONG),
        pytest.param("fsdp", 2, (*DROPOUT, *HALF_SHARDS, "train.channels_last=true"), marks=LONG),
        pytest.param("ddp", 2, (*DROPOUT, "strategy.comm_hook=fp16", "train.deterministic=true"), marks=LONG),
        pytest.param("single", 1, (*DROPOUT, *EMA), marks=NIGHTLY),
        pytest.param("fsdp", 2, (*DROPOUT, *EMA), marks=LONG),
        pytest.param("ddp", 2, (*DROPOUT, *O2), marks=NIGHTLY),
        ("single", 1, (*DROPOUT, *SKIPS)),
        # Of 4 pixels up to update 19, of 6 up to 38, then of 8.
        pytest.param("ddp", 2, (*GROWING, "train.global_batch_size=64"), marks=NIGHTLY),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_a_run_interrupted_anywhere_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, preset: str, world_size: int, more: tuple[str, ...]
) -> None:
    whole, broken, settings = tmp_path / "whole", tmp_path / "broken", (*SETTINGS, *more)
    nodes = 2 if preset == "hsdp" else 1

    def train(folder: Path, stop_after: int | None = None) -> set[str]:
        return set(run_ranks(world_size, train_run, folder, preset, settings, stop_after, nodes=nodes))

    assert train(whole) == {"finished"}
    # The first stop falls into a training step, the second of most into the validation after step 38; where weights are
    # averaged, into that of the average after step 19.
    for stop_after in (7, 36 if "train.ema_decay=0.9" in more else 38):
        assert train(broken, stop_after) == {"preempted"}
    assert train(broken) == {"finished"}
    assert final_weights(broken) == final_weights(whole)
    for split, names in (("train", ("loss",)), ("val", ("step", "acc1", "ema_loss"))):
        first, second = (read_metrics(RunDir(folder), split) for folder in (broken, whole))
        assert [[r.get(name) for name in names] for r in first] == [[r.get(name) for name in names] for r in second]
    one, other = (format.verified(folder / "checkpoints", 40).state for folder in (broken, whole))
    assert one["precision"] == other["precision"], "loss scale, and updates that were skipped"
    assert one["progress"]["position"] == other["progress"]["position"]


@pytest.mark.nightly
def test_ddp_and_zero_go_on_from_each_others_checkpoints_to_the_last_bit(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ("train.max_steps=12", "checkpoint.every_epochs=null", "optim.name=lamb")
    run_ranks(3, train_run, whole, "ddp", (*settings, "train.global_batch_size=63"))
    for preset, stop_after in (("zero", 5), ("ddp", 5), ("zero", None)):
        run_ranks(3, train_run, broken, preset, (*settings, "train.global_batch_size=63"), stop_after)
    assert len(read_events(RunDir(broken), "started")) == 3
    for stem in ("model", "optimizer"):
        before, after = (tensors(run / "checkpoints", stem) for run in (whole, broken))
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.nightly
def test_what_powersgd_has_not_sent_is_given_up_on_other_ranks_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for world_size, stop_after in ((2, 9), (1, None)):
        run_ranks(world_size, train_run, folder, "ddp", ("train.max_steps=14", *POWERSGD), stop_after)
    assert read_events(RunDir(folder), "started")[1]["resized"].endswith("; what PowerSGD had not sent yet is given up")
    (kept,) = (name for name in tensors(folder / "checkpoints", "strategy") if name.startswith("kept"))
    assert kept == "kept.0-of-1.0"
    assert read_metrics(RunDir(folder), "train")[-1]["step"] == 14


@pytest.mark.nightly
def test_a_checkpoint_is_written_when_minutes_have_passed_by_rank_0s_clock(tmp_path: Path) -> None:
    settings = (
        "train.max_steps=8", "checkpoint.every_epochs=null", "train.eval_every_epochs=9",
        "checkpoint.asynchronous=false",  # else some fall due while one is written
    )  # fmt: skip
    often, never = tmp_path / "often", tmp_path / "never"
    assert run_ranks(2, train_run, often, "ddp", (*settings, "checkpoint.every_minutes=1e-6")) == ["finished"] * 2
    assert run_ranks(2, train_run, never, "ddp", (*settings, "checkpoint.every_minutes=null")) == ["finished"] * 2
    # An update later than the minutes are over: the ranks agree without waiting for one another.
    assert [event["step"] for event in read_events(RunDir(often), "saved")] == [2, 4, 6, 8]
    assert [event["step"] for event in read_events(RunDir(never), "saved")] == [8]
    assert final_weights(often) == final_weights(never)


def test_the_first_train_record_after_a_restart_is_of_its_whole_window(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("train.max_steps=10", "monitor.log_every=10")
    run_ranks(1, train_run, folder, "single", settings, 7)
    assert read_events(RunDir(folder), "handed_back")[0]["signals"] == ["SIGUSR2"], "it asks to be started again"
    assert run_ranks(1, train_run, folder, "single", settings) == ["finished"]
    assert [event["step"] for event in read_events(RunDir(folder), "started")] != [0, 0]
    (record,) = read_metrics(RunDir(folder), "train")
    assert record["samples"] == 10 * 64


# A run that is continued on another number of ranks: what stays as it was, and what is said where it does not.

BATCH, UPDATES = 48, 24
RESIZED = (
    *(f"train.global_batch_size={BATCH}", f"train.max_steps={UPDATES}", "train.eval_every_epochs=9"),
    "checkpoint.every_epochs=null",
)
RANKS = (1, 2, 4, 3)
MICRO = 4


def who(env: RankEnv, folder: Path, overrides: tuple[str, ...], stop_after: int | None) -> tuple[str, int]:
    """How it ended, and the process that was this rank."""
    return train_run(env, folder, "ddp", overrides, stop_after), os.getpid()


def equal_micro_batches(folder: Path) -> tuple[str, ...]:
    """Settings, with dropout, augmentation, and notes in ``folder`` of who has taken which samples."""
    data = ("data.name=tests.training.witnessed:build", f"data.folder={folder}")
    return *data, f"train.micro_batch_size={MICRO}", "model.dropout=0.3"


@dataclass(frozen=True)
class Resized:
    """A training on one rank, two, four and three, one after the other."""

    run: RunDir
    taken: list[list[list[int]]]
    """By attempt and rank, the samples in the order in which it took them."""


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    folder, taken = tmp_path_factory.mktemp("resized"), []
    for number, world_size in enumerate(RANKS):
        stop = 5 if number + 1 < len(RANKS) else None
        settings = (*RESIZED, *equal_micro_batches(folder))
        ended = run_ranks(world_size, who, folder / "run", settings, stop)
        assert {how for how, _ in ended} == {"preempted" if stop else "finished"}
        samples = [list(map(int, (folder / str(process)).read_text().split())) for _, process in ended]
        samples[0] = samples[0][1:]  # rank 0 looks at one before it trains
        taken.append(samples)
    return Resized(RunDir(folder / "run"), taken)


@pytest.mark.nightly
def test_the_data_come_in_the_same_order_on_one_rank_two_four_and_three(resized: Resized) -> None:
    order: list[int] = []
    for ranks in resized.taken:
        for start in range(0, len(ranks[0]), MICRO):
            order += [sample for samples in ranks for sample in samples[start : start + MICRO]]
    size = len(build_data(load("ddp").config.data).train)
    assert order == [sample for step in range(UPDATES) for sample in global_batch(range(size), 0, step, BATCH)]


@pytest.mark.long
def test_with_equal_micro_batches_the_losses_are_those_of_one_rank(resized: Resized, tmp_path: Path) -> None:
    # The same data set: one whose samples are read one by one draws other shifts than one that is cut out in batches.
    run_ranks(1, train_run, tmp_path / "run", "single", (*RESIZED, *equal_micro_batches(tmp_path)))
    expected = [record["loss"] for record in read_metrics(RunDir(tmp_path / "run"), "train")]
    assert [record["loss"] for record in read_metrics(resized.run, "train")] == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
def test_each_start_on_another_number_of_ranks_says_what_stays_as_it_was(resized: Resized) -> None:
    told = [event.get("resized") for event in read_events(resized.run, "started")]
    assert told[0] is None
    same = "with the same data in the same order and micro batch; sums may differ in their last bits"
    assert told[3] == f"ranks: 3 where 4 saved, {same}"


@pytest.mark.nightly
def test_where_the_micro_batches_become_others_it_says_what_does_not_stay() -> None:
    alone: Any = SimpleNamespace(config=load("ddp").config, dist=SimpleNamespace(world_size=1), micro_batch_size=BATCH)
    assert TrainState.differs_from(alone, {"world_size": 1, "micro_batch_size": BATCH}) == ""
    assert TrainState.differs_from(alone, {"world_size": 2, "micro_batch_size": 24}) == (
        "ranks: 1 where 2 saved, with the same data in the same order; micro batches are of 48 instead of "
        "24, by which dropout and BatchNorm go: these differ"
    )

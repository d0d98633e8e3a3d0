"""`train.micro_batch_size=auto`: the largest micro batch that fits, and nothing else is different."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.rank_functions import run_ranks
from tests.training.hungry import BATCH, train_and_tell
from tests.training.parts import Linear, parts_of
from trainkit.diagnosis.causes import rows
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.batch_size import _activations, _sample, _with, largest, memory_told, probe
from trainkit.training.update import Updater

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    ("sizes", "peak", "budget", "found"),
    [
        (SIZES, lambda size: 100 + 3 * size, 1000, 256),
        (SIZES, lambda size: 100 + 3 * size, 103, 1),
        (SIZES, lambda size: 100 + 3 * size, 102, 0),
        ([1, 97], lambda size: 100 + 3 * size, 391, 97),
        ([1, 97], lambda size: 100 + 3 * size, 390, 1),
        (SIZES, lambda size: 100 + 3 * size + size**2 / 50, 1000, 128),
        (SIZES, lambda size: 100 + 50 * math.ceil(size / 100), 300, 256),
        (SIZES, lambda size: 100 + size if size < 20 else math.inf, 10**6, 16),
    ],
)
def test_the_largest_size_within_the_budget_is_found(
    sizes: list[int], peak: Callable[[int], float], budget: float, found: int
) -> None:
    assert largest(sizes, peak, budget, held=100) == found


def test_memory_that_grows_evenly_is_never_tried_beyond_the_budget() -> None:
    for budget in range(105, 4000, 37):
        tried: list[int] = []

        def peak(size: int, tried: list[int] = tried) -> float:
            tried.append(size)
            return 100 + 3 * size

        found = largest(SIZES, peak, budget, held=100)
        assert all(100 + 3 * size <= budget for size in tried)
        assert found == max(size for size in SIZES if 100 + 3 * size <= budget)


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def weights(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / "checkpoints/latest").glob("*.safetensors")))


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(RunDir(folder), "train")]


def limit_for(tmp_path: Path, world_size: int, preset: str, size: int) -> str:
    """A limit in which micro batches of ``size`` fit, and twice as large ones do not."""
    run_ranks(world_size, train_and_tell, tmp_path / "small", preset, ("train.micro_batch_size=2",))
    run_ranks(world_size, train_and_tell, tmp_path / "given", preset, (f"train.micro_batch_size={size}",))
    small, enough = (summary(tmp_path / name)["max_memory_mb"] for name in ("small", "given"))
    assert enough > small + 50
    return f"train.memory_limit_mb={(enough + 0.5 * (enough - small)) / 0.9:.0f}"


@pytest.mark.long
@pytest.mark.parametrize(("preset", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_auto_trains_the_very_run_of_the_size_that_it_finds(tmp_path: Path, preset: str, world_size: int) -> None:
    settings = (limit_for(tmp_path, world_size, preset, 4), "train.micro_batch_size=auto")
    told = run_ranks(world_size, train_and_tell, tmp_path / "auto", preset, settings)
    assert told == ["finished"] * world_size
    (probed,) = read_events(RunDir(tmp_path / "auto"), "probed")
    (started,) = read_events(RunDir(tmp_path / "auto"), "started")
    passes = BATCH // 4 // world_size
    assert (probed["micro_batch_size"], started["micro_batch_size"], started["grad_accum_steps"]) == (4, 4, passes)
    assert probed["peak_mb"] <= 0.9 * probed["room_mb"]
    assert summary(tmp_path / "auto")["micro_batch_size"] == 4
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")
    assert weights(tmp_path / "auto") == weights(tmp_path / "given")


TINY = ("model.name=tests.training.poisoned:model", "model.dropout=0.3", "train.max_steps=4")
AUTO = (*TINY, "train.micro_batch_size=auto")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "world_size", "more"),
    [
        ("ddp", 2, ("strategy.comm_hook=powersgd", "strategy.powersgd_start_step=2")),
        ("fsdp", 2, ("augment.mixup_alpha=0.8",)),  # of pairs: only even sizes can be tried
    ],
)
def test_nothing_of_a_run_shows_that_sizes_were_tried_before_it(
    tmp_path: Path, preset: str, world_size: int, more: tuple[str, ...]
) -> None:
    for name, settings in (("auto", AUTO), ("whole", TINY)):
        told = run_ranks(world_size, train_and_tell, tmp_path / name, preset, (*settings, *more))
        assert told == ["finished"] * world_size
    assert read_events(RunDir(tmp_path / "auto"), "probed")[0]["micro_batch_size"] == BATCH // world_size
    assert losses(tmp_path / "auto") == losses(tmp_path / "whole")
    assert weights(tmp_path / "auto") == weights(tmp_path / "whole")
    assert "micro_batch_size: auto" in (tmp_path / "auto/config.yaml").read_text()


def test_sizes_are_tried_with_the_largest_images_of_a_run() -> None:
    model, seen = nn.Sequential(nn.AdaptiveAvgPool2d(4), Linear()), set[int]()
    parts = parts_of(
        "data.image_size=8", "augment.min_size=4", "augment.ramp_epochs=[1,2]", "train.micro_batch_size=4", model=model
    )
    parts.model.register_forward_hook(lambda _, args, __: seen.add(args[0].shape[-1]))
    assert probe(parts, [1, 2, 4]).micro_batch_size == 4
    assert seen == {8}


def test_a_run_that_goes_on_takes_what_it_found_unless_ranks_are_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("model.name=tests.training.hungry:failing", "train.max_steps=6", "train.micro_batch_size=auto")
    assert run_ranks(1, train_and_tell, folder, "ddp", settings, 2) == ["preempted"]
    assert run_ranks(1, train_and_tell, folder, "ddp", settings, 2) == ["preempted"]
    assert run_ranks(2, train_and_tell, folder, "ddp", settings) == ["finished"] * 2
    found = [(event["world_size"], event["micro_batch_size"]) for event in read_events(RunDir(folder), "probed")]
    assert found == [(1, 2), (2, 2)], "rank 1 had no memory for more, and the others did not wait for it"
    started = [(event["world_size"], event["micro_batch_size"]) for event in read_events(RunDir(folder), "started")]
    assert started == [(1, 2), (1, 2), (2, 2)]


def test_where_nothing_fits_the_run_says_so(tmp_path: Path) -> None:
    told = run_ranks(2, train_and_tell, tmp_path / "run", "fsdp", (*AUTO, "train.memory_limit_mb=1"))
    assert told[0] == told[1]
    assert told[0].startswith("1: Not even a micro batch of 1 fits into memory.\n  why: An update takes ")
    assert told[0].splitlines()[2].startswith("  fix: Use strategy.name=fsdp")


def test_a_rank_that_runs_out_of_memory_says_what_to_change_and_why_names_it(tmp_path: Path) -> None:
    settings = ("model.name=tests.training.hungry:failing", "train.micro_batch_size=8")
    (told,) = run_ranks(1, train_and_tell, tmp_path / "run", "single", settings)
    what, why, fix = told.splitlines()
    assert what.startswith("1: Rank 0 on ")
    assert what.endswith("ran out of memory with micro batches of 8.")
    assert why == "  why: CUDA out of memory. Tried to allocate 20.00 MiB."
    assert fix == (
        "  fix: Use train.micro_batch_size=4 (the result stays the same) or auto, or strategy.name=fsdp, or "
        "train.activation_checkpointing=full (for models of blocks), or more memory for the job (--mem)."
    )
    (failed,) = read_events(RunDir(tmp_path / "run"), "failed")
    assert any(row.find(failed["error"]) for row in rows() if row.name == "gpu-out-of-memory")


class Two(nn.Module):
    """Two layers, whose activations can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 1000), nn.ReLU(), nn.Linear(1000, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def test_what_a_rank_holds_is_told_to_the_byte() -> None:
    parts = parts_of("optim.name=adamw", "train.ema_decay=0.9", "train.precision=fp32", model=Two())
    weights = 4 * (48 * 1000 + 1000 + 1000 * 10 + 10)
    each = 4 * (48 + 1000 + 10)  # what the layers and the loss are given; ReLU keeps what the next layer keeps
    assert _activations(parts, _sample(parts), 6) - _activations(parts, _sample(parts), 4) == pytest.approx(
        2 * each, 0.01
    )
    with parts.batches(0, 1) as batches:
        Updater(parts)(batches, lr=0.01, seed=0)
    told = memory_told(parts)
    mb = f"{weights / 2**20:,.1f} MiB"
    state = f"{2 * weights / 2**20:,.1f} MiB"
    assert f"weights {mb}, gradients {mb}, state of adamw {state}, averaged weights {mb}, activations" in told
    again = _with(parts.config, activation_checkpointing="full")
    assert memory_told(replace(parts, config=again)).endswith("; activations are computed again.")

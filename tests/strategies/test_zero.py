"""ZeRO-1: the updates of ddp, with a part of the optimizer's state on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rank_functions import run_ranks
from tests.strategies.held import bytes_held, trained
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import moments_of
from trainkit.distributed.process_group import distributed
from trainkit.ranks import RankEnv
from trainkit.strategies.zero import balanced


def _held(env: RankEnv, strategy: str) -> tuple[int, int]:
    """Bytes of parameters and optimizer state, and how many parameters this rank has state of."""
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = trained(dist, strategy)
        optimizer.zero_grad()
        return bytes_held(model, optimizer), len(optimizer.state)


def test_each_rank_keeps_its_part_of_the_optimizers_state() -> None:
    ((whole, number),) = run_ranks(1, _held, "ddp")
    model = whole / 3  # AdamW has two numbers per weight
    held = run_ranks(4, _held, "zero")
    assert sum(own for _, own in held) == number
    assert [size for size, _ in held] == pytest.approx([model + model * 2 / 4] * 4, rel=0.02)


def _weights(env: RankEnv, optimizers: list[str]) -> list[str]:
    """Weights that are not the very same with zero and with ddp after three updates."""
    wrong = []
    with distributed(env, use_gpu=False) as dist:
        for optimizer in optimizers:
            models = [trained(dist, strategy, optimizer_name=optimizer, updates=3)[0] for strategy in ("ddp", "zero")]
            one, other = (model.state_dict() for model in models)
            wrong += [f"{optimizer} {name}" for name, value in one.items() if not torch.equal(value, other[name])]
    return wrong


def test_its_updates_are_those_of_ddp_to_the_last_bit() -> None:
    ours = ["adamw", "sgd", "lamb", "muon"]
    assert run_ranks(3, _weights, [*ours, "adan", "adafactor", "adamp", "cadamw", "lambc", "lion", "mars"]) == [[]] * 3


def _restored(env: RankEnv, folder: Path) -> tuple[int, list[str]]:
    """How many parameters this rank has state of once it has restored it, and whose is not as it was."""
    with distributed(env, use_gpu=False) as dist:
        (model, optimizer), (other, resumed) = (trained(dist, "zero", updates=count) for count in (2, 1))
        checkpoints = Checkpoints(folder, keep=3, dist=dist)
        checkpoints.save(model, optimizer, step=1, state={}, best_step=None)
        checkpoints.restore(other, resumed)
        there, here = moments_of(model, optimizer), moments_of(other, resumed)
        wrong = [name for name, value in there.items() if name not in here or not torch.equal(value, here[name])]
        return len(resumed.state), wrong


def test_a_rank_restores_its_part_only(tmp_path: Path) -> None:
    ((_, number),) = run_ranks(1, _held, "ddp")
    restored = run_ranks(3, _restored, tmp_path)
    assert sum(own for own, _ in restored) == number
    assert [wrong for _, wrong in restored] == [[]] * 3


def test_parts_differ_by_no_more_than_the_largest_parameter() -> None:
    sizes = [7, 1, 100, 40, 30, 30, 5, 60]
    parts = balanced([torch.empty(size) for size in sizes], 3)
    assert sorted(item.numel() for part in parts for item in part) == sorted(sizes)
    held = [sum(item.numel() for item in part) for part in parts]
    assert max(held) - min(held) <= 100
    assert max(held) == 100, "the largest alone"

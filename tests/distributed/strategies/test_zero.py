"""ZeRO-1: the updates of ddp, with a part of the optimizer's state on each rank."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.distributed.strategies.held import bytes_held, trained
from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import moments_of
from trainkit.cluster.ranks import RankEnv
from trainkit.distributed.process_group import distributed

OPTIMIZERS = ("adamw", "sgd", "lamb", "muon", "adafactor", "cadamw", "lambc", "mars")


class Found(NamedTuple):
    """On one rank."""

    held: int
    """Bytes of parameters and optimizer state."""
    states: int
    """Parameters that it has state of,"""
    restored: int
    """and has it of once it has restored it."""
    wrong: list[str]
    """Names of what is not as it was saved, and of weights that are not the same with ddp after three updates."""


def _found(env: RankEnv, folder: Path, strategy: str) -> Found:
    with distributed(env, use_gpu=False) as dist:
        (model, optimizer), (other, resumed) = (trained(dist, strategy, updates=count) for count in (2, 1))
        checkpoints = Checkpoints(folder, keep=3, dist=dist)
        checkpoints.save(model, optimizer, step=1, state={})
        checkpoints.restore(other, resumed)
        there, here = moments_of(model, optimizer), moments_of(other, resumed)
        wrong = [name for name, value in there.items() if name not in here or not torch.equal(value, here[name])]
        for name in OPTIMIZERS if strategy == "zero" else ():
            models = (trained(dist, each, optimizer_name=name, updates=3)[0] for each in ("ddp", "zero"))
            one, two = (each.state_dict() for each in models)
            wrong += [f"{name} {key}" for key, value in one.items() if not torch.equal(value, two[key])]
        optimizer.zero_grad()
        return Found(bytes_held(model, optimizer), len(optimizer.state), len(resumed.state), wrong)


@pytest.mark.nightly
def test_each_rank_keeps_its_part_and_all_make_the_updates_of_ddp(tmp_path: Path) -> None:
    """To the last bit; and it restores its part only."""
    alone = _found(RankEnv.single(), tmp_path / "alone", "ddp")
    ranks = run_ranks(3, _found, tmp_path / "ranks", "zero")
    model = alone.held / 3  # AdamW has two numbers per weight
    assert [rank.wrong for rank in ranks] == [[]] * 3
    assert sum(rank.states for rank in ranks) == sum(rank.restored for rank in ranks) == alone.states
    assert [rank.held for rank in ranks] == pytest.approx([model + model * 2 / 3] * 3, rel=0.02)

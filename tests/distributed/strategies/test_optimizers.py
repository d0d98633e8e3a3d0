"""Optimizers of timm and torch with strategies of several ranks: their updates, and what is saved of them."""

from pathlib import Path

import pytest
import torch

from tests.distributed.strategies.held import trained
from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.distributed.process_group import distributed, local_part

ANYWHERE = ["adabelief", "adagrad", "adam", "adan", "adopt", "lambc", "laprop", "lars", "lion", "madgrad", "nadamw"]
ANYWHERE += ["momentum", "radam", "rmsprop", "rmsproptf", "sgdw", "torch/asgd"]
OWN = "tests.distributed.strategies.held:Drag"
"""An optimizer of the user's own, with a count and a number of each group."""
FEW = ["adagrad", "lambc", "lion", "torch/asgd", OWN]
WHOLE = ["adafactor", "adafactorbv", "adamp", "adamuon", "cadamw", "mars", "novograd", "torch/adafactor"]


def _wrong(env: RankEnv, folder: Path, strategy: str, names: list[str]) -> list[str]:
    """Optimizers of which the third update is another one after the second was saved and restored; and, of those of
    shards, which update these otherwise than whole weights."""
    wrong = []
    with distributed(env, use_gpu=False) as dist:
        for name in names:
            made = (trained(dist, strategy, optimizer_name=name, updates=count) for count in (2, 1))
            (model, optimizer), (other, resumed) = made
            if strategy == "fsdp":
                whole, _ = trained(dist, "ddp", optimizer_name=name, updates=2)
                sharded = {key: value.full_tensor() for key, value in model.state_dict().items()}
                own = {key.removeprefix("module."): value for key, value in whole.state_dict().items()}
                if not all(torch.allclose(value, sharded[key], rtol=1e-3, atol=1e-4) for key, value in own.items()):
                    wrong.append(f"{name} is not as ddp")
            checkpoints = Checkpoints(folder / name.replace("/", "-"), keep=3, dist=dist)
            checkpoints.save(model, optimizer, step=2, state={})
            checkpoints.restore(other, resumed)
            for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
                its.grad = None if parameter.grad is None else parameter.grad.clone()
            optimizer.step()
            resumed.step()
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            if not all(torch.equal(local_part(one), local_part(two)) for one, two in pairs):
                wrong.append(name)
    return wrong


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("zero", ["adafactor", "adamuon", "mars", "torch/adafactor", OWN]),
        ("fsdp", FEW),
        pytest.param("zero", [*WHOLE, *ANYWHERE[:3]], marks=pytest.mark.long),
        pytest.param("fsdp", ANYWHERE, marks=pytest.mark.long),
    ],
    ids=["zero", "fsdp", "zero, all", "fsdp, all"],
)
def test_a_run_goes_on_with_the_very_next_update(tmp_path: Path, strategy: str, names: list[str]) -> None:
    assert run_ranks(2, _wrong, tmp_path, strategy, names) == [[]] * 2

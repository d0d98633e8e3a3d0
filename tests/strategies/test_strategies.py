from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.rank_functions import rank_env
from trainkit import plugins
from trainkit.config.schema import StrategyConfig
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.strategies import build_strategy


def two_ranks() -> Distributed:
    return Distributed(rank_env(0, 2, 29500), torch.device("cpu"))


@pytest.mark.parametrize("name", ["single", "dp"])
def test_a_one_process_strategy_refuses_two_ranks(name: str) -> None:
    with pytest.raises(UserError, match="runs in one process, but 2 ranks"):
        build_strategy(StrategyConfig(name=name), two_ranks())


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_sync_batchnorm_on_cpu_is_refused(name: str) -> None:
    strategy = plugins.load("trainkit.strategies", name)(two_ranks(), sync_batchnorm=True)
    with pytest.raises(UserError, match="needs GPUs"):
        strategy.parallelize(nn.Sequential(nn.BatchNorm2d(3)))


@pytest.mark.parametrize(
    ("hook", "dtype"), [("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_gradients_travel_as_the_hook_says(hook: str, dtype: torch.dtype) -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        plain, images = nn.Linear(5, 3), torch.randn(4, 5)
        plain(images).square().sum().backward()
        assert plain.weight.grad is not None
        expected, plain.weight.grad = plain.weight.grad, None
        model = plugins.load("trainkit.strategies", "ddp")(dist, comm_hook=hook).parallelize(plain)
        model(images).square().sum().backward()
    assert plain.weight.grad is not None
    assert torch.equal(plain.weight.grad, expected.to(dtype).float())

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rank_functions import rank_env
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.config.loading import load
from trainkit.config.schema import StrategyConfig
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.distributed.strategies.base import build_strategy

TWO_RANKS = Distributed(rank_env(0, 2, 29500), torch.device("cpu"))


def test_what_cannot_be_with_two_ranks_or_on_cpus_is_refused() -> None:
    for name in ("single", "dp"):
        with pytest.raises(UserError, match="runs in one process, but 2 ranks"):
            build_strategy(StrategyConfig(name=name), TWO_RANKS)
    for name in ("ddp", "fsdp"):
        strategy = plugins.load("trainkit.distributed.strategies", name)(TWO_RANKS, sync_batchnorm=True)
        with pytest.raises(UserError, match="sync_batchnorm=true is not possible"):
            strategy.parallelize(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(UserError, match="cpu_offload=true is not possible"):
        plugins.load("trainkit.distributed.strategies", "fsdp")(TWO_RANKS, cpu_offload=True)


@pytest.mark.parametrize(
    ("hook", "dtype"), [("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_gradients_travel_as_the_hook_says(hook: str, dtype: torch.dtype) -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        plain, images = nn.Linear(5, 3), torch.randn(4, 5)
        plain(images).square().sum().backward()
        assert plain.weight.grad is not None
        expected, plain.weight.grad = plain.weight.grad, None
        model = plugins.load("trainkit.distributed.strategies", "ddp")(dist, comm_hook=hook).parallelize(plain)
        model(images).square().sum().backward()
    assert plain.weight.grad is not None
    assert torch.equal(plain.weight.grad, expected.to(dtype).float())


def test_who_returns_no_strategy_is_told_what_one_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_strategy.py").write_text("def make(dist):\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = load("single", ["strategy.name=odd_strategy:make"]).config.strategy
    with pytest.raises(UserError, match="It returned int, which has no parallelize and no grad_sync"):
        build_strategy(chosen, Distributed(RankEnv.single(), torch.device("cpu")))

"""Parameters that are not one matrix in one place: shared, without dimensions, without elements, frozen, tied."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.distributed.strategies.base import SharesOptimizer, TakesHollow
from trainkit.distributed.strategies.fsdp import sharded_together
from trainkit.training.optim import build_optimizer
from trainkit.training.placement import spread
from trainkit.training.precision import Precision

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.outer(torch.relu(self.inner(x)))
        return x + moved


class Odd(Block):
    """With a scale that is one number, as in timm's NFNets, and a prompt without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.prompt = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = super().forward(torch.cat([self.prompt, self.gain * x]))
        return moved


class Net(nn.Module):
    """Reads rows of `WIDTH` numbers."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def shared() -> nn.Module:
    """Two blocks share a matrix; the one between them has its own."""
    net = Net()
    first, _, last = net.blocks
    last.inner.weight = first.inner.weight  # type: ignore[union-attr]
    return net


def one_layer() -> nn.Module:
    """All blocks have the same layer, as a module."""
    net = Net()
    first, second, third = net.blocks
    second.outer = third.outer = first.outer
    return net


def tied() -> nn.Module:
    """The head is the stem turned round, as embeddings are in language models."""
    net = Net()
    net.head.weight = net.stem.weight
    return net


def tied_to_a_block() -> nn.Module:
    net = Net()
    net.head.weight = net.blocks[1].outer.weight  # type: ignore[union-attr, assignment]
    return net


def odd() -> nn.Module:
    """All at once; a block, a matrix and a scale are not trained, and one number outside of all blocks is not used."""
    net = Net(Odd)
    first, second, third = net.blocks
    third.inner.weight = first.inner.weight  # type: ignore[union-attr]
    third.gain = first.gain
    net.head.weight = net.stem.weight
    second.outer.weight.requires_grad_(False)  # type: ignore[union-attr]
    second.gain.requires_grad_(False)
    net.unused = nn.Parameter(torch.tensor(3.0))
    return net


def _trained(dist: Distributed, name: str, make: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    """Weights after some updates, of which the last comes after a restart."""
    torch.manual_seed(0)
    plain = make()
    folder.mkdir(parents=True, exist_ok=True)
    unused = {"find_unused_parameters": make is odd} if name in ("ddp", "zero") else {}
    small = {"min_block_params": 100} if name == "fsdp" else {}

    def started() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        strategy = plugins.load("trainkit.distributed.strategies", name)(dist, **unused, **small)
        model = spread_over(strategy, deepcopy(plain), dist)
        optimizer = build_optimizer(model, OptimConfig(name="adamw"))
        if isinstance(strategy, SharesOptimizer):
            strategy.share(optimizer)
        return strategy, model, optimizer

    checkpoints, precision = Checkpoints(folder, keep=3, dist=dist), Precision("fp32", dist)
    strategy, model, optimizer = started()
    for step in range(4):
        if step == 3:
            checkpoints.save(model, optimizer, step=step, state={})
            strategy, model, optimizer = started()
            assert checkpoints.restore(model, optimizer) is not None
        torch.manual_seed(step)
        samples = torch.randn(8, WIDTH)
        own = samples.chunk(2 * dist.world_size)
        for half, is_last in enumerate((False, True)):
            with strategy.grad_sync(model, enabled=is_last):
                loss = model(own[2 * dist.rank + half]).square().mean() / 2
                precision.backward(loss)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        precision.step(optimizer, parameters, 0.5)
    checkpoints.save(model, optimizer, step=4, state={})
    return tensors(folder)


def spread_over(strategy: Any, plain: nn.Module, dist: Distributed) -> nn.Module:
    """Parallelize a model in the way of `trainkit.training.train_state.build`."""
    if isinstance(strategy, TakesHollow):
        return spread(plain, strategy, load("fsdp").config, dist)
    model: nn.Module = strategy.parallelize(plain)
    return model


def _found(env: RankEnv, folder: Path, strategies: tuple[str, ...]) -> list[str]:
    """Weights that are not those of one process. AdamW makes more of the last bits of a gradient."""
    wrong = []
    with distributed(env, use_gpu=False) as dist:
        for name in strategies:
            for make in (odd, one_layer, tied_to_a_block):
                weights = _trained(dist, name, make, folder / name / make.__name__)
                alone = tensors(folder / "single" / make.__name__) if name != "single" else weights
                assert weights.keys() == alone.keys()
                far = {key: float((weights[key] - alone[key]).abs().max()) for key in weights if alone[key].numel()}
                shapes = [key for key in weights if weights[key].shape != alone[key].shape]
                wrong += [f"{name} {make.__name__} {key} {gap}" for key, gap in far.items() if gap > 5e-5] + shapes
    return wrong


@pytest.mark.nightly
def test_every_strategy_trains_odd_models_as_one_process_does(tmp_path: Path) -> None:
    """With accumulation, clipping and a restart between; and their checkpoints hold the same tensors."""
    assert _found(RankEnv.single(), tmp_path, ("single",)) == []
    assert run_ranks(2, _found, tmp_path, ("fsdp", "ddp", "zero")) == [[], []]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Net, [[0], [1], [2]]),
        (shared, [[1], [0, 2]]),
        (one_layer, [[0, 1, 2]]),
        (tied, [[0], [1], [2]]),
        (tied_to_a_block, [[0], [2]]),
        (odd, [[1], [0, 2]]),
    ],
)
def test_blocks_that_share_a_parameter_are_sharded_together(
    make: Callable[[], nn.Module], expected: list[list[int]]
) -> None:
    net = make()
    blocks = list(net.blocks)  # type: ignore[arg-type]
    found = sharded_together(net, [*blocks, blocks[0]])  # which a second row may hold as well
    assert [[blocks.index(block) for block in together] for together in found] == expected


@pytest.mark.parametrize("name", ["gain", "prompt"])
def test_powersgd_refuses_what_it_cannot_take_for_a_matrix(name: str) -> None:
    block = Odd()
    for other in {"gain", "prompt"} - {name}:
        delattr(block, other)
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        strategy = plugins.load("trainkit.distributed.strategies", "ddp")(dist, comm_hook="powersgd")
        with pytest.raises(UserError, match="powersgd does not go with this model") as refused:
            strategy.parallelize(block)
    assert refused.value.why.startswith(f"{name} has no ")

"""A process, or two, killed at any moment while checkpoints are written behind training: none is ever torn."""

import random
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.reading import tensors
from tests.fork_server import server
from tests.rank_functions import rank_env
from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.hosts import free_port
from trainkit.distributed.process_group import distributed

SIZE = 400_000


def _save_for_ever(env: RankEnv, folder: Path) -> None:
    """Save step after step of a model whose weights are the step, while they already change for the next one."""
    torch.set_num_threads(1)
    with distributed(env, use_gpu=False) as dist:
        model: nn.Module = nn.Linear(SIZE // 100, 100, bias=False)
        if dist.world_size > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size,)))
        checkpoints = Checkpoints(folder, keep=2, dist=dist, asynchronous=True)
        (weight,) = model.parameters()
        found = checkpoints.restore(model, None)
        for step in range(found.step + 1 if found else 1, 10**6):
            with torch.no_grad():
                weight.fill_(float(step))
            checkpoints.best = step - step % 3
            checkpoints.save(model, None, step=step, state={})
            for _ in range(3):
                with torch.no_grad():
                    weight.add_(0.125)
                votes = torch.tensor([-checkpoints.over()])
                if dist.world_size > 1:
                    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
                checkpoints.go_on(-int(votes))


def killed(folder: Path, world_size: int, seconds: float) -> None:
    """Let ranks save for ``seconds`` from their first new checkpoint on, and kill them."""
    before, port = format.pointed(folder, "latest"), free_port()
    ranks = [server().start(_save_for_ever, rank_env(rank, world_size, port), folder) for rank in range(world_size)]
    try:
        deadline = time.monotonic() + 60
        while format.pointed(folder, "latest") == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(seconds)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()


def none_is_torn(folder: Path) -> int:
    """All that counts as a checkpoint is whole, and of one moment; the newest."""
    for step in format.steps(folder):
        format.verified(folder, step)
        (weights,) = tensors(folder, which=str(step)).values()
        assert torch.equal(weights, torch.full_like(weights, float(step)))
    latest = format.pointed(folder, "latest")
    assert latest is not None
    assert latest in format.steps(folder), "what `latest` names is gone"
    assert latest >= format.steps(folder)[-1] - 1
    assert format.pointed(folder, "best") in (None, *format.steps(folder))
    return latest


@pytest.mark.parametrize(
    ("world_size", "kills"),
    [(1, 2), (2, 2), pytest.param(1, 50, marks=pytest.mark.long), pytest.param(2, 50, marks=pytest.mark.long)],
)
def test_a_kill_at_any_moment_tears_none_and_the_next_goes_on(tmp_path: Path, world_size: int, kills: int) -> None:
    moments, newest = random.Random(kills), 0
    for _ in range(kills):
        killed(tmp_path, world_size, moments.uniform(0, 0.3))
        latest = none_is_torn(tmp_path)
        assert latest > newest, "it has begun anew"
        newest = latest

"""PowerSGD with a state that is saved and that no bad update spoils."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import group

from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed

GROUPS: list[Any] = []
"""Groups that are over. A thread of gloo's that lets go of one last, with a hook's work, joins itself and aborts."""


def gradients(inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients that one rank exchanges with itself, after each of ``inputs``."""
    found = []
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        GROUPS.append(group.WORLD)
        torch.manual_seed(0)
        first = nn.Linear(64, 64)
        plain = nn.Sequential(first, nn.Tanh(), nn.Linear(64, 3))
        strategy = plugins.load("trainkit.distributed.strategies", "ddp")(
            dist, comm_hook="powersgd", powersgd_start_step=2
        )
        model = strategy.parallelize(plain)
        for batch in inputs:
            model.zero_grad()
            model(batch).square().sum().backward()
            assert first.weight.grad is not None
            found.append(first.weight.grad.clone())
    return found


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, 64) for _ in range(count)]


def test_what_one_exchange_leaves_out_the_next_ones_bring() -> None:
    (batch,) = batches(1)
    whole, _, *thin = gradients([batch] * 12)
    ranks = [int(torch.linalg.matrix_rank(item)) for item in thin]
    assert ranks == [4] * 10
    error = torch.linalg.norm(thin[0] - whole) / torch.linalg.norm(whole)
    mean = torch.stack(thin).mean(0)
    assert torch.linalg.norm(mean - whole) / torch.linalg.norm(whole) < 0.5 * error


def test_an_update_that_is_not_finite_spoils_none_after_it() -> None:
    start, bad, end = batches(4), torch.full((32, 64), torch.inf), batches(7)[4:]
    without, spoilt = gradients([*start, *end]), gradients([*start, bad, *end])
    assert not spoilt[4].isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(without[4:], spoilt[5:], strict=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"find_unused_parameters": True}, "stay as they are"),
        ({"powersgd_start_step": 1}, "sends two whole"),
        ({"powersgd_rank": 0}, "at least one column"),
        ({"precision": "fp16"}, "loss scale"),
    ],
)
def test_where_it_cannot_be_it_is_refused(options: dict[str, Any], why: str) -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist, pytest.raises(UserError) as refused:
        plugins.load("trainkit.distributed.strategies", "ddp")(dist, comm_hook="powersgd", **options)
    assert why in refused.value.why
    for precision in ("fp16", "o2"):  # before anything is started
        with pytest.raises(UserError, match=f"powersgd does not go with train.precision={precision}"):
            load("ddp", ["strategy.comm_hook=powersgd", f"train.precision={precision}"])


def test_its_state_is_in_a_checkpoint_under_the_name_of_its_rank() -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        strategy = plugins.load("trainkit.distributed.strategies", "zero")(dist, comm_hook="powersgd")
        strategy.parallelize(nn.Sequential(nn.Linear(64, 64)))
        assert set(chain(strategy.tensors())) == {"count", "thin.0", "kept.0-of-1.0"}

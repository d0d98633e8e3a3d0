"""Bytes that each rank of a sharded training holds, and what is gathered."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import tensors
from tests.distributed.strategies.held import bytes_held, trained
from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.distributed.process_group import distributed
from trainkit.distributed.strategies import fsdp


class Found(NamedTuple):
    """On one rank: bytes of parameters, gradients and optimizer state; whole tensors; and of other places of the ranks
    the mesh, or why there is none."""

    held: int
    whole: dict[str, Any]
    meshes: list[Any]


PLACES = ([0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 3])
"""The node of each rank."""


def _found(env: RankEnv, folder: Path, options: dict[str, Any]) -> Found:
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = trained(dist, "fsdp", **options)
        held = bytes_held(model, optimizer)
        checkpoints = Checkpoints(folder, keep=3, dist=dist)
        checkpoints.save(model, optimizer, step=1, state={})
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        checkpoints.restore(model, optimizer)
        again = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []
        meshes = []
        for nodes in PLACES if env.world_size == 4 else ():
            elsewhere = replace(dist, env=replace(env, node_rank=nodes[env.rank], num_nodes=max(nodes) + 1))
            try:
                strategy = plugins.load("trainkit.distributed.strategies", "fsdp")(elsewhere, shard_within="node")
                meshes.append(strategy._mesh().mesh.tolist())
            except UserError as error:
                meshes.append(error.why)
        return Found(held, {name: value.tolist() for name, value in whole.items()}, meshes)


@pytest.mark.parametrize(
    ("ranks", "nodes", "options"), [(2, 1, {}), pytest.param(4, 2, {"shard_within": "node"}, marks=pytest.mark.nightly)]
)
def test_what_a_rank_holds_is_its_share_and_is_saved_and_restored(
    tmp_path: Path, ranks: int, nodes: int, options: dict[str, Any]
) -> None:
    """Also what is cut along another dimension than the first; and the ranks of a node shard together, however they are
    numbered."""
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        alone = bytes_held(*trained(dist, "single"))
    for found in run_ranks(ranks, _found, tmp_path, options, nodes=nodes):
        assert found.held == pytest.approx(alone / 2, rel=0.02)
        assert any(abs(number) > 0 for row in found.whole["position"][0] for number in row)
        assert {name: value.tolist() for name, value in tensors(tmp_path).items()} == found.whole
        uneven = "strategy.shard_within must be all where nodes have {} ranks: each needs equally many, two or more."
        assert found.meshes in ([], [[[0, 2], [1, 3]], uneven.format("1 and 3"), uneven.format("1")])


def _gathered(precision: str, **options: Any) -> dict[str, str]:
    seen: dict[str, str] = {}
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        model = plugins.load("trainkit.distributed.strategies", "fsdp")(dist, precision, **options).parallelize(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
        )

        def look(module: nn.Module, *_: object) -> None:
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
                seen[f"{type(module).__name__}.{name}"] = str(tensor.dtype).removeprefix("torch.")

        for module in model:
            module.register_forward_pre_hook(look)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(2, 3, 3, 3)).sum().backward()
    return seen


def test_weights_are_gathered_as_they_compute_and_norms_stay_as_they_are() -> None:
    seen, plain = _gathered("bf16"), _gathered("fp32")
    assert set(plain.values()) == {"float32", "int64"}
    assert _gathered("bf16", param_dtype="fp32") == plain
    assert {name for name, dtype in seen.items() if dtype == "bfloat16"} == (
        {"Conv2d.weight", "Conv2d.bias", "Linear.weight", "Linear.bias"} if fsdp.CASTS_SOME else set()
    )
    assert seen["BatchNorm2d.weight"] == seen["BatchNorm2d.running_var"] == "float32"

"""What each rank of a sharded training holds, counted in bytes; and what is gathered."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks
from tests.strategies.held import bytes_held, trained
from trainkit import plugins
from trainkit.checkpoint.save import Checkpoints
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.ranks import RankEnv
from trainkit.strategies import fsdp


def _held(env: RankEnv, options: dict[str, Any]) -> int:
    with distributed(env, use_gpu=False) as dist:
        return bytes_held(*trained(dist, "fsdp", **options))


@pytest.fixture(scope="module")
def whole() -> int:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        return bytes_held(*trained(dist, "single"))


@pytest.mark.parametrize(
    ("ranks", "nodes", "shards", "options"),
    [(2, 1, 2, {}), (4, 1, 4, {}), (4, 2, 2, {"shard_within": "node"})],
    ids=["2 ranks", "4 ranks", "2 nodes of 2 ranks"],
)
def test_parameters_gradients_and_optimizer_state_of_a_rank_are_its_share(
    whole: int, ranks: int, nodes: int, shards: int, options: dict[str, Any]
) -> None:
    held = run_ranks(ranks, _held, options, nodes=nodes)
    assert held == pytest.approx([whole / shards] * ranks, rel=0.02)


def _gathered(env: RankEnv, precision: str, options: dict[str, Any]) -> dict[str, str]:
    seen: dict[str, str] = {}
    with distributed(env, use_gpu=False) as dist:
        model = plugins.load("trainkit.strategies", "fsdp")(dist, precision, **options).parallelize(
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


def test_weights_are_gathered_as_they_compute_and_norms_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    single = RankEnv.single()
    seen = _gathered(single, "bf16", {})
    told = capsys.readouterr().out
    if not fsdp.CASTS_SOME:
        assert set(seen.values()) == {"float32", "int64"}
        assert told.startswith("Note: weights are gathered in fp32, twice the bytes of bf16: torch ")
        assert _gathered(single, "bf16", {"param_dtype": "fp32"}) == _gathered(single, "fp32", {}) == seen
        assert capsys.readouterr().out == ""
        return
    assert told == ""
    assert {name for name, dtype in seen.items() if dtype == "bfloat16"} == {
        "Conv2d.weight", "Conv2d.bias", "Linear.weight", "Linear.bias"
    }  # fmt: skip
    assert seen["BatchNorm2d.weight"] == seen["BatchNorm2d.running_var"] == "float32"
    assert "bfloat16" not in _gathered(single, "bf16", {"param_dtype": "fp32"}).values()
    assert "bfloat16" not in _gathered(single, "fp32", {}).values()


def _mesh(env: RankEnv, nodes: list[int]) -> tuple[list[Any], tuple[str, str]]:
    """The ranks of each node, where rank i is on node ``nodes[i]``."""
    env = replace(env, node_rank=nodes[env.rank], num_nodes=max(nodes) + 1)
    with distributed(env, use_gpu=False) as dist:
        strategy = plugins.load("trainkit.strategies", "fsdp")(dist, shard_within="node")
        try:
            mesh = strategy._mesh()
        except UserError as error:
            return [], (error.what, error.why)
        return mesh.mesh.tolist(), ("", "")


def test_the_ranks_of_a_node_shard_together_however_they_are_numbered() -> None:
    assert run_ranks(4, _mesh, [0, 1, 0, 1])[1][0] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([0, 1, 1], "Nodes have 1 and 2 ranks: equal parts of the model want equal numbers."),
        ([0, 1], "Each node has one rank: nothing would be sharded."),
    ],
)
def test_nodes_that_cannot_hold_a_replica_each_are_refused_on_every_rank(nodes: list[int], why: str) -> None:
    assert [told for _, told in run_ranks(len(nodes), _mesh, nodes)] == [
        ("strategy.shard_within=node is not possible here.", why)
    ] * len(nodes)


def _saved(env: RankEnv, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Saves, and tells whole tensors and what of the restored ones is not the same."""
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = trained(dist, "fsdp", **options)
        checkpoints = Checkpoints(folder, keep=3, dist=dist)
        checkpoints.save(model, optimizer, step=1, state={}, best_step=None)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        checkpoints.restore(model, optimizer)
        again = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []
        return {name: value.tolist() for name, value in whole.items()}


def test_what_is_cut_along_another_dimension_is_saved_and_restored_like_all(tmp_path: Path) -> None:
    whole, *_ = run_ranks(4, _saved, tmp_path, {"shard_within": "node"}, nodes=2)
    assert any(abs(number) > 0 for row in whole["position"][0] for number in row)
    assert {name: value.tolist() for name, value in tensors(tmp_path).items()} == whole


def test_offloading_to_the_host_is_refused_where_the_model_is_there_already() -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist, pytest.raises(UserError, match="needs GPUs"):
        plugins.load("trainkit.strategies", "fsdp")(dist, cpu_offload=True)

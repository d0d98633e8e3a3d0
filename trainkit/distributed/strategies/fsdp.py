"""FSDP2: parameters, gradients and optimizer state are sharded; each block is gathered when it is needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.modules.conv import _ConvNd

from trainkit.common.errors import require
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import repeated_blocks, synchronize_batchnorm

IMPORTS = ("torch._dynamo",)
SHARDED = True
GLOBAL_BATCHNORM = "strategy.sync_batchnorm=true"
EXCLUDES = {
    "strategy.shard_within=node, launch.nodes>1, launch.ntasks_per_node=1": (
        "Each node would hold the whole model: nothing is sharded over nodes of one rank.",
        "Use strategy.shard_within=all, or --ntasks-per-node 2 or more.",
    ),
}

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASTS_SOME = "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}
"""Before torch 2.15 all parameters of a block are cast, or none."""
_AUTOCAST_CASTS = (nn.Linear, _ConvNd, nn.MultiheadAttention)
"""Modules whose weights autocast casts when they compute."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Cuts of a model, and the places of its shards."""

    shard_within: Literal["all", "node"] = "all"
    """Ranks that share one copy of the model: all, or those of a ``node``, so that only gradients cross the network
    (HSDP)."""
    cpu_offload: bool = False
    """Keep the shards in host memory, where the optimizer then works."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass; ``false`` keeps them until the backward pass (ZeRO-2: faster,
    more memory)."""
    min_block_params: int = 10_000
    """Parameters of the smallest block that is sharded on its own."""


@dataclass(frozen=True)
class FSDP:
    """`fully_shard` on every repeated block of the model and on what is left. Fields: see `build`.

    A parameter without dimensions or without elements cannot be cut: every rank has the whole of it.
    """

    dist: Distributed
    sharding: Sharding
    gathered: torch.dtype | None
    """Format in which weights travel that autocast would cast; None: their own."""
    reduced: torch.dtype
    sync_batchnorm: bool
    numbers: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Places in the model of the parameters without dimensions: `spread` puts other tensors there."""

    @property
    def home(self) -> torch.device:
        return torch.device("cpu") if self.sharding.cpu_offload else self.dist.device

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self.sync_batchnorm:
            model = synchronize_batchnorm(model, self.dist)
        mesh = self._mesh()
        shards = mesh.size(mesh.ndim - 1)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 0:
                    self.numbers.append((module, name))
                elif parameter.numel() == 0:  # there is nothing to train
                    parameter.requires_grad_(False)
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.sharding.reshard_after_forward,
            "mp_policy": self._mixed_precision(model),
            "shard_placement_fn": lambda parameter: _placement(parameter, shards),
            "ignored_params": {parameter for parameter in model.parameters() if not _can_be_cut(parameter)},
        }
        if self.sharding.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy()
        for blocks in sharded_together(model, repeated_blocks(model, self.sharding.min_block_params)):
            fully_shard(blocks, **settings)
        fully_shard(model, **settings)
        return model

    @contextmanager
    def grad_sync(self, model: nn.Module, *, enabled: bool) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(enabled)
        yield
        if enabled and self.numbers and self.dist.world_size > 1:
            self._average_numbers()

    @torch.no_grad()
    def _average_numbers(self) -> None:
        """Average the gradients of the parameters without dimensions, which `fully_shard` leaves alone."""
        shared = dict.fromkeys(getattr(module, name) for module, name in self.numbers)
        parameters = [parameter for parameter in shared if parameter.requires_grad]
        if not parameters:
            return
        mean = torch.zeros(len(parameters), device=self.dist.device)
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                mean[index] = parameter.grad
        torch.distributed.all_reduce(mean)
        mean /= self.dist.world_size
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)

    def _mesh(self) -> DeviceMesh:
        """Put the ranks in a row, or in a row for each node as they really are: SLURM can deal them out in turns."""
        device = self.dist.device.type
        world_size = self.dist.world_size
        nodes: dict[int, list[int]] = {}
        if self.sharding.shard_within == "node":
            for rank, node in enumerate(self.dist.gather_json(self.dist.env.node_rank)):
                nodes.setdefault(node, []).append(rank)
        if len(nodes) < 2:
            return DeviceMesh(device, list(range(world_size)), mesh_dim_names=("shard",))
        sizes = sorted({len(ranks) for ranks in nodes.values()})
        must_be = f"all where nodes have {' and '.join(map(str, sizes))} ranks: each needs equally many, two or more"
        require(len(sizes) == 1 and sizes != [1], "strategy.shard_within", "node", must_be)
        return DeviceMesh(device, [nodes[node] for node in sorted(nodes)], mesh_dim_names=("replicate", "shard"))

    def _mixed_precision(self, model: nn.Module) -> MixedPrecisionPolicy:
        """Casts what autocast would cast, and nothing else: the model computes the same, and norms stay in fp32."""
        if self.gathered is None:
            return MixedPrecisionPolicy(reduce_dtype=self.reduced)
        cast: set[int] = set()
        for module in model.modules():
            if isinstance(module, _AUTOCAST_CASTS):
                cast.update(map(id, module.parameters(recurse=False)))
        settings: dict[str, Any] = {  # not by keyword: mypy reads the torch that is installed
            "param_dtype": self.gathered,
            "reduce_dtype": self.reduced,
            "cast_forward_inputs": False,
            "param_dtype_override_fn": lambda parameter: None if id(parameter) in cast else parameter.dtype,
        }
        return MixedPrecisionPolicy(**settings)


def _can_be_cut(parameter: Tensor) -> bool:
    return parameter.ndim > 0 and parameter.numel() > 0


def sharded_together(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """``blocks`` in lists for `fully_shard`, which takes a parameter once: those that share one are in one list, and
    those that share one with the rest of ``model`` in none, so that they are sharded with that."""
    inside: set[nn.Module] = set()
    for block in blocks:
        inside.update(block.modules())
    of_rest: set[nn.Parameter] = set()
    for module in model.modules():
        if module not in inside:
            of_rest.update(module.parameters(recurse=False))
    lists: list[list[nn.Module]] = []
    held: list[set[nn.Parameter]] = []
    """The parameters of each list."""
    for block in dict.fromkeys(blocks):
        together = [block]
        parameters = {item for item in block.parameters() if _can_be_cut(item)}
        for index in reversed(range(len(lists))):
            if held[index] & parameters:
                together = lists.pop(index) + together
                parameters |= held.pop(index)
        lists.append(together)
        held.append(parameters)
    return [together for together, parameters in zip(lists, held, strict=True) if not parameters & of_rest]


def _placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Cut along the first dimension, or, where that has too little for every rank, along the longest that is even: a
    position embedding [1, N, D] would lie on one rank."""
    even = [dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % shards == 0]
    if parameter.ndim and parameter.shape[0] < shards and even:
        return Shard(max(even, key=lambda dim: parameter.shape[dim]))
    return Shard(0)


def build(
    dist: Distributed,
    precision: str = "fp32",
    *,
    sharding: Sharding,
    param_dtype: Literal["auto", "fp32"] = "auto",
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    sync_batchnorm: bool = False,
) -> FSDP:
    """Options:

    ``param_dtype``: format in which weights are gathered; ``auto``: that of train.precision, half the bytes and the
    same results; norms and buffers stay in fp32. Before torch 2.15 it is fp32. ``reduce_dtype``: format in which
    gradients are summed. ``sync_batchnorm``: BatchNorm's statistics are those of all ranks; needs GPUs.
    """
    on_cpu = dist.device.type == "cpu"
    must_be = "false on CPUs: the shards are in host memory"
    require(not (on_cpu and sharding.cpu_offload), "strategy.cpu_offload", "true", must_be)
    casts = CASTS_SOME and param_dtype == "auto" and precision in ("bf16", "fp16")
    gathered = _DTYPES[precision] if casts else None
    return FSDP(dist, sharding, gathered, _DTYPES[reduce_dtype], sync_batchnorm)

"""Placement: how a process computes, and a plain model on its device: laid out, compiled, checkpointed, or spread."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.checkpoint.state import Held, Sent, load_where_named
from trainkit.common import process
from trainkit.common.errors import require
from trainkit.common.fileio import make_own
from trainkit.config.checks import strategy_traits
from trainkit.config.schema import Config
from trainkit.distributed.device import gpu_is_here
from trainkit.distributed.process_group import Distributed, is_sharded
from trainkit.distributed.strategies.base import Strategy, TakesHollow, repeated_blocks
from trainkit.run import user_lists

MIN_BLOCK_PARAMS = 10_000
"""Smaller blocks are not worth a compilation of their own."""
_META = torch.device("meta")


def wants_gpu(config: Config) -> bool:
    """Train on GPU: there is one, and the configuration does not say zero.

    Raises RefusedError where GPUs are granted and none is seen.
    """
    return config.launch.gpus_per_node != 0 and gpu_is_here()


def use_process(config: Config) -> None:
    """Set what holds for the whole process: the compiler's cache, and determinism."""
    use_own_compiler_cache()
    make_deterministic(config.train.deterministic)


def use_own_compiler_cache() -> None:
    """Keep compiled code where only this user can write, unless TORCHINDUCTOR_CACHE_DIR says where.

    torch keeps it in a folder of /tmp with a predictable name, and runs what it finds there, whoever made that folder.
    """
    if not process.is_set("TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(tempfile.gettempdir(), f"trainkit-{os.geteuid()}")
        if not make_own(folder):
            folder = user_lists.state_file("cache")
        process.set_variables({"TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor")})


def make_deterministic(asked: bool) -> None:
    """Keep kernels that may give other bits each time out of this process, or allow them.

    Where they are not, cuDNN tries its ways to convolve on the first images of each size, and takes the quickest.
    """
    torch.backends.cudnn.benchmark = not asked
    if asked:
        process.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, unless_set=True)  # before cuBLAS is first called
    if torch.are_deterministic_algorithms_enabled() != asked:  # saying so again would import torch's compiler
        torch.use_deterministic_algorithms(asked)


def to_device(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` on ``device``, before it is parallelized.

    Compiled in place, so that names in checkpoints stay those of the plain model. What is sharded has to be contiguous:
    there ``channels_last`` is the images' alone.
    """
    train = config.train
    model = model.to(device)
    if train.channels_last and not strategy_traits(config.strategy.name).sharded:
        model = model.to(memory_format=torch.channels_last)
    checkpoint_activations(model, train.activation_checkpointing)
    compiled = {"off": [], "model": [model], "blocks": repeated_blocks(model, MIN_BLOCK_PARAMS)}
    for module in compiled[train.compile]:
        module.compile()
    return model


def checkpoint_activations(model: nn.Module, which: Literal["none", "full"] | int) -> None:
    """Have all blocks of ``model`` (``full``), or every ``which``-th, keep their inputs only, and compute again what
    the backward pass needs; in place.

    The numbers stay the same to the last bit: dropout draws again what it drew, and BatchNorm does not count the second
    look at a batch. Only the blocks' ``forward`` changes, so that names in checkpoints stay those of the plain model.

    Raises UserError for a model with fewer blocks.
    """
    if which == "none":
        return
    every = 1 if which == "full" else which
    blocks = repeated_blocks(model, MIN_BLOCK_PARAMS)
    must_be = f"none: {type(model).__name__} has no blocks that repeat"
    if blocks:
        must_be = f"{len(blocks)} or less, or none: {type(model).__name__} has {len(blocks)} blocks that repeat"
    require(len(blocks) >= every, "train.activation_checkpointing", which, must_be)
    for block in blocks[every - 1 :: every]:
        norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=partial(_both_passes, norms))


def _both_passes(norms: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a block's first forward pass, and of its second."""
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm write what it learns from its input into copies that are thrown away."""
    own = [(module, dict(module._buffers)) for module in norms]
    for module, buffers in own:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


def parallelized(plain: nn.Module, strategy: Strategy, config: Config, dist: Distributed) -> nn.Module:
    """``plain`` on this rank's device, made by ``strategy`` one on all ranks, with the weights that rank 0 has.

    One without a parameter to train stays whole where the strategy keeps models whole: there is nothing to exchange.
    """
    if isinstance(strategy, TakesHollow):
        return spread(plain, strategy, config, dist)
    plain = to_device(plain, config, dist.device)
    if not any(parameter.requires_grad for parameter in plain.parameters()):
        return plain
    return strategy.parallelize(plain)


def spread(plain: nn.Module, strategy: TakesHollow, config: Config, dist: Distributed) -> nn.Module:
    """``plain``, made by ``strategy`` from shards, one tensor after the other, of what it is on rank 0: no other rank
    ever holds it whole.

    Args:
        plain: on the CPU; only rank 0's numbers count.
    """
    whole = _tensors(plain) if dist.is_main else {}
    model = strategy.parallelize(to_device(_emptied(plain), config, _META))
    own = _tensors(_emptied(model, strategy.home, dist.device))
    assert not dist.is_main or own.keys() == whole.keys()
    load_where_named(own, Sent(Held(whole), dist), dist)
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All of them: also the buffers that are in no checkpoint."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _emptied(model: nn.Module, shards: torch.device = _META, rest: torch.device = _META) -> nn.Module:
    """``model`` with empty tensors, on these devices, in the places of its own. What was one tensor in two places stays
    one, which `nn.Module.to_empty` does not see to."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old ones, or an id could come twice
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            places: dict[str, Any] = own
            for name, old in places.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty_like(old, device=shards if is_sharded(old) else rest).detach()
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = old, new
                places[name] = made[id(old)][1]
    return model

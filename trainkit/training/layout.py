"""A plain model made ready for its device: where it lies, in what layout, compiled or not, deterministic or not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.config.checks import strategy_traits
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.fileio import make_own
from trainkit.run import folder as run_folder
from trainkit.strategies.base import repeated_blocks

_MIN_BLOCK_PARAMS = 10_000
"""Smaller blocks are not worth a compilation of their own."""


def placed(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` on ``device``, before it is parallelized.

    Compiled in place, so that names in checkpoints stay those of the plain model. What is sharded has to be contiguous:
    there ``channels_last`` is the images' alone.
    """
    train = config.train
    model = model.to(device)
    if train.channels_last and not strategy_traits(config.strategy.name).sharded:
        settings: dict[str, Any] = {"memory_format": torch.channels_last}  # older stubs do not know the keyword
        model = model.to(**settings)
    checkpoint_activations(model, train.activation_checkpointing)
    for module in {"off": [], "model": [model], "blocks": repeated_blocks(model, _MIN_BLOCK_PARAMS)}[train.compile]:
        module.compile()
    return model


def make_deterministic(asked: bool) -> None:
    """Whether kernels that may give other bits each time are kept out of this process.

    Where they are not, cuDNN tries its ways to convolve on the first images of each size, and takes the quickest.
    """
    torch.backends.cudnn.benchmark = not asked
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it, before its first call
    if torch.are_deterministic_algorithms_enabled() != asked:  # saying so again would import torch's compiler
        torch.use_deterministic_algorithms(asked)


def use_own_compiler_cache() -> None:
    """Keep compiled code where only this user can write, unless TORCHINDUCTOR_CACHE_DIR says where.

    torch keeps it in a folder of /tmp with a predictable name, and runs what it finds there, whoever made that folder.
    """
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        own = Path(tempfile.gettempdir(), f"trainkit-{os.geteuid()}")
        folder = own if make_own(own) else run_folder.state_file("cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")


def checkpoint_activations(model: nn.Module, which: Literal["none", "full"] | int) -> None:
    """Have all blocks of ``model`` (``full``), or every ``which``-th, keep their inputs only, and compute again what
    the backward pass needs; in place.

    The numbers stay the same to the last bit: dropout draws again what it drew, and BatchNorm does not count the second
    look at a batch. Only the blocks' ``forward`` changes, so that names in checkpoints stay those of the plain model.

    Raises UserError for a model without so many blocks.
    """
    if which == "none":
        return
    every = 1 if which == "full" else which
    blocks = repeated_blocks(model, _MIN_BLOCK_PARAMS)
    if len(blocks) < every:
        raise UserError(
            f"train.activation_checkpointing={which} would do nothing.",
            why=f"{type(model).__name__} has {len(blocks)} blocks to throw activations away of.",
            fix="Leave it out" + (f", or use {len(blocks)} or less." if blocks else "."),
            key="train.activation_checkpointing",
        )
    for block in blocks[every - 1 :: every]:
        norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, norms))


def _contexts(norms: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first pass, and of the second."""
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: Sequence[nn.Module]) -> Iterator[None]:
    """What BatchNorm learns from its input goes into copies that are thrown away."""
    own = [(module, dict(module._buffers)) for module in norms]
    for module, buffers in own:
        module._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)

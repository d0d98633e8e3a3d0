"""Activation checkpointing: what a block has computed is thrown away and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import UserError
from trainkit.strategies.base import repeated_blocks

_MIN_BLOCK_PARAMS = 10_000


def checkpoint_activations(model: nn.Module, which: Literal["none", "full"] | int) -> None:
    """Have ``model`` keep the inputs only of all its blocks (``full``), or of every ``which``-th; in place.

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

"""Into which micro batches a rank's share of a global batch can be divided, and whether it may be."""

from __future__ import annotations

from trainkit.config.schema import Config
from trainkit.errors import UserError


def micro_batch_sizes(share: int, *, even: bool = False) -> list[int]:
    """Sizes that divide ``share``, ascending; ``even``: those that mixing pairs of images takes."""
    return [size for size in range(1, share + 1) if share % size == 0 and not (even and size % 2)]


def smaller(micro: int, share: int, *, even: bool = False) -> int:
    """The largest of them that is at most half as large as ``micro``; 0 if none is."""
    return max((size for size in micro_batch_sizes(share, even=even) if size <= micro // 2), default=0)


def check_accumulation(config: Config, world_size: int) -> None:
    """Raises UserError where an update is of several micro batches, and `strategy.static_graph` would meet them.

    torch fails an assertion of its own then, in the first backward pass.
    """
    train, static = config.train, config.strategy.options.get("static_graph") is True
    share = train.global_batch_size // world_size
    if static and train.given_micro_batch_size not in (None, share):
        raise UserError(
            f"strategy.static_graph=true cannot accumulate gradients over micro batches of {train.micro_batch_size}.",
            why="torch learns the graph from a first backward pass that exchanges gradients; one of several micro "
            "batches does not.",
            fix=f"Leave out strategy.static_graph, or use train.micro_batch_size={share}.",
            key="strategy.static_graph",
        )

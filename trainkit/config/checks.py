"""Which settings cannot hold together, and what a strategy says of itself to those who never load it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit import plugins
from trainkit.config.schema import Config, ImpossibleError
from trainkit.errors import UserError

_CHOICES: dict[str, tuple[Any, ...]] = {
    "RANKS": ("any", "one"),
    "GPUS_PER_RANK": (1, "all"),
    "LOOP": ("updates", "collaborative"),
}


@dataclass(frozen=True)
class StrategyTraits:
    """What planning, starting and reporting must know of a strategy."""

    ranks: str = "any"
    """``RANKS``: any, or one process on one node."""
    gpus_per_rank: int | str = 1
    """``GPUS_PER_RANK``: 1, or all that the process sees."""
    loop: str = "updates"
    """``LOOP``: updates of all ranks together, or collaborative: every rank is a peer with batches of its own."""


def strategy_traits(name: str) -> StrategyTraits:
    """What the file of strategy ``name`` states, else the defaults. Raises UserError for values that do not exist."""
    stated = plugins.stated("trainkit.strategies", name)
    for trait, choices in _CHOICES.items():
        if trait in stated and stated[trait] not in choices:
            raise UserError(
                f"Strategy '{name}' states {trait} = {stated[trait]!r}.",
                why=f"It is one of: {', '.join(map(repr, choices))}.",
                fix="Correct it in the file of the strategy, or leave it out.",
                key="strategy.name",
            )
    return StrategyTraits(**{trait.lower(): stated[trait] for trait in _CHOICES if trait in stated})


def check_combinations(config: Config) -> None:
    """Raises ImpossibleError for the first that cannot."""
    batch, micro = config.train.global_batch_size, config.train.given_micro_batch_size
    if micro is not None and batch % micro:
        possible = [size for size in (batch // micro * micro, (batch // micro + 1) * micro) if size]
        raise ImpossibleError(
            f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro}",
            keys=("train.global_batch_size", "train.micro_batch_size"),
            why="An update takes whole micro batches.",
            fix=f"Use train.global_batch_size={' or '.join(map(str, possible))}.",
        )
    if config.checkpoint.best.startswith("val/ema_") and config.train.ema_decay is None:
        raise ImpossibleError(
            f"checkpoint.best={config.checkpoint.best} and train.ema_decay=null",
            keys=("checkpoint.best", "train.ema_decay"),
            why="There are no averaged weights to judge by.",
            fix="Use train.ema_decay=0.9999, or checkpoint.best=val/acc1.",
        )
    odd = micro if micro is not None else batch
    if config.augment.mixes and odd % 2:
        name = "micro_batch_size" if micro is not None else "global_batch_size"
        raise ImpossibleError(
            f"train.{name}={odd} is odd, and augment.mixup_alpha or augment.cutmix_alpha mixes pairs of images",
            keys=(f"train.{name}", "augment.mixup_alpha", "augment.cutmix_alpha"),
            why="Both of a pair are in one micro batch.",
            fix=f"Use train.{name}={odd + 1}.",
        )
    if config.train.precision in ("fp16", "o2") and config.strategy.options.get("comm_hook") == "powersgd":
        raise ImpossibleError(
            f"strategy.comm_hook=powersgd does not go with train.precision={config.train.precision}",
            keys=("strategy.comm_hook", "train.precision"),
            why="What it keeps back for the next update is in units of a loss scale that changes.",
            fix="Use train.precision=bf16, or strategy.comm_hook=fp16.",
        )
    if config.train.memory_limit_mb is not None and config.train.micro_batch_size != "auto":
        raise ImpossibleError(
            f"train.memory_limit_mb={config.train.memory_limit_mb:g} and train.micro_batch_size={micro or 'null'}",
            keys=("train.memory_limit_mb", "train.micro_batch_size"),
            why="It bounds the size that is looked for, and none is looked for.",
            fix="Use train.micro_batch_size=auto, or leave train.memory_limit_mb out.",
        )
    if config.train.early_stopping_min_delta and config.train.early_stopping_patience is None:
        raise ImpossibleError(
            f"train.early_stopping_min_delta={config.train.early_stopping_min_delta:g} and "
            "train.early_stopping_patience=null",
            keys=("train.early_stopping_min_delta", "train.early_stopping_patience"),
            why="It says what counts as better, and nobody waits for that.",
            fix="Use train.early_stopping_patience=5, or leave train.early_stopping_min_delta out.",
        )
    if config.train.early_stopping_patience is not None and config.strategy.name == "hivemind":
        raise ImpossibleError(
            "train.early_stopping_patience does not go with strategy.name=hivemind",
            keys=("train.early_stopping_patience", "strategy.name"),
            why="Peers come and go: the one that validates cannot end the run for all others.",
            fix="Leave train.early_stopping_patience out; `python -m jobs.swarm stop` ends a run for all.",
        )
    if config.train.micro_batch_size == "auto" and config.strategy.name == "hivemind":
        raise ImpossibleError(
            "train.micro_batch_size=auto does not go with strategy.name=hivemind",
            keys=("train.micro_batch_size", "strategy.name"),
            why="A peer has no time to try sizes: its rounds begin and end by the clock.",
            fix="Give a number; each peer may have its own.",
        )
    if config.strategy.name == "hivemind" and config.collaborative.sync == "gradients":
        _check_gradients(config)
    if config.train.ema_decay is not None and config.strategy.name == "hivemind":
        raise ImpossibleError(
            f"train.ema_decay={config.train.ema_decay:g} does not go with strategy.name=hivemind",
            keys=("train.ema_decay", "strategy.name"),
            why="Peers average their weights with one another after each round.",
            fix="Leave train.ema_decay out.",
        )
    if config.train.precision == "o2" and config.strategy.name in ("fsdp", "hivemind"):
        raise ImpossibleError(
            f"train.precision=o2 does not go with strategy.name={config.strategy.name}",
            keys=("train.precision", "strategy.name"),
            why="Peers average fp32 weights."
            if config.strategy.name == "hivemind"
            else "Its shards are fp32 weights already; with fp16 it computes with copies of them.",
            fix="Use train.precision=fp16.",
        )
    if config.train.micro_batch_size == "auto" and config.strategy.options.get("static_graph") is True:
        raise ImpossibleError(
            "train.micro_batch_size=auto does not go with strategy.static_graph=true",
            keys=("train.micro_batch_size", "strategy.static_graph"),
            why="Sizes are tried in updates of several micro batches, and a static graph cannot accumulate gradients.",
            fix="Leave out strategy.static_graph, or use train.micro_batch_size=null: each rank's share at once.",
        )


def _check_gradients(config: Config) -> None:
    """What does not go with averaging gradients in a swarm."""
    if config.train.micro_batch_size is None:
        raise ImpossibleError(
            "collaborative.sync=gradients needs train.micro_batch_size",
            keys=("collaborative.sync", "train.micro_batch_size"),
            why="Peers gather an update of train.global_batch_size together, each in micro batches of its own size.",
            fix=f"Give a number that divides {config.train.global_batch_size}; each peer may have its own.",
        )
    if config.train.class_weights is not None:
        raise ImpossibleError(
            f"train.class_weights={config.train.class_weights} does not go with collaborative.sync=gradients",
            keys=("train.class_weights", "collaborative.sync"),
            why="They are weighed against those of the whole update, which no peer sees.",
            fix="Use collaborative.sync=diloco, or leave train.class_weights out.",
        )


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

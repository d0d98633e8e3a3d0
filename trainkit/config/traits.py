"""What a strategy says of itself to those who never load it: its file states constants (`trainkit.plugins.stated`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit import plugins
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

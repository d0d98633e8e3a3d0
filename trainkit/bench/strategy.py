"""Which strategy is fastest here, and which needs the least memory?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.bench import columns, words
from trainkit.bench.arms import Arm, Bench, LeftOut, Where
from trainkit.config.checks import strategy_traits

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

NAMES = ("single", "dp", "ddp", "zero", "fsdp", "hsdp")
_SETTINGS = {
    "fsdp": ("strategy.name=fsdp", "strategy.shard_within=all"),
    "hsdp": ("strategy.name=fsdp", "strategy.shard_within=node"),
}
"""Of arms that are more than a strategy's name."""


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All that can be here, each with the same global batch and the same micro batch on a device: so they do the same
    updates, and only who does them differs."""
    given, size = config.train.given_micro_batch_size, config.train.global_batch_size
    micro = given or max(size // where.world_size, 1)
    found: list[Arm | LeftOut] = []
    for name in asked or NAMES:
        why, shards_within = "", name == "hsdp"
        traits = strategy_traits("fsdp" if name in _SETTINGS else name)
        splits = traits.gpus_per_rank == "all"
        if splits and where.gpus < 2:
            why = f"it splits batches over the GPUs of one process, which sees {where.gpus or 'none'}"
        elif shards_within and (where.nodes < 2 or where.ranks_per_node < 2):
            why = "it shards within each of several nodes: it takes two with two ranks each"
        if why:
            found.append(LeftOut(name, why))
            continue
        own = micro * where.gpus if splits and size % (micro * max(where.gpus, 1)) == 0 else micro
        overrides = [*_SETTINGS.get(name, (f"strategy.name={name}",))]
        overrides += [f"train.micro_batch_size={own}"] * (config.train.micro_batch_size != "auto")
        found.append(Arm(name, tuple(overrides), (0,) if traits.ranks == "one" else None))
    return found


def meaning(results: Results) -> str:
    first, told = results.rows[0], [row for row in results.rows[1:] if row.ratio is not None]
    losses = words.losses_alike(results)
    if not told:
        return f"{words.no_difference(results)} {losses}".rstrip()
    best = max(told, key=lambda row: row.speed)
    if best.speed > 1:
        gain = f"{best.name} trains {best.speed:.2f} x as fast as {first.name} here"
    else:
        gain = f"Nothing is clearly faster than {first.name} here, {best.name} trains {best.speed:.2f} x as fast"
    lean = min(
        (row for row in results.rows[1:] if row.memory_ratio), key=lambda row: row.memory_ratio or 1, default=None
    )
    spared = ""
    if lean is not None and (lean.memory_ratio or 1) < 1:
        spared = f", and {lean.name} needs the least memory of a rank, {lean.memory_ratio:.2f} of {first.name}'s"
    use = best.name if best.speed > 1 else first.name
    named = "fsdp strategy.shard_within=node" if use == "hsdp" else use
    return f"{gain}{spared}; use strategy.name={named}{words.untold(results)}. {losses}".rstrip()


def notes(config: Config, where: Where) -> list[str]:
    size = config.train.given_micro_batch_size or config.train.global_batch_size // where.world_size
    return [f"Every arm makes updates of {config.train.global_batch_size} images, {size} at a time on a device."]


BENCH = Bench(
    name="strategy",
    question="Which strategy helps here?",
    arms=arms,
    meaning=meaning,
    columns=(*columns.COMPARED, columns.EXPOSED, columns.LOSS),
    names=NAMES,
    dispensable=("min to max", "exposed"),
    fewest_ranks=2,
    strategy="ddp",
    notes=notes,
)

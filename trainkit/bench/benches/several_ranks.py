"""Benches of several ranks: strategies with the same updates, numbers of ranks, and the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.bench import base
from trainkit.bench.base import (
    Arm,
    ArmFigures,
    Bench,
    Results,
    SkippedArm,
    Where,
    compare_losses,
    fastest,
    percent,
    rate,
)
from trainkit.common import terminal
from trainkit.common.terminal import plural

if TYPE_CHECKING:
    from trainkit.config.schema import Config

STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": ("strategy.name=single",),
    "dp": ("strategy.name=dp",),
    "ddp": ("strategy.name=ddp",),
    "zero": ("strategy.name=zero",),
    "fsdp": ("strategy.name=fsdp", "strategy.shard_within=all"),
    "hsdp": ("strategy.name=fsdp", "strategy.shard_within=node"),
}
"""The arms of bench strategy, with their settings."""
STRONG = "same batch for all"
WEAK = "as much for each"
GRADIENTS = "gradients"
NETWORKS = {"within": "within a node", "between": "between nodes", "all": "over all ranks"}


def strategy_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """All that can be here, with the same global batch and the same micro batch on a device: so the same updates."""
    from trainkit.config.checks import strategy_traits

    size = config.train.global_batch_size
    micro = config.train.given_micro_batch_size or max(size // where.world_size, 1)
    found: list[Arm | SkippedArm] = []
    for name in asked or STRATEGIES:
        settings = STRATEGIES[name]
        traits = strategy_traits(settings[0].partition("=")[2])
        splits = traits.gpus_per_rank == "all"
        if splits and where.gpus < 2:
            sees = where.gpus or "none"
            found.append(SkippedArm(name, f"it splits batches over the GPUs of one process, which sees {sees}"))
            continue
        if name == "hsdp" and (where.nodes < 2 or where.ranks_per_node < 2):
            why = "it shards within each node: it needs two nodes with two ranks each"
            found.append(SkippedArm(name, why))
            continue
        if config.train.micro_batch_size != "auto":
            own = micro
            if splits and size % (micro * where.gpus) == 0:
                own = micro * where.gpus
            settings = (*settings, f"train.micro_batch_size={own}")
        ranks = None
        if traits.ranks == "one":
            ranks = (0,)
        found.append(Arm(name, settings, ranks))
    return found


def strategy_meaning(results: Results) -> str:
    losses = compare_losses(results)
    if not results.compared:
        return f"{results.no_difference()} {losses}".rstrip()
    best, said = fastest(results)
    lean = min(results.rows, key=lambda row: row.memory_ratio or 1.0)
    if lean.memory_ratio is not None and lean.memory_ratio < 1:
        first = results.rows[0].name
        said += f", and {lean.name} needs the least memory per rank, {lean.memory_ratio:.2f} of {first}'s"
    named = best.name
    if named == "hsdp":
        named = "fsdp strategy.shard_within=node"
    return f"{said}; use strategy.name={named}. {losses}".rstrip()


def strategy_notes(config: Config, where: Where) -> list[str]:
    size = config.train.given_micro_batch_size or config.train.global_batch_size // where.world_size
    return [f"Every arm makes updates of {config.train.global_batch_size} images, {size} at a time on a device."]


STRATEGY = Bench(
    name="strategy", question="Which strategy helps here?", arms=strategy_arms, meaning=strategy_meaning,
    names=tuple(STRATEGIES), columns=(*base.COMPARED, base.EXPOSED, base.LOSS),
    dispensable=("min to max", "exposed"), same_updates=True, fewest_ranks=2, strategy="ddp", notes=strategy_notes,
)  # fmt: skip


def scaling_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """The same batch for all ranks (strong scaling) and as much for each (weak), over the first ranks of the job."""
    size = config.train.global_batch_size
    each = max(size // where.world_size, 1)
    left_out: list[Arm | SkippedArm] = []
    strong: list[Arm | SkippedArm] = []
    weak: list[Arm | SkippedArm] = []
    first = ""
    for count in list(map(int, asked)) or scaling_counts(where):
        name = plural(count, "rank")
        if count > where.world_size or size % count:
            here = plural(where.world_size, "rank")
            left_out.append(SkippedArm(name, f"{here} are here, and {size} images are divided among them"))
            continue
        ranks = tuple(range(count))
        strong.append(Arm(name, (), ranks, base=first, series=STRONG))
        first = first or name
        overrides = (f"train.global_batch_size={each * count}",)
        weak.append(Arm(f"{name} x {each}", overrides, ranks, base=f"{first} x {each}", series=WEAK))
    return left_out + strong + weak


def scaling_counts(where: Where) -> list[int]:
    """Numbers of ranks that are compared: 1, 2, 4 ... within a node, then whole nodes; all divide that of all."""
    counts = set()
    for power in range(where.ranks_per_node.bit_length()):
        if where.ranks_per_node % (1 << power) == 0:
            counts.add(1 << power)
    for nodes in range(1, where.nodes + 1):
        if where.nodes % nodes == 0:
            counts.add(where.ranks_per_node * nodes)
    return sorted(counts)


def _count(row: ArmFigures) -> int:
    """Number of ranks of an arm of this bench."""
    return len(row.arm.ranks or ())


def efficiency(row: ArmFigures, results: Results) -> float | None:
    """The useful share of the ranks that an arm has more than the one that it is compared with."""
    first = results.series(row.arm.series)[0]
    if row.ratio is None or row is first:
        return None
    return row.ratio * _count(first) / _count(row)


def scaling_meaning(results: Results) -> str:
    most = max(map(_count, results.rows))
    gains = []
    shares = []
    exposed = 0.0
    for row in results.rows:
        share = efficiency(row, results)
        if share is None or _count(row) < most:
            continue
        fewer = plural(_count(results.series(row.arm.series)[0]), "rank")
        how = "with the same batch" if row.arm.series == STRONG else "with as much for each"
        gains.append(f"{row.speed:.2f} x as fast as {fewer} {how} (efficiency {percent(share)})")
        shares.append(share)
        exposed = max(exposed, row.extra.get("exposed_share", 0.0))
    if not gains:
        return results.no_difference()
    worth = "they are not worth it"
    if shares[0] >= 0.8:
        worth = "they are worth it"
    elif shares[0] * most > 1.1:
        worth = "they help"
    waits = f"; {percent(exposed)} of an update is communication that computation does not hide"
    return f"{plural(most, 'rank')} train {' and '.join(gains)}{waits}: {worth}."


SCALING = Bench(
    name="scaling", question="Do more ranks help here?", arms=scaling_arms, meaning=scaling_meaning,
    columns=(
        base.ARM, base.RATE, base.SPREAD, ("speed-up", base.SPEED[1]),
        ("efficiency", lambda row, results: percent(efficiency(row, results))), base.EXPOSED, base.MEMORY,
    ),
    dispensable=("min to max", "memory"), fewest_ranks=2, strategy="ddp",
)  # fmt: skip


def network_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """All-reduces of several sizes, and of this model's gradients: over a node, a rank of each node, and all ranks."""
    messages = {}
    for size in (1 << 16, 1 << 20, 1 << 24):
        messages[terminal.size(size)] = size
    if where.gpu:  # gloo would take seconds for it
        messages[terminal.size(1 << 28)] = 1 << 28
    if where.params:
        messages[f"{GRADIENTS}, {terminal.size(4 * where.params)}"] = 4 * where.params
    found: list[Arm | SkippedArm] = []
    seen: set[tuple[int, ...]] = set()  # on one node, or with one rank on each, "all" are the same ranks
    for name in asked or NETWORKS:
        ranks = _ranks_of(name, where)
        if len(ranks) < 2:
            why = "there is one rank on a node" if name == "within" else "there is one node"
            found.append(SkippedArm(name, why))
        elif ranks not in seen:
            for text, size in messages.items():
                found.append(Arm(f"{name}, {text}", (), ranks, "reduce", size, series=name))
        seen.add(ranks)
    return found


def _ranks_of(network: str, where: Where) -> tuple[int, ...]:
    """Ranks that exchange messages over one of `NETWORKS`."""
    ranks = []
    for place in where.places:
        is_within = network == "within" and place.node_rank == 0
        is_between = network == "between" and place.local_rank == 0
        if is_within or is_between or network == "all":
            ranks.append(place.rank)
    return tuple(ranks)


def milliseconds(row: ArmFigures) -> str:
    """Duration of one exchange, in words."""
    if "seconds" not in row.extra:
        return base.NONE
    return f"{1000 * row.extra['seconds']:.3g} ms"


def network_meaning(results: Results) -> str:
    moves = []
    for name, words in NETWORKS.items():
        best = max((row.median for row in results.series(name)), default=0.0)
        if best:
            moves.append(f"{rate(best)} GB/s {words}")
    said = f"An all-reduce moves {results.roughly}{', '.join(moves)}"
    own = [row for row in results.ran if GRADIENTS in row.name]
    if own:
        size = own[-1].name.rpartition(", ")[2]
        said += f"; exchanging this model's gradients ({size}) takes {milliseconds(own[-1])} an update"
    return f"{said}."


NETWORK = Bench(
    name="network", question="How fast is the network here?", arms=network_arms, meaning=network_meaning,
    names=tuple(NETWORKS),
    columns=(base.ARM, ("GB/s", base.RATE[1]), base.SPREAD, ("takes", lambda row, results: milliseconds(row))),
    amount="bytes", unit="GB/s", scale=1e-9, fewest_ranks=2, strategy="ddp",
)  # fmt: skip

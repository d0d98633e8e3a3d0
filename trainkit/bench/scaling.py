"""How much faster are more ranks, with the same batch for all of them (strong) and with as much for each (weak)?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.bench import columns, words
from trainkit.bench.arms import Arm, Bench, LeftOut, Where

if TYPE_CHECKING:
    from trainkit.bench.results import Results, Row
    from trainkit.config.schema import Config

STRONG, WEAK = "same batch for all", "as much for each"


def counts(where: Where) -> list[int]:
    """Numbers of ranks that are compared: 1, 2, 4 ... within a node, then whole nodes; all divide that of all."""
    per_node, nodes = where.ranks_per_node, where.nodes
    within = [1 << power for power in range(per_node.bit_length()) if per_node % (1 << power) == 0]
    between = [per_node * count for count in range(1, nodes + 1) if nodes % count == 0]
    return sorted({*within, *between})


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """Strong and weak scaling over the same numbers of ranks, the first ones of the job."""
    found: list[Arm | LeftOut] = []
    chosen = [int(name) for name in asked] or counts(where)
    size = config.train.global_batch_size
    each = max(size // where.world_size, 1)
    whole = [count for count in chosen if count <= where.world_size and size % count == 0]
    found += [
        LeftOut(
            words.ranks(count), f"{words.ranks(where.world_size)} are here, and {size} images are divided among them"
        )
        for count in chosen
        if count not in whole
    ]
    for series in (STRONG, WEAK):
        base = ""
        for count in whole:
            name = words.ranks(count) + (f" x {each}" if series == WEAK else "")
            overrides = (f"train.global_batch_size={each * count}",) if series == WEAK else ()
            found.append(
                Arm(
                    name,
                    overrides,
                    tuple(range(count)),
                    base=base or (name if series == WEAK else ""),
                    series=series,
                    x=count,
                )
            )
            base = base or name
    return found


def efficiency(row: Row, results: Results) -> float | None:
    """Of the ranks that an arm has more than the one that it is compared with, what share is of use."""
    own = [other for other in results.rows if other.arm.series == row.arm.series]
    return None if row.ratio is None or row is own[0] else row.speed / (row.arm.x / own[0].arm.x)


def meaning(results: Results) -> str:
    most = max(row.arm.x for row in results.rows)
    parts = []
    for series, how in ((STRONG, "with the same batch"), (WEAK, "with as much for each")):
        own = [row for row in results.rows if row.arm.series == series]
        row = next((row for row in own if row.arm.x == most), None)
        share = None if row is None else efficiency(row, results)
        if row is not None and share is not None:
            parts.append((f"{row.speed:.2f} x as fast as {words.ranks(int(own[0].arm.x))} {how}", share, row))
    if not parts:
        return words.no_difference(results)
    exposed = max(row.extra.get("exposed_share", 0.0) for _, _, row in parts)
    said = " and ".join(f"{text} (efficiency {columns.percent(share)})" for text, share, _ in parts)
    waits = f"; {columns.percent(exposed)} of an update is communication that no computation hides"
    strong = parts[0][1]
    worth = "they are worth it" if strong >= 0.8 else "they help" if strong * most > 1.1 else "they are not worth it"
    return f"{words.ranks(int(most))} train {said}{waits}: {worth}."


BENCH = Bench(
    name="scaling",
    question="Do more ranks help here?",
    arms=arms,
    meaning=meaning,
    columns=(
        columns.ARM,
        columns.RATE,
        columns.SPREAD,
        ("speed-up", columns.SPEED[1]),
        ("efficiency", lambda row, results: columns.percent(efficiency(row, results))),
        columns.EXPOSED,
        columns.MEMORY,
    ),
    dispensable=("min to max", "memory"),
    same_updates=False,
    fewest_ranks=2,
    strategy="ddp",
    axis="ranks",
    ideal=True,
)
